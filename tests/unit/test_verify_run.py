"""What a ramp sees while a prompt is computed, against a supervisor and an engine that are functions here."""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from tightrank.verify import run
from tightrank.verify.ramp import Outcome, Ramp, Size
from tightrank.verify.run import Runner
from tightrank.verify.target import Settings, Target

GIB = 1 << 30
TARGET = Target("http://s:1", "w0", 1, "vllm", "0.32.0", "both", "/m", "tiny", "http://e:2", 9999, GIB)
ANSWER = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


class World:
    """`looks` counts reads of /status; `after` says how one is changed by then. The engine answers at look `answers_at`."""

    def __init__(self, answers_at: int = 3, after: Callable[[int, dict[str, Any]], Any] = lambda look, status: None,
                 events: dict[int, dict[str, Any]] | None = None) -> None:
        self.looks, self._answers_at, self._after, self._events = 0, answers_at, after, events or {}
        self.let_go = False            # the request was closed before its answer

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.host == "e":
            return await self._complete()
        if request.url.path == "/status":
            return self._status()
        if request.url.path == "/events":
            since = int(request.url.params["since"])
            told = [event for look, event in self._events.items() if since < look + 1 <= self.looks + 1]
            return httpx2.Response(200, json={"events": told, "last": self.looks + 1})
        steps = [{"id": 1, "rank": 0, "monotonic_ns": 1, "milliseconds": 1.0, "peak_bytes": 7, "chunks": [[0, 100]]}]
        return httpx2.Response(200, json={"steps": steps if "since=0" in str(request.url) and self.looks else []})

    async def _complete(self) -> httpx2.Response:
        try:
            while self.looks < self._answers_at:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.let_go = True
            raise
        return httpx2.Response(200, content=ANSWER)

    def _status(self) -> httpx2.Response:
        self.looks += 1
        rank = {"rank": 0, "alive": True, "available_bytes": 6 * GIB}
        worker = {"name": "w0", "phase": "up", "reason": "", "generation": 1, "ranks": [rank, {**rank, "rank": None}]}
        status = {"workers": [worker], "levels": [], "floor_bytes": GIB, "updated_age_seconds": 0.1,
                  "memory": {"available_bytes": 8 * GIB},
                  "guard": {"available_bytes": 7 * GIB, "lowest_available_bytes": 5 * GIB}}
        changed = self._after(self.looks, status)
        return changed if isinstance(changed, httpx2.Response) else httpx2.Response(200, json=status)


class Silent:
    """Shows nothing."""

    def begin(self, ramp: Ramp, tokens: int) -> None: ...
    def progress(self, chunks: Any, lowest: int | None) -> None: ...
    def ended(self, ramp: Ramp, size: Size) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "RECORDS_SECONDS", "REASON_SECONDS"):
        monkeypatch.setattr(run, name, 0.02)
    monkeypatch.setattr(run, "SILENT_SECONDS", 0.1)


def measured(world: World, floor: int = 2 * GIB, timeout: float = 10.0) -> Size:
    async def one() -> Size:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(world.answer)) as http:
            runner = Runner(http, TARGET, Settings(None, timeout, (5, 250)), Silent())
            return await runner.measure(100, Ramp(0.0, {}, floor, GIB, (100,), 4))
    return asyncio.run(one())


def test_an_old_low_of_the_guard_is_not_of_this_size_and_a_new_one_is() -> None:
    assert measured(World()).lowest_bytes == {"host": 8 * GIB, "guard": 7 * GIB, "rank 0": 6 * GIB}

    def dip(look: int, status: dict[str, Any]) -> None:
        status["guard"]["lowest_available_bytes"] = (5 if look < 2 else 3) * GIB
    size = measured(World(after=dip), floor=4 * GIB)
    assert size.lowest_bytes["guard"] == 3 * GIB == size.lowest and size.outcome is Outcome.UNDER_FLOOR


def test_what_nobody_knows_is_not_zero() -> None:
    def blind(look: int, status: dict[str, Any]) -> None:
        status["memory"]["available_bytes"], status["guard"] = None, {}
    size = measured(World(after=blind))
    assert size.lowest is None and size.memory == () and size.outcome is Outcome.PASSED


def fires(state: str = "fires") -> dict[str, Any]:
    return {"kind": "level", "worker": None, "sentence": f"tighten {state}", "data": {"state": state}}


def test_a_level_that_fires_ends_the_request_at_once() -> None:
    world = World(answers_at=1000, events={2: fires()})
    size = measured(world)
    assert (size.outcome, size.why, size.events) == (Outcome.GUARD_EVENT, "tighten fires", ("tighten fires",))
    assert world.let_go and world.looks == 2


def test_a_level_that_fires_with_the_answer_counts_too() -> None:
    size = measured(World(answers_at=2, events={3: fires()}))
    assert size.outcome is Outcome.GUARD_EVENT and size.first_token_seconds is not None


def test_events_from_before_and_of_other_workers_do_not_count() -> None:
    other = {"kind": "cause", "worker": "w1", "sentence": "rank-died", "data": {}}
    size = measured(World(events={0: fires(), 2: other, 3: fires("back")}))
    assert size.outcome is Outcome.PASSED and size.events == ("tighten back",)


@pytest.mark.parametrize("answer", [httpx2.Response(502, text="<html>"), httpx2.Response(200, json=[]),
                                    httpx2.Response(200, json={})])
def test_a_supervisor_that_stays_away_ends_it_and_one_that_comes_back_does_not(answer: httpx2.Response) -> None:
    world = World(answers_at=1000, after=lambda look, status: answer if look > 1 else None)
    size = measured(world)
    assert size.outcome is Outcome.LOST and "no supervisor answers at http://s:1" in size.why and world.let_go
    assert measured(World(answers_at=4, after=lambda look, status: answer if look == 2 else None)).outcome is Outcome.PASSED


def test_a_supervisor_whose_loop_is_stuck_is_not_believed() -> None:
    def stuck(look: int, status: dict[str, Any]) -> None:
        status["updated_age_seconds"] = 16.0 if look > 1 else 0.1
    size = measured(World(answers_at=1000, after=stuck))
    assert size.outcome is Outcome.LOST and "its loop has not turned for 16 s" in size.why


def test_a_prompt_without_an_answer_is_given_up() -> None:
    world = World(answers_at=10**9)
    size = measured(world, timeout=0.1)
    assert size.outcome is Outcome.TIMEOUT and world.let_go and "0.1 s" in size.why


def test_a_ramp_ends_with_the_first_size_that_does_not_pass_and_each_is_saved() -> None:
    saved: list[Ramp] = []

    async def both() -> Ramp:
        world = World(events={6: fires()})
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(world.answer)) as http:
            runner = Runner(http, TARGET, Settings(None, 10.0, (5, 250)), Silent())
            return await runner.run(Ramp(0.0, {}, GIB, GIB, (100, 200, 300), 4), saved.append)
    last = asyncio.run(both())
    assert [size.outcome for size in last.sizes] == [Outcome.PASSED, Outcome.GUARD_EVENT] and saved[-1] == last
    assert [len(each.sizes) for each in saved] == [1, 2] and last.left == (200, 300)
