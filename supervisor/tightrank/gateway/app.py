"""The ASGI application: our own endpoints, and everything else through the handler. It never raises to the server."""
from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from tightrank import __version__
from tightrank.gateway import intake
from tightrank.gateway.canary import Pairs
from tightrank.gateway.exchange import Exchange, Streamed
from tightrank.gateway.handle import Handler
from tightrank.gateway.metrics import CONTENT_TYPE, Meter
from tightrank.gateway.peers import Peers
from tightrank.gateway.records import LegFailed, Standing
from tightrank.gateway.refusal import Refusal
from tightrank.gateway.supervisors import Supervisors

# Of an engine's headers: what is about the connection is not for the client, and the length is ours to say.
_NOT_SENT_ON = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server", "trailer", "upgrade",
                "proxy-authenticate", "x-request-id"}


class App:
    """`limit_bytes` of a body, `most` requests at once."""

    def __init__(self, handler: Handler, peers: Peers, pairs: Pairs, supervisors: Supervisors, limit_bytes: int,
                 most: int) -> None:
        self._handler, self._peers, self._pairs, self._supervisors = handler, peers, pairs, supervisors
        self._limit_bytes, self._most = limit_bytes, most
        self._in_flight = 0
        self._exchanges: list[list[Exchange]] = []         # of the requests that are being answered
        self._meter = Meter()
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        own = {"/livez": self._livez, "/readyz": self._readyz, "/health": self._readyz, "/status": self._status,
               "/metrics": self._metrics}.get(scope["path"])
        if own is not None and scope["method"] in ("GET", "HEAD"):
            status, kind, body = own()
            await _send(send, status, {"Content-Type": kind, "Cache-Control": "no-store"}, body)
            return
        await self._serve(scope, receive, send)

    def end_all(self) -> None:
        """The time to drain is over: who still waits is told so."""
        for exchange in [each for exchanges in self._exchanges for each in exchanges]:
            exchange.end("the gateway is stopping")

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = _Client(scope, receive, send, time.monotonic())
        self._in_flight += 1
        try:
            if self._in_flight > self._most:
                raise Refusal(429, "too_many_requests", f"{self._most} requests are in flight (gateway.in_flight)",
                              retry_after=1)
            asked = await intake.read(scope, receive, self._limit_bytes)
            client.asked = asked
            await self._answer(client)
        except Refusal as refusal:
            await self._refuse(client, refusal)
        except (asyncio.CancelledError, OSError):
            self._meter.gone += 1                  # the client has left, or we end
        except Exception as error:  # noqa: BLE001 - the HTTP edge: a fault of ours costs one answer
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            await self._refuse(client, Refusal(500, "internal_error", "a fault of the gateway: see its log"))
        finally:
            self._in_flight -= 1

    async def _answer(self, client: _Client) -> None:
        """Serves it while its client is there; when that leaves, the engines are told at once."""
        exchanges: list[Exchange] = []
        self._exchanges.append(exchanges)
        work = asyncio.ensure_future(self._forward(client, exchanges))
        left = asyncio.ensure_future(client.left())
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            await work
        finally:
            left.cancel()
            work.cancel()
            self._exchanges.remove(exchanges)
            for exchange in exchanges:
                exchange.close()

    async def _forward(self, client: _Client, exchanges: list[Exchange]) -> None:
        asked = client.asked
        assert asked is not None
        answer, exchange = await self._handler.answer(asked, exchanges.append)
        route = ",".join(peer.id for peer in exchange.route.peers)
        headers = {**{k: v for k, v in answer.headers.items() if k.lower() not in _NOT_SENT_ON},
                   "X-Request-Id": asked.request_id, "X-Tightrank-Worker": route}
        if asked.generates:
            self._meter.first(time.monotonic() - client.since)
        self._count(client, answer.status)
        if not isinstance(answer, Streamed):
            await client.send_whole(answer.status, headers, answer.body)
            return
        await client.begin(answer.status, {**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        try:
            await client.send_part(answer.first)
            async for event in answer.rest:
                await client.send_part(event)
        except LegFailed as failure:
            self._meter.cut += 1
            await client.send_part(self._handler.cut(failure).event(asked.path))
        await client.end()

    async def _refuse(self, client: _Client, refusal: Refusal) -> None:
        if client.begun:
            return                                 # nothing can be said any more; the server cuts the connection
        self._count(client, refusal.status, refusal.code)
        headers = refusal.headers()
        if client.asked is not None:
            headers["X-Request-Id"] = client.asked.request_id
        elif refusal.status != 400:
            headers["Connection"] = "close"        # what is left of its body is not worth reading
        with contextlib.suppress(OSError):
            await client.send_whole(refusal.status, headers, refusal.body())

    def _count(self, client: _Client, status: int, reason: str = "") -> None:
        path = client.asked.path if client.asked is not None else "other"
        self._meter.answers[path, status, reason] += 1

    # --- our own endpoints --------------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str]:
        """Whether a request can be served, and why not."""
        if self.draining:
            return False, "the gateway is stopping"
        members = list(self._peers.members.values())
        if self._pairs.ready() or any(m.standing is Standing.UP and m.peer.role == "both" for m in members):
            return True, ""
        reasons = [f"{m.peer.id}: {m.why}" for m in members if m.standing is not Standing.UP]
        reasons += [f"{row['prefill']} + {row['decode']}: {row['why']}" for row in self._pairs.to_json() if not row["paired"]]
        reasons += [f"{url}: {why}" for url, why in self._supervisors.states.items() if why]
        return False, "; ".join(reasons) or "no engine is known yet"

    def _livez(self) -> tuple[int, str, bytes]:
        return _json(200, {"alive": True})

    def _readyz(self) -> tuple[int, str, bytes]:
        ready, reason = self.readiness()
        return _json(200 if ready else 503, {"ready": ready, "reason": reason, "workers": self._peers.to_json(),
                                             "pairs": self._pairs.to_json()})

    def _status(self) -> tuple[int, str, bytes]:
        ready, reason = self.readiness()
        return _json(200, {"version": __version__, "ready": ready, "reason": reason, "draining": self.draining,
                           "in_flight": self._in_flight, "workers": self._peers.to_json(), "pairs": self._pairs.to_json(),
                           "supervisors": [{"url": url, "heard": not why, "why": why}
                                           for url, why in self._supervisors.states.items()]})

    def _metrics(self) -> tuple[int, str, bytes]:
        text = self._meter.render(self._peers, self._handler, self._in_flight, self.readiness()[0])
        return 200, CONTENT_TYPE, text.encode()


class _Client:
    """The client's side of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, since: float) -> None:
        self.since = since
        self.asked: intake.Asked | None = None
        self.begun = False
        self._receive, self._send = receive, send

    async def left(self) -> None:
        """Ends when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.begun = True
        await _send(self._send, status, headers, body)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": _raw(headers)})

    async def send_part(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status,
                "headers": [*_raw(headers), (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _json(status: int, body: Any) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body).encode()
