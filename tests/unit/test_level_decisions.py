"""What the levels decide for each worker: a snapshot and views in, events and decisions out."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from levels_traces import FLOOR, GIB, MIB, RULES
from tightrank.config import Guard
from tightrank.levels import HOST, Levels, lowered, rows, short_tokens, step
from tightrank.levels.ladder import STEPS
from tightrank.records import (
    ActionKind,
    Decision,
    Event,
    LineSpec,
    MemoryReading,
    Phase,
    ProcessId,
    RankReading,
    Snapshot,
    WorkerReading,
    WorkerView,
)
from views import view as make_view

LINE = LineSpec(budget=200_000_000, floor_budget=256 * 131072, minimum=256, maximum=2048, granule=256)
GUARD = Guard(FLOOR, 512 * MIB, 0, *RULES.levels, "act")
LOW = FLOOR + 10 * MIB
AMPLE = FLOOR + 8 * GIB


def view(name: str = "w", **changes: Any) -> WorkerView:
    return make_view(name, **{"line": LINE, "budget": LINE.budget, **changes})


def rank(available: int | None = None, device: str | None = None, in_flight: int = 1, loops: int = 9) -> RankReading:
    return RankReading(ProcessId(9, 9), "worker", 0, 0, 0, None, device, "0", True, {}, {}, available, "", 0.1, loops, 1, 1,
                       in_flight)


class Site:
    """Workers over time: what is decided is applied, as the worker does."""

    def __init__(self, *views: WorkerView, guard: Guard = GUARD, ranks: Mapping[str, RankReading] | None = None) -> None:
        self.views, self.guard, self.ranks = {view.name: view for view in views}, guard, ranks or {}
        self.levels, self.now, self.page = Levels(), 100.0, dict[str, Any]()
        self.events: list[Event] = []
        self.decisions: list[Decision] = []

    def run(self, seconds: float, available: int | None) -> Site:
        """Ticks of 0.25 s."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            memory = MemoryReading(self.now, 64 * GIB, available, None, None, available, None, None)
            readings = {name: WorkerReading(name, each.generation, None, (), (self.ranks[name],) if name in self.ranks else (),
                                            (), ()) for name, each in self.views.items()}
            snapshot = Snapshot(self.now, 0.0, memory, readings, self.page)
            self.levels, events, decisions = step(self.levels, self.guard, snapshot, list(self.views.values()))
            self.events += events
            self.decisions += decisions
            for decision in decisions:
                held = self.views[decision.worker]
                if decision.kind is ActionKind.TIGHTEN:
                    held = replace(held, budget=decision.budget)
                if decision.kind is ActionKind.SHED:
                    held = replace(held, shed=decision.shed)
                self.views[decision.worker] = held
        return self

    def kinds(self) -> list[str]:
        return [f"{decision.kind.value} {decision.worker}" for decision in self.decisions]

    def said(self, kind: str = "level") -> list[str]:
        return [event.sentence for event in self.events if event.kind == kind]


def test_they_act_in_order_and_go_back_in_steps() -> None:
    site = Site(view()).run(10.0, LOW)
    assert site.kinds() == ["tighten w", "shed w", "abort w", "abort w"]
    assert site.views["w"].budget == LINE.floor_budget
    shed = site.views["w"].shed
    assert shed is not None and shed.new_tokens == 2048 and shed.retry_after_seconds == 10 and "MiB available" in shed.why
    site.run(70.0, AMPLE)
    assert site.kinds()[4:] == ["shed w", *["tighten w"] * STEPS]
    budgets = [decision.budget for decision in site.decisions if decision.kind is ActionKind.TIGHTEN]
    assert budgets == [lowered(LINE, depth) for depth in (4, 3, 2, 1, 0)] and budgets[-1] == LINE.budget
    assert site.views["w"].shed is None and not site.levels.busy


def test_each_says_the_place_the_numbers_and_the_key() -> None:
    site = Site(view()).run(3.0, LOW).run(8.0, AMPLE)
    fires = site.said()[0]
    assert fires == ("tighten fires: host: 1546 MiB available, 10 MiB over the floor; guard.tighten.threshold 512MiB")
    assert [text.split(":")[0] for text in site.said()] == ["tighten fires", "shed fires", "abort fires", "abort is over"]
    assert site.decisions[0].sentence.startswith("lowering the line's budget from 200,000,000 to 33,554,432 token²: host: 1546")


def test_a_worker_that_is_not_serving_is_let_be_and_held_once_it_serves() -> None:
    site = Site(view(phase=Phase.STARTING)).run(5.0, LOW)
    assert site.kinds() == [] and len(site.said()) == 3
    site.views["w"] = view(generation=5)
    site.run(0.25, LOW)
    assert site.kinds() == ["tighten w", "shed w"], "the next generation is told too"


def test_without_a_line_nothing_is_lowered() -> None:
    assert Site(view(line=None, budget=None)).run(3.0, LOW).kinds() == ["shed w", "abort w"]
    assert short_tokens(None) == 2048


def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    dry = [replace(level, mode="dry-run") for level in RULES.levels]
    site = Site(view(), guard=replace(GUARD, tighten=dry[0], shed=dry[1], abort=dry[2])).run(4.0, LOW)
    assert site.decisions == []
    assert [text.partition(":")[2].split()[0] for text in site.said("dry-run")] == ["lowering", "refusing", "ending"]
    assert "to 33,554,432 token²" in site.said("dry-run")[0]
    assert "dry run: would refuse long prompts" in site.said()[1]
    site.run(70.0, AMPLE)
    assert site.decisions == [] and "taking all prompts again" in " ".join(site.said("dry-run"))


def test_a_dry_run_of_stop_is_told_for_each_crossing_that_was_not_there_before() -> None:
    site = Site(view(), guard=replace(GUARD, stop_mode="dry-run"))
    site.page["dry_stops"] = 3                # of an earlier daemon's time
    assert not [text for text in site.run(2.0, AMPLE).said("dry-run") if "stop would" in text]
    site.page["dry_stops"] = 4
    told = [text for text in site.run(2.0, FLOOR - MIB).said("dry-run") if "stop would" in text]
    assert len(told) == 1 and "guard.floor" in told[0]
    stop = rows(site.levels, site.guard, site.page)[-1]
    assert (stop.level, stop.mode, stop.acts) == ("stop", "dry-run", 4)


def test_a_dry_run_is_told_for_a_worker_that_comes_up_later() -> None:
    dry = [replace(level, mode="dry-run") for level in RULES.levels]
    site = Site(view(phase=Phase.STARTING), guard=replace(GUARD, tighten=dry[0], shed=dry[1])).run(3.0, LOW)
    assert site.said("dry-run") == []
    site.views["w"] = view(generation=5)
    assert len(site.run(1.0, LOW).said("dry-run")) == 2


def test_what_is_off_neither_acts_nor_speaks() -> None:
    site = Site(view(), guard=replace(GUARD, shed=replace(GUARD.shed, mode="off"))).run(4.0, LOW)
    assert site.kinds() == ["tighten w", "abort w"] and not [text for text in site.said() if "shed" in text]


def test_of_several_workers_that_with_the_longest_prompt_loses_one() -> None:
    site = Site(view("a", prefill_width=100), view("b", prefill_width=9000), view("c", role="decode", prefill_width=10**6),
                ranks={"a": rank(), "b": rank(), "c": rank()}).run(3.0, LOW)
    assert [kind for kind in site.kinds() if kind.startswith("abort")] == ["abort b"]
    idle = Site(view("a", prefill_width=100), view("b", prefill_width=9000), ranks={"a": rank(), "b": rank(in_flight=0)})
    assert "abort a" in idle.run(3.0, LOW).kinds()
    none = Site(view("a"), ranks={"a": rank(in_flight=0)})
    assert not [kind for kind in none.run(3.0, LOW).kinds() if kind.startswith("abort")]


def test_the_memory_of_a_device_tightens_its_worker_alone_and_never_refuses() -> None:
    site = Site(view("a"), view("b"), ranks={"a": rank(AMPLE, "gpu0"), "b": rank(AMPLE, "gpu1")}).run(2.0, AMPLE)
    site.ranks = {"a": rank(LOW, "gpu0"), "b": rank(AMPLE, "gpu1")}
    site.run(20.0, AMPLE)
    assert site.kinds() == ["tighten a"] and site.said()[0].startswith("tighten fires: a rank 0: 1546 MiB")
    assert [row.place for row in rows(site.levels, GUARD, {}) if row.in_force] == ["a rank 0"]


def test_a_rank_whose_memory_is_the_hosts_says_nothing_of_its_own() -> None:
    site = Site(view(), ranks={"w": rank(LOW, "gpu0")}).run(4.0, LOW)
    assert len(site.said()) == 3 and all("host:" in text for text in site.said())


def test_unknown_memory_decides_nothing() -> None:
    site = Site(view(), ranks={"w": rank(None, "gpu0")}).run(30.0, None)
    assert site.kinds() == [] and site.said() == []
    assert "not known" in rows(site.levels, GUARD, {})[0].sentence


def test_rows_show_stop_in_the_same_words() -> None:
    shown = rows(Site(view()).run(3.0, LOW).levels, GUARD, {"floor_bytes": FLOOR, "stops": 2})
    assert [(row.level, row.place, row.in_force, row.mark_bytes - FLOOR) for row in shown] == [
        ("tighten", HOST, True, 512 * MIB), ("shed", HOST, True, 256 * MIB), ("abort", HOST, True, 128 * MIB),
        ("stop", HOST, False, 0)]
    assert shown[3].acts == 2 and shown[3].mode == "act"
    assert rows(Levels(), replace(GUARD, floor_bytes=0), {})[3].mode == "off"


def test_the_floor_that_the_guard_keeps_counts() -> None:
    """guard.priority raises it."""
    shown = rows(Levels(), GUARD, {"floor_bytes": FLOOR + 128 * MIB})
    assert shown[0].mark_bytes == FLOOR + 640 * MIB


@pytest.mark.parametrize("budget", [1, 256 * 131072, 10**9])
def test_no_step_is_under_the_floor_budget(budget: int) -> None:
    spec = replace(LINE, budget=budget, floor_budget=min(budget, LINE.floor_budget))
    steps = [lowered(spec, depth) for depth in range(STEPS + 1)]
    assert steps[0] == spec.budget and steps[-1] == spec.floor_budget and steps == sorted(steps, reverse=True)
