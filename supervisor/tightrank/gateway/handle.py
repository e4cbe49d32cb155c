"""One request from its intake to its answer: which route, and what to do when a try fails.

Until the client has had a byte, a failed try is followed by one more, elsewhere. A connection that was refused is no try: the
engine has seen nothing of the request.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import aiohttp

from tightrank.gateway import admit, pick, protocol
from tightrank.gateway.canary import Pairs
from tightrank.gateway.exchange import Exchange, Streamed
from tightrank.gateway.intake import Asked
from tightrank.gateway.peers import Peers
from tightrank.gateway.records import Answered, Failure, LegFailed, Peer, Route, Standing
from tightrank.gateway.refusal import Refusal
from tightrank.records import Shed

TRIES = 2
CAUSE_SECONDS = 0.08
SOON_SECONDS = 5                   # Retry-After where nothing better is known
_ANY_ROLE = ("/v1/models", "/tokenize", "/detokenize")
# 503: there may be room again soon; 502: what the engine answered is wrong; 504: it did not answer
_STATUS = {Failure.ERROR: 502, Failure.GARBAGE: 502, Failure.SILENT: 504}




class Handler:
    """Finds routes and tries them."""

    def __init__(self, http: aiohttp.ClientSession, peers: Peers, pairs: Pairs) -> None:
        self._http, self._peers, self._pairs = http, peers, pairs
        self.failures: dict[Failure, int] = dict.fromkeys(Failure, 0)
        self.retries = 0

    async def answer(self, asked: Asked, began: Callable[[Exchange], None]) -> tuple[Answered | Streamed, Exchange]:
        """The answer, or its beginning, and the exchange that it came by, which the caller closes. `began` hears of every
        exchange, so that a client that leaves ends it. Raises Refusal."""
        self._refuse_unknown(asked)
        await admit.refuse_too_long(asked, list(self._peers.members.values()), self._http)
        shedding = await admit.shedding(asked, list(self._peers.members.values()), self._http)
        failed: set[str] = set(shedding)   # peers that a try failed at, or that do not take it now
        touched: set[str] = set(shedding)  # peers of routes that failed
        tries, last = 0, None
        while True:
            route = self._route(asked, touched) or self._route(asked, failed)
            if route is None and shedding and last is None and self._route(asked, ()):
                raise _shed(asked, list(shedding.values()))
            if route is None:
                await self._hear_causes(asked)
                raise self._nowhere(asked, last)
            if last is not None:
                self.retries += 1
            others = tries + 1 < TRIES and self._others(asked, route, touched)
            exchange = Exchange(self._http, self._peers, route, asked, others)
            began(exchange)
            try:
                answer = await exchange.answer()
                self._pairs.proved(route)
                return answer, exchange
            except LegFailed as failure:
                exchange.close()
                last = failure
                self._note(failure, route)
                failed.add(failure.peer.id)
                touched |= {peer.id for peer in route.peers}
                tries += failure.kind is not Failure.REFUSED
                if tries >= TRIES or failure.kind is Failure.ABORTED:
                    await self._hear_causes(asked)
                    raise self._gave_up(failure) from None

    def cut(self, failure: LegFailed) -> Refusal:
        """What a client is told whose answer broke off."""
        self._note(failure, None)
        return self._gave_up(failure)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _route(self, asked: Asked, avoid: Collection[str]) -> Route | None:
        members, model = list(self._peers.members.values()), self._model(asked)
        if asked.path in _ANY_ROLE:
            return pick.any_role(members, model, avoid)
        if asked.path == "/v1/embeddings" or asked.parsed is None:
            return pick.pick(members, model, avoid, self._pairs.paired, pairs=False)
        route = pick.pick(members, model, avoid, self._pairs.paired)
        if route is None or route.prefill is None:
            return route
        why = protocol.unpairable(route.worker.engine, asked.path, asked.parsed)
        if not why:
            return route
        if route.worker.engine == "vllm":      # a decode worker computes the prompt itself when nobody hands it over
            return Route(route.worker)
        raise Refusal(400, "not_on_pairs", f"{why}; a worker with role both would serve it")

    def _others(self, asked: Asked, route: Route, touched: set[str]) -> bool:
        return self._route(asked, touched | {peer.id for peer in route.peers}) is not None

    def _model(self, asked: Asked) -> str | None:
        """The model to route by. With one model its engines judge the name themselves (they may know adapters by others)."""
        models = {member.peer.model for member in self._peers.members.values()} - {""}
        return asked.model if len(models) > 1 else None

    def _refuse_unknown(self, asked: Asked) -> None:
        models = sorted({member.peer.model for member in self._peers.members.values()})
        if len(models) > 1 and asked.generates and asked.model not in models:
            raise Refusal(404, "model_not_found", f"model={asked.model!r}: not served here; there are {', '.join(models)}",
                          param="model")

    # --- failures -----------------------------------------------------------------------------------------------------

    def _note(self, failure: LegFailed, route: Route | None) -> None:
        self.failures[failure.kind] += 1
        self._peers.failed(failure)
        if route is None or route.prefill is None:
            return
        self._pairs.failed(route, failure)
        if failure.kind is Failure.SILENT:     # of a pair both may be the one that is silent: a probe tells which
            for peer in route.peers:
                if peer.id != failure.peer.id:
                    self._peers.failed(LegFailed(Failure.SILENT, peer, f"silent together with {failure.peer.id}"))

    def _gave_up(self, failure: LegFailed) -> Refusal:
        if failure.kind is Failure.BUSY and failure.answer is not None:
            return Passed(failure.answer)
        peer = self._latest(failure.peer)
        if failure.kind is Failure.ABORTED:
            return Refusal(503, "aborted_memory_pressure", f"tightrank ended this request: {failure}; try again later, or a "
                           "shorter prompt", retry_after=peer.shed.retry_after_seconds if peer.shed else SOON_SECONDS,
                           more={"worker": peer.id})
        status = _STATUS.get(failure.kind, 503)
        return Refusal(status, f"engine_{failure.kind.value}", f"{failure}; no byte of a wrong answer was sent on",
                       retry_after=self._retry_after([peer]) if status == 503 else None, more=_blame(peer))

    def _nowhere(self, asked: Asked, last: LegFailed | None) -> Refusal:
        """No route is left: what stands against each peer that could have served."""
        if last is not None and last.kind is Failure.BUSY and last.answer is not None:
            return Passed(last.answer)
        model = self._model(asked)
        members = [m for m in self._peers.members.values() if pick.serves(m, model)]
        out = [m for m in members if m.standing is not Standing.UP] or members
        words = "; ".join(f"{m.peer.id}: {m.why or 'has failed this request'}" for m in out) or "no engine is known yet"
        blamed = next((m.peer for m in out if m.peer.cause), None)
        if members and asked.path == "/v1/embeddings" and all(m.peer.role != "both" for m in members):
            return Refusal(400, "not_on_pairs", "embeddings need a worker with role both; there are only P/D roles")
        return Refusal(503, "no_worker_available", f"no worker can take this now: {words}",
                       retry_after=self._retry_after([m.peer for m in out]), more=_blame(blamed) if blamed else {})

    async def _hear_causes(self, asked: Asked) -> None:
        """A supervisor names a cause some 50 ms after a death: a client's 503 waits for it a moment."""
        ending = [m for m in self._peers.members.values() if m.peer.supervisor and m.standing is Standing.OUT
                  and m.peer.phase in ("up", "stopping") and m.why and pick.serves(m, self._model(asked))]
        until = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < until and any(m.peer.phase in ("up", "stopping") and not m.peer.cause for m in ending):
            await asyncio.sleep(0.01)

    def _latest(self, peer: Peer) -> Peer:
        member = self._peers.members.get(peer.id)
        return member.peer if member is not None else peer

    def _retry_after(self, peers: list[Peer]) -> int:
        return min((peer.retry_after_seconds for peer in peers if peer.retry_after_seconds), default=SOON_SECONDS)


class Passed(Refusal):
    """A busy engine's own answer, handed on with a Retry-After."""

    def __init__(self, answer: Answered) -> None:
        given = answer.headers.get("Retry-After", "")
        super().__init__(answer.status, "engine_busy", "the engine is busy", retry_after=int(given) if given.isdigit() else 1)
        self._answer = answer

    def body(self) -> bytes:
        return self._answer.body

    def headers(self) -> dict[str, str]:
        kind = self._answer.headers.get("Content-Type", "application/json")
        return {**super().headers(), "Content-Type": kind}


def _shed(asked: Asked, sheds: list[Shed]) -> Refusal:
    """Every engine that could take it refuses long prompts now."""
    shed = max(sheds, key=lambda shed: shed.new_tokens)
    return Refusal(429, "memory_pressure", f"memory is short, so prompts of more than {shed.new_tokens} tokens are not taken "
                   f"now ({shed.why}); try again later, or a shorter prompt",
                   param="messages" if asked.path == "/v1/chat/completions" else "prompt",
                   retry_after=shed.retry_after_seconds, more={"largest_prompt_tokens": shed.new_tokens})


def _blame(peer: Peer) -> dict[str, str]:
    known = {"worker": peer.id, "cause": peer.cause, "change": peer.change, "runbook": peer.runbook}
    return {name: text for name, text in known.items() if text}
