"""uvicorn in a thread of the daemon."""
from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tightrank import sockets
from tightrank.edge import Connection
from tightrank.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """For `Server`. Raises ConfigError."""
    try:
        return sockets.bind(host, port)
    except OSError as error:
        raise ConfigError(f"http.host, http.port: {host}:{port} cannot be listened on ({error.strerror}); give another port",
                          cause="port-taken") from None


class Server:
    """uvicorn in a thread of its own, from now on, on a socket that is bound already: one in use is found before any start.
    `closed` is called, in that thread, with (address, port) of each client whose connection has ended."""

    def __init__(self, app: FastAPI, listening: socket.socket,
                 closed: Callable[[tuple[str, int] | None], None] = lambda peer: None) -> None:
        told = type("Connection", (Connection,), {"closed": staticmethod(closed)})
        config = uvicorn.Config(app, http=told, ws="none", loop="asyncio", lifespan="off", log_level="warning",
                                access_log=False, server_header=False, date_header=False, timeout_graceful_shutdown=1)
        self._server = sockets.QuietServer(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the server within about 2 s; open event streams are cut."""
        self._server.ask_to_exit()
        self._thread.join(5.0)
