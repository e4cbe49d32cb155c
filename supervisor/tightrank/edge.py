"""The HTTP edge: errors in OpenAI's shape, the limits on bodies and connections, and the event stream."""
from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tightrank.report import Journal

BODY_BYTES = 64 << 10
BODY_SECONDS = 10.0
SEND_SECONDS = 10.0          # a client that takes nothing for this long is dropped; it comes back with Last-Event-ID
REQUEST_SECONDS = 15.0       # for a new connection's first request to have come whole
CONNECTIONS = 256            # each costs a descriptor of the daemon, which needs its own (1024 is a usual limit)
STREAMS = 32                 # open event streams; each costs a socket and a task


_TYPES = {429: "rate_limit_error"}
_EXTRA = ("largest_prompt_tokens", "cause", "runbook")      # in the error (a client's exception holds only that), where known


class JsonResponse(JSONResponse):
    """In ASCII: text of an engine or a path may hold what UTF-8 cannot (lone surrogates), and must not cost the answer."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Connection(H11Protocol):
    """A connection that may cost no more than a descriptor for a while: one too many, or without a request, is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        self.loop.call_later(REQUEST_SECONDS, self._close_if_silent)

    closed: Callable[[tuple[str, int] | None], None] = staticmethod(lambda peer: None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed(self.client)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


def _error(status: int, detail: dict[str, Any], headers: Any = None) -> JsonResponse:
    extra = {key: detail.pop(key) for key in _EXTRA if detail.get(key) is not None}
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": detail["message"], "type": kind, "param": detail.get("param"), "code": detail.get("code"),
             **extra}
    return JsonResponse({"error": error, "source": "tightrank"}, status, headers)


async def error_response(request: Request, error: Exception) -> Response:
    """Any error as JSON. A fault of ours says so and no more; its traceback goes to the log."""
    if not isinstance(error, HTTPException):
        return _error(500, {"message": "a fault of the supervisor: see its log", "code": "internal_error"})
    detail: Any = error.detail
    if not isinstance(detail, dict):
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        detail = {"message": f"{request.method} {request.url.path[:200]}: {detail}", "code": code}
    return _error(error.status_code, dict(detail), error.headers)


async def validation_error(request: Request, error: Exception) -> Response:
    """A refused body or query as 400: field, value, what was expected."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place, *path = first["loc"]
    name = ".".join(str(part) for part in path) or str(place)
    if first["type"] == "json_invalid":
        message, name = f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", "body"
    elif first["type"] == "missing":
        message = f"{name}: is missing in the {place}"
    elif first["type"] == "extra_forbidden":
        message = f"{name}: unknown key in the {place}"
    else:
        message = f"{name}={_shown(first.get('input'))}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return _error(400, {"message": message, "param": name, "code": first["type"]})


def _shown(value: Any) -> str:
    if isinstance(value, int) and not -10**30 < value < 10**30:
        return "a number of more than 30 digits"
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _refused(status: int, message: str) -> Response:
    return _error(status, {"message": message, "code": "body_refused"}, {"Connection": "close"})


class BodyLimit:
    """Answers 413 to a body over 64 KiB, declared or not, before it is read whole; 408 to one that does not come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        taken = int(declared) if declared else 0       # h11 has checked the header and holds the body to it
        body: list[Message] = []
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while taken <= BODY_BYTES and (not body or body[-1].get("more_body")):
                    body.append(await receive())
                    taken += len(body[-1].get("body", b"")) if not declared else 0
        except TimeoutError:
            return await _refused(408, f"the body did not arrive within {BODY_SECONDS:.0f} s")(scope, receive, send)
        if taken > BODY_BYTES:
            return await _refused(413, f"the body is over {BODY_BYTES} bytes")(scope, receive, send)
        replay = iter(body)

        async def again() -> Message:
            return next(replay, None) or await receive()

        await self._app(scope, again, send)
        return None


class EventStream(Response):
    """Events after `last` as they come (SSE; `id` is the sequence number), and a comment after `beat_seconds` without any.

    The journal's ring is the only queue: a client that falls behind it, or takes nothing for 10 s, is dropped.
    """
    media_type = "text/event-stream"
    _open = 0

    def __init__(self, journal: Journal, last: int, beat_seconds: float) -> None:
        if EventStream._open >= STREAMS:
            raise HTTPException(503, "too many event streams are open", {"Retry-After": "5"})
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._journal, self._last, self._beat_seconds = journal, last, beat_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        forget = self._journal.listen(lambda: _wake(loop, news))
        EventStream._open += 1
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.done():
                news.clear()
                await asyncio.wait_for(send(self._chunk()), SEND_SECONDS)
                beat = asyncio.ensure_future(news.wait())
                await asyncio.wait({beat, gone}, timeout=self._beat_seconds, return_when=asyncio.FIRST_COMPLETED)
                beat.cancel()
            await send({"type": "http.response.body", "body": b""})
        except (TimeoutError, OSError):
            pass                                   # a slow or vanished client: closing is the answer
        finally:
            EventStream._open -= 1
            gone.cancel()
            forget()

    def _chunk(self) -> Message:
        events = self._journal.since(self._last)
        text = "".join(f"id: {e['sequence']}\nevent: {e['kind']}\ndata: {json.dumps(e)}\n\n" for e in events)
        self._last = events[-1]["sequence"] if events else self._last
        return {"type": "http.response.body", "body": (text or ": beat\n\n").encode(), "more_body": True}


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(news.set)
    except RuntimeError:
        pass                                       # the server's loop has ended


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
