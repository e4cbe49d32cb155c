"""uvicorn in a thread of the daemon."""
from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from fastapi import FastAPI

from tightrank.edge import Connection


class _Quiet(uvicorn.Server):
    """uvicorn without its ten looks a second whether it should exit, which cost 0.6 % of a core. They also keep the Date
    header fresh, so that is off."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()
        self._running_loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._running_loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._end.wait()

    def ask_to_exit(self) -> None:
        """From any thread."""
        self.should_exit = True
        if self._running_loop is not None and not self._running_loop.is_closed():
            self._running_loop.call_soon_threadsafe(self._end.set)


class Server:
    """uvicorn in a thread of its own, from now on, on a socket that is bound already: one in use is found before any start."""

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        config = uvicorn.Config(app, http=Connection, ws="none", loop="asyncio", lifespan="off", log_level="warning",
                                access_log=False, server_header=False, date_header=False, timeout_graceful_shutdown=1)
        self._server = _Quiet(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the server within about 2 s; open event streams are cut."""
        self._server.ask_to_exit()
        self._thread.join(5.0)
