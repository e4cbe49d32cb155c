"""Which pairs were seen to transfer KV. A canary is a small real request through both legs, with a prompt that no cache has.

It is sent when a pair is new, after a failure, and when nothing else went through for a while; the engines' own health checks
never touch the transfer. A served request of a client proves as much.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tightrank.gateway import protocol
from tightrank.gateway.exchange import Exchange
from tightrank.gateway.intake import Asked, understood
from tightrank.gateway.peers import Peers
from tightrank.gateway.probe import own_headers
from tightrank.gateway.records import Failure, LegFailed, Peer, Route, Standing

ANSWER_SECONDS = 15.0          # the first transfer of two engines connects them; later ones take milliseconds
AGAIN_SECONDS = 1.0            # after a failure
LOOK_SECONDS = 0.5

_Key = tuple[str, int, str, int]


@dataclass(slots=True)
class _State:
    proved: float | None = None        # CLOCK_MONOTONIC
    tried: float = 0.0
    why: str = "no transfer yet"
    running: bool = False


class Pairs:
    """The state of every pair of this generation of its two peers."""

    def __init__(self, http: aiohttp.ClientSession, peers: Peers, idle_seconds: float, key: str | None) -> None:
        self._http, self._peers, self._idle = http, peers, idle_seconds
        self._headers = own_headers(key)
        self._states: dict[_Key, _State] = {}
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what others tell and ask -------------------------------------------------------------------------------------

    def look(self) -> None:
        """A standing has changed."""
        self._news.set()

    def paired(self, prefill: Peer, decode: Peer) -> bool:
        state = self._states.get(_key(prefill, decode))
        return state is not None and state.proved is not None

    def proved(self, route: Route) -> None:
        """A request went through."""
        if route.prefill is not None:
            state = self._state(route.prefill, route.worker)
            state.proved, state.why = time.monotonic(), ""

    def failed(self, route: Route, failure: LegFailed) -> None:
        """A request did not: it takes a canary to trust the pair again. A busy engine says nothing about the transfer,
        nor does one that is short of memory."""
        if route.prefill is not None and failure.kind not in (Failure.BUSY, Failure.ABORTED):
            state = self._state(route.prefill, route.worker)
            state.proved, state.why = None, str(failure)
            self.look()

    def ready(self) -> list[tuple[Peer, Peer]]:
        """Pairs that are up and were seen to work."""
        return [pair for pair in self._up() if self.paired(*pair)]

    def to_json(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        rows = []
        for prefill, decode in self._up():
            state = self._state(prefill, decode)
            rows.append({"prefill": prefill.id, "decode": decode.id, "paired": state.proved is not None, "why": state.why,
                         "proved_age_seconds": None if state.proved is None else round(now - state.proved, 3)})
        return rows

    # --- canaries -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends canaries where they are due, for ever."""
        while True:
            self._news.clear()
            self._forget()
            for prefill, decode in self._up():
                state = self._state(prefill, decode)
                if not state.running and self._due(state, prefill, decode):
                    state.running, state.tried = True, time.monotonic()
                    task = asyncio.ensure_future(self._send(Route(decode, prefill), state))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_SECONDS)

    def _due(self, state: _State, prefill: Peer, decode: Peer) -> bool:
        """A pair that works is left alone: behind a long prompt a canary would wait and prove nothing."""
        now = time.monotonic()
        if state.proved is None:
            return now - state.tried > AGAIN_SECONDS
        return now - max(state.proved, state.tried) > self._idle and not self._legs(prefill, decode)

    def _legs(self, *peers: Peer) -> int:
        return sum(len(member.legs) for peer in peers if (member := self._peers.of(peer)) is not None)

    async def _send(self, route: Route, state: _State) -> None:
        assert route.prefill is not None
        path, body = protocol.canary(route.worker)
        asked = understood(Asked("POST", path, path, {**self._headers, "X-Request-Id": f"canary-{time.monotonic_ns()}"},
                                 "canary", json.dumps(body).encode()))
        exchange = Exchange(self._http, self._peers, route, asked, others=False)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await exchange.answer()
            if answer.status == 200:
                self.proved(route)
            else:
                state.proved, state.why = None, f"a canary was answered {answer.status}"
        except TimeoutError:
            if self._legs(*route.peers) > len(exchange.legs):
                state.why = "" if state.proved else "a canary waited behind other requests"
            else:
                state.proved, state.why = None, f"a canary was not answered within {ANSWER_SECONDS:.0f} s"
        except LegFailed as failure:
            self._peers.failed(failure)
            state.proved, state.why = None, f"a canary failed: {failure}"
        finally:
            exchange.close()
            state.running = False

    # --- small things -------------------------------------------------------------------------------------------------

    def _up(self) -> Iterable[tuple[Peer, Peer]]:
        up = [m.peer for m in self._peers.members.values() if m.standing is Standing.UP]
        return [(p, d) for p in up for d in up if (p.role, d.role) == ("prefill", "decode")
                and (p.engine, p.model) == (d.engine, d.model)]

    def _state(self, prefill: Peer, decode: Peer) -> _State:
        return self._states.setdefault(_key(prefill, decode), _State())

    def _forget(self) -> None:
        """Pairs of generations that are gone, and of peers that are out: what comes back has to be seen to transfer again."""
        now = {member.peer.id: member.peer.generation for member in self._peers.members.values()
               if member.standing is not Standing.OUT}
        self._states = {key: state for key, state in self._states.items()
                        if now.get(key[0]) == key[1] and now.get(key[2]) == key[3]}


def _key(prefill: Peer, decode: Peer) -> _Key:
    return prefill.id, prefill.generation, decode.id, decode.generation
