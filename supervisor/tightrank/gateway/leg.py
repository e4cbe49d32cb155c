"""One leg: one HTTP exchange with one engine. Its errors are all `LegFailed`; it may be failed from outside at any moment.

aiohttp here and not httpx2 as elsewhere: reading 16 streams at once takes 8 us of processor time an event against 38
(scripts/bench/gateway, 2 cores).
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp

from tightrank.gateway import sse
from tightrank.gateway.peers import Member
from tightrank.gateway.records import Answered, Failure, LegFailed

ANSWER_BYTES = 256 << 20
CONNECT_SECONDS = 2.0              # a SYN that a rack does not answer by then is not answered at all
EVENT_STREAM = "text/event-stream"


def session() -> aiohttp.ClientSession:
    """For legs: no proxies of the environment, no redirects, no total time limit, nothing decoded.

    Each leg has a connection of its own: one that an engine is about to close is never used, and an engine that answers twice
    cannot give its second answer to the next client.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=10)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False,
                                 cookie_jar=aiohttp.DummyCookieJar(), max_line_size=16 << 10, max_field_size=32 << 10,
                                 timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                                 skip_auto_headers=("User-Agent", "Accept", "Content-Type"))


@dataclass(frozen=True, slots=True)
class Call:
    """What a leg sends. `prompt_tokens`: of the request, for predictions; `waiting_tokens` of them count as the engine's load
    until its answer begins (0 for a decode leg); `new_tokens` as in `Pace.answer_seconds`."""
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    prompt_tokens: int = 0
    waiting_tokens: int = 0
    new_tokens: int | None = 0


class Leg:
    """`open`, then `whole` or `events`; `close` in any case. `alone` False: its silence proves nothing while a partner still
    computes what it waits for. `others`: the request could go elsewhere. `asked`: when the client asked (CLOCK_MONOTONIC)."""

    def __init__(self, http: aiohttp.ClientSession, member: Member, call: Call, alone: bool = True, others: bool = False,
                 asked: float | None = None) -> None:
        self.member, self.peer, self.call = member, member.peer, call
        self.opened = time.monotonic()
        self.asked = asked or self.opened
        self.waits_since: float | None = self.opened       # for the engine's next word; None: it is we who do not read
        self.began = False                     # a byte of the answer has come
        self._still_waits = False              # what came last were comments: they keep a connection alive, and prove nothing
        self.ahead_tokens = call.prompt_tokens + (member.queued_tokens if call.waiting_tokens else 0)
        self.alone, self.others = alone, others
        member.legs.add(self)
        member.running += 1
        member.queued_tokens += call.waiting_tokens
        self._http = http
        self._failure: LegFailed | None = None
        self._opening: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._over = self._unreached = False

    @property
    def done(self) -> bool:
        """Whether its answer is here whole, or it never reached the engine."""
        return self._over or self._opening is None or self._unreached

    @property
    def waiting_tokens(self) -> int:
        """Of its prompt, while it waits."""
        return 0 if self.began else self.call.waiting_tokens

    # --- its life -----------------------------------------------------------------------------------------------------

    async def open(self) -> tuple[int, Mapping[str, str]]:
        """Sends the request; status and headers of the answer."""
        try:
            self._opening = asyncio.ensure_future(self._send())
            self._response = await self._opening
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        except aiohttp.ClientConnectorError as error:
            self._unreached = True
            raise self._failed(Failure.REFUSED, f"no connection: {error.strerror or error}") from None
        except aiohttp.ServerTimeoutError:
            raise self._failed(Failure.REFUSED, f"no connection within {CONNECT_SECONDS:.0f} s") from None
        except (aiohttp.ClientResponseError, ValueError) as error:
            raise self._failed(Failure.GARBAGE, f"its answer is no HTTP: {str(error)[:200]}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(Failure.LOST, f"the connection ended without an answer ({type(error).__name__})") from None
        if not 200 <= self._response.status < 600 or 300 <= self._response.status < 400:
            raise self._failed(Failure.GARBAGE, f"it answered {self._response.status}")
        return self._response.status, self._response.headers

    async def whole(self) -> bytes:
        """The whole body."""
        parts, size = [], 0
        async for part in self._parts():
            self._begin()
            parts.append(part)
            size += len(part)
            if size > ANSWER_BYTES:
                raise self._failed(Failure.GARBAGE, f"its answer is longer than {ANSWER_BYTES} bytes")
        self._begin()
        self.close()
        return b"".join(parts)

    async def events(self) -> AsyncIterator[bytes]:
        """Whole events, until the last. A stream that ends before it has failed."""
        splitter, done = sse.Splitter(), False
        async for part in self._parts():
            try:
                events = splitter.feed(part)
            except sse.NotEvents as error:
                raise self._failed(Failure.GARBAGE, f"its stream is none: {error}") from None
            self._still_waits = all(map(sse.comment, [*events, splitter.rest]))
            for event in events:
                if not sse.comment(event):
                    self._begin()
                done = done or sse.last(event)
                yield event
        if not done or splitter.rest.strip():
            raise self._failed(Failure.LOST, "its stream ended before it was complete")
        self.close()

    def left_alone(self) -> None:
        """What it waited for is there: from now on its time is its own."""
        self.alone, self.opened = True, time.monotonic()
        if self.waits_since is not None:
            self.waits_since = self.opened

    def forgive(self, seconds: float) -> None:
        """So long nobody here could have heard the engine."""
        self.asked += seconds
        if self.waits_since is not None:
            self.waits_since = min(self.waits_since + seconds, time.monotonic())

    def fail(self, failure: LegFailed) -> None:
        """Ends it now, with this reason; whoever waits for it gets it."""
        if self._failure is None and not self._over:
            self._failure = failure
            if self._response is not None:
                self._response.close()
            elif self._opening is not None:
                self._opening.cancel()

    def close(self) -> None:
        """Cuts it when it is not over; its place at the engine is free in any case."""
        if self._over:
            return
        self._over = True
        self._begin(answered=False)
        self.member.legs.discard(self)
        self.member.running -= 1
        if self._response is not None:
            self._response.close()             # a whole answer was read: the connection has gone back to the pool already
        elif self._opening is not None:
            self._opening.cancel()

    # --- how ----------------------------------------------------------------------------------------------------------

    async def _send(self) -> aiohttp.ClientResponse:
        return await self._http.request(self.call.method, self.peer.url + self.call.path, data=self.call.body or None,
                                        headers={**self.call.headers, "Accept-Encoding": "identity",
                                                 "X-Tightrank-Generation": str(self.peer.generation)},
                                        allow_redirects=False)

    async def _parts(self) -> AsyncIterator[bytes]:
        assert self._response is not None
        waited = 0.0                           # for a word, before now
        try:
            while True:
                self.waits_since = time.monotonic() - waited
                part = await self._response.content.readany()
                waited, self.waits_since = time.monotonic() - self.waits_since, None
                if not part:
                    break
                yield part
                waited = waited if self._still_waits else 0.0
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failed(Failure.LOST, f"the connection ended in the answer ({type(error).__name__})") from None
        if self._failure is not None:
            raise self._failure

    def _begin(self, answered: bool = True) -> None:
        """Its prompt waits no more."""
        if self.began:
            return
        self.began = True
        self.member.queued_tokens -= self.call.waiting_tokens
        if answered:
            self.member.answered = time.monotonic()
            if self.call.prompt_tokens and self.call.new_tokens == 0 and self.alone:
                self.member.pace.first_byte(self.member.answered - self.opened, self.ahead_tokens)

    def _failed(self, kind: Failure, sentence: str) -> LegFailed:
        return self._failure or LegFailed(kind, self.peer, sentence)

    def silent_seconds(self, now: float) -> float:
        """How long the engine has let it wait for the next byte."""
        return 0.0 if self.waits_since is None else now - self.waits_since


async def answered(leg: Leg) -> Answered:
    """The whole answer of a leg that is wanted whole. Raises LegFailed, for 429, 503 (busy) and other 5xx (error) too."""
    status, headers = await leg.open()
    body = await leg.whole()
    whole = Answered(status, headers, body)
    refuse_errors(leg, whole)
    return whole


def refuse_errors(leg: Leg, whole: Answered) -> None:
    """Raises LegFailed when an engine's status says that another could do better."""
    text = whole.body[:300].decode("utf-8", "replace")
    if whole.status in (429, 503):
        raise LegFailed(Failure.BUSY, leg.peer, f"it answered {whole.status} {text}", whole)
    if whole.status >= 500:
        raise LegFailed(Failure.ERROR, leg.peer, f"it answered {whole.status} {text}", whole)
