"""One try of one request on one route: a leg to a worker alone, or both legs of a pair in the engine's own protocol.

`answer` gives the answer's beginning (or all of it) or raises LegFailed; whatever fails, both legs end. `close` is called in
any case, and again is nothing.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from tightrank.gateway import protocol, sse
from tightrank.gateway.intake import Asked
from tightrank.gateway.leg import EVENT_STREAM, Call, Leg, answered, refuse_errors
from tightrank.gateway.peers import Peers
from tightrank.gateway.records import Answered, Failure, LegFailed, Peer, Route

ABORT_SECONDS = 2.0
T = TypeVar("T")


@dataclass(slots=True)
class Streamed:
    """An answer that has begun. `first` are its events up to the first that says something: SGLang sends some before any KV
    has come, and until then another try is possible. `rest` may raise LegFailed."""
    status: int
    headers: Mapping[str, str]
    first: bytes
    rest: AsyncIterator[bytes]


@dataclass(slots=True)
class Exchange:
    """`others`: whether the request could go elsewhere, so that a long silence need not be borne."""
    http: aiohttp.ClientSession
    peers: Peers
    route: Route
    asked: Asked
    others: bool
    legs: list[Leg] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    rid: str = ""                          # SGLang's, of both legs

    async def answer(self) -> Answered | Streamed:
        if self.route.prefill is None:
            return await self._begin(self._leg(self.route.worker, self._body_alone()))
        if self.route.prefill.engine == "sglang":
            return await self._both_at_once()
        return await self._prefill_first()

    def close(self) -> None:
        """Ends what still runs; SGLang is also told by name."""
        for task in self.tasks:
            task.cancel()
        left = [leg for leg in self.legs if not leg.done]
        for leg in self.legs:
            leg.close()
        if self.rid and left:
            for leg in left:
                task = asyncio.ensure_future(self._abort(leg))
                _RUNNING.add(task)
                task.add_done_callback(_RUNNING.discard)

    def end(self, why: str) -> None:
        """Fails every leg: the client is told why."""
        for leg in self.legs:
            leg.fail(LegFailed(Failure.ENDED, leg.peer, why))

    # --- protocols ----------------------------------------------------------------------------------------------------

    def _body_alone(self) -> bytes:
        """For SGLang with an ID of ours: it looks for a client that has left only every few seconds, and is aborted by name."""
        asked = self.asked
        if self.route.worker.engine != "sglang" or not asked.generates or {"rid", "request_id"} & set(asked.parsed or ()):
            return asked.body
        self.rid = protocol.sglang_rid()
        return protocol.spliced(asked.body, protocol.sglang_name(asked.path, self.rid))

    async def _both_at_once(self) -> Answered | Streamed:
        """SGLang: equal bodies to both. The prefill's own answer counts only when it refuses or fails."""
        assert self.route.prefill is not None
        self.rid = protocol.sglang_rid()
        body = protocol.spliced(self.asked.body, protocol.sglang_fields(self.route.prefill, self.asked.path, self.rid))
        prefill = self._leg(self.route.prefill, body)
        decode = self._leg(self.route.worker, body, alone=False)
        first = self._task(self._prefilled(prefill, decode))
        second = self._task(self._begin(decode))
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if first.done() and (refused := first.result()) is not None:     # raises what failed
            return refused
        if not second.done():
            await asyncio.wait({second})
        return second.result()

    async def _prefilled(self, prefill: Leg, decode: Leg) -> Answered | None:
        """None when the prefill is done; its answer when it is a refusal of the client's request."""
        begun = await self._begin(prefill)
        if isinstance(begun, Streamed):
            async for _ in begun.rest:
                pass
        decode.left_alone()
        return begun if isinstance(begun, Answered) and begun.status >= 400 else None

    async def _prefill_first(self) -> Answered | Streamed:
        """vLLM: the prefill's answer carries what the decode worker needs to fetch the KV."""
        assert self.route.prefill is not None
        assert self.asked.parsed is not None
        body = protocol.vllm_prefill(self.asked.path, self.asked.body, self.asked.parsed)
        prefill = self._leg(self.route.prefill, body)
        whole = await answered(prefill)
        if whole.status >= 400:
            return whole
        parameters = self._check(prefill, whole).get("kv_transfer_params")
        if not isinstance(parameters, dict) or not parameters.get("do_remote_prefill"):
            raise LegFailed(Failure.GARBAGE, prefill.peer, "it answered without kv_transfer_params")
        decode = self._leg(self.route.worker, protocol.spliced(self.asked.body, {"kv_transfer_params": parameters}))
        with _fetching(prefill, decode):
            return await self._begin(decode)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _leg(self, peer: Peer, body: bytes, alone: bool = True) -> Leg:
        member = self.peers.of(peer)
        if member is None:
            raise LegFailed(Failure.ENDED, peer, f"generation {peer.generation} has ended")
        asked, computes = self.asked, self.route.prefill in (None, peer)       # the prompt, that is
        new_tokens = 0 if peer is self.route.prefill else asked.new_tokens
        call = Call(asked.method, asked.target, asked.headers, body, asked.prompt_tokens,
                    asked.prompt_tokens if computes else 0, new_tokens)
        leg = Leg(self.http, member, call, alone, self.others, asked.since)
        self.legs.append(leg)
        return leg

    async def _begin(self, leg: Leg) -> Answered | Streamed:
        """The whole answer, or its first event: until then nothing has been said to the client."""
        status, headers = await leg.open()
        if status != 200 or not self.asked.stream:
            whole = Answered(status, headers, await leg.whole())
            refuse_errors(leg, whole)
            if status == 200 and self.asked.generates:
                self._measure(leg, self._check(leg, whole))
            return whole
        if not headers.get("Content-Type", "").lower().startswith(EVENT_STREAM):
            raise LegFailed(Failure.GARBAGE, leg.peer, f"it answered {headers.get('Content-Type', 'nothing')!r} to a stream")
        events, first = self._checked(leg), b""
        async for event in events:
            first += event
            if sse.says(event):
                break
        return Streamed(status, headers, first, events)

    async def _checked(self, leg: Leg) -> AsyncIterator[bytes]:
        async for event in leg.events():
            self._check_event(leg, event)
            yield event

    def _check(self, leg: Leg, whole: Answered) -> dict[str, Any]:
        """The JSON of a good answer. Raises LegFailed for what is none, and for a request that was given up under a 200."""
        if whole.status >= 400:
            return {}
        try:
            answer = json.loads(whole.body)
        except ValueError:
            raise LegFailed(Failure.GARBAGE, leg.peer, f"its answer is not JSON: {whole.body[:80]!r}") from None
        for each in answer if isinstance(answer, list) else [answer]:
            if why := sse.gave_up(each):
                raise LegFailed(Failure.ERROR, leg.peer, f"it gave the request up: {why}", whole)
        return answer if isinstance(answer, dict) else {}

    def _check_event(self, leg: Leg, event: bytes) -> None:
        try:
            sse.check_payload(event)
        except sse.NotEvents as error:
            raise LegFailed(Failure.GARBAGE, leg.peer, str(error)) from None
        if b"abort" in event or b"error" in event or b"failed" in event:
            data = sse.payload(event)
            if (why := sse.gave_up(data)) and not sse.clients_fault(data):
                raise LegFailed(Failure.ERROR, leg.peer, f"it gave the request up: {why}")

    def _measure(self, leg: Leg, answer: Mapping[str, Any]) -> None:
        usage = answer.get("usage")
        new = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(new) is int and new > 0:
            leg.member.pace.whole(time.monotonic() - leg.opened, leg.call.prompt_tokens, new)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())   # looked at, though nobody may ask
        self.tasks.append(task)
        return task

    async def _abort(self, leg: Leg) -> None:
        headers = {"Content-Type": "application/json"}
        if "Authorization" in leg.call.headers:
            headers["Authorization"] = leg.call.headers["Authorization"]
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS), self.http.post(
                    f"{leg.peer.url}/abort_request", data=json.dumps({"rid": self.rid}), headers=headers) as response:
                await response.read()


_RUNNING: set[asyncio.Task[None]] = set()      # a task that nobody holds may be collected before it ends


@contextlib.contextmanager
def _fetching(prefill: Leg, decode: Leg) -> Any:
    """Until the decode worker has answered, it may still fetch KV from the prefill worker: they fall together."""
    hold = _Hold(decode)
    prefill.member.legs.add(hold)
    try:
        yield
    finally:
        prefill.member.legs.discard(hold)


class _Hold:
    """A finished prefill whose KV is still to be fetched: what ends the prefill worker ends the decode leg."""
    waiting_tokens = 0

    def __init__(self, decode: Leg) -> None:
        self.opened = time.monotonic()
        self._decode = decode

    def fail(self, failure: LegFailed) -> None:
        self._decode.fail(failure)
