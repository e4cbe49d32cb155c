"""Builds the gateway's parts and serves until it is told to stop."""
from __future__ import annotations

import asyncio
import math
import socket
import sys
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tightrank.config import Gateway
from tightrank.errors import ConfigError
from tightrank.gateway.app import App
from tightrank.gateway.canary import Pairs
from tightrank.gateway.handle import Handler
from tightrank.gateway.leg import session
from tightrank.gateway.peers import Peers
from tightrank.gateway.probe import Prober
from tightrank.gateway.records import Peer
from tightrank.gateway.supervisors import Supervisors
from tightrank.gateway.tripwire import Tripwire
from tightrank.gateway.watchdog import Watchdog
from tightrank.sockets import QuietServer, bind

HEADER_BYTES = 64 << 10
HEADER_SECONDS = 10.0          # for a request line and headers to have come whole
LAST_WORDS_SECONDS = 2         # after the drain, for error events to get out
IDLE_SECONDS = 75              # a client's connection between two requests


class Connection(H11Protocol):
    """Closes a connection whose request does not come, be it the first or a later one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_headers()              # what came behind the last request may be half of the next

    def _watch_headers(self) -> None:
        """The limit runs while a request has begun to come and is not whole."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._limit is not None:
            self._limit.cancel()
            self._limit = None
        elif not answering and self._limit is None and self.conn.trailing_data[0]:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    _limit: asyncio.TimerHandle | None = None

    def _wait_for_headers(self) -> None:
        self._limit = self.loop.call_later(HEADER_SECONDS, self.transport.abort)


def run(settings: Gateway) -> int:
    """Serves until SIGTERM or SIGINT, then until what is in flight has ended. Returns the exit code. Raises ConfigError."""
    try:
        listening = bind(settings.host, settings.port)
    except OSError as error:
        raise ConfigError(f"gateway.host, gateway.port: {settings.host}:{settings.port} cannot be listened on "
                          f"({error.strerror}); give another port", cause="port-taken") from None
    return asyncio.run(_serve(settings, listening))


async def _serve(settings: Gateway, listening: socket.socket) -> int:
    peers = Peers()
    async with session() as http:
        supervisors = Supervisors(http, peers, settings.supervisors)
        prober = Prober(http, peers, settings.engine_key)
        pairs = Pairs(http, peers, settings.canary_seconds, settings.engine_key)
        peers.on_doubt, peers.on_change = prober.start, pairs.look
        peers.named(Peer(id=w.name, name=w.name, engine=w.engine, role=w.role, url=w.url.rstrip("/"), model=w.model,
                         transfer_host=_host(w.url), transfer_port=w.transfer_port, longest_prompt_tokens=w.context)
                    for w in settings.workers)
        app = App(Handler(http, peers, pairs), peers, pairs, supervisors, settings.body_limit_bytes, settings.in_flight)
        watchdog = Watchdog(peers, supervisors, settings.silence_seconds)
        beside = [asyncio.ensure_future(part.run()) for part in (supervisors, pairs, watchdog, Tripwire(peers))]
        server = _Server(app, settings)
        print(f"tightrank gateway on http://{settings.host}:{settings.port}", file=sys.stderr, flush=True)
        serving = asyncio.ensure_future(server.serve([listening]))
        done, _ = await asyncio.wait({serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
        server.ask_to_exit()
        await serving
        for part in beside:
            part.cancel()
        for part in done - {serving}:
            part.result()                  # a part that ends by itself is a fault of ours: raised here
        return 0


class _Server(QuietServer):
    """The signal handlers are ours: the first asks to drain, the second ends."""

    def __init__(self, app: App, settings: Gateway) -> None:
        super().__init__(uvicorn.Config(
            app, http=Connection, ws="none", loop="asyncio", lifespan="off", log_level="warning", access_log=False,
            server_header=False, date_header=False, h11_max_incomplete_event_size=HEADER_BYTES, timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + LAST_WORDS_SECONDS))
        self._app, self._drain_seconds = app, settings.drain_seconds

    def handle_exit(self, sig: int, frame: object) -> None:
        self.force_exit = self._app.draining or self.force_exit
        if not self._app.draining:
            asyncio.get_running_loop().call_later(self._drain_seconds, self._app.end_all)
        self._app.draining = True
        self.ask_to_exit()


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""
