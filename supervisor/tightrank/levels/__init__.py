"""Pure: one snapshot more -> the ladders of all places, what they say, and what is decided for each worker.

The host's memory counts for every worker and drives every level. The memory of a device of its own drives `tighten` alone: an
engine keeps what it has freed, so little free memory there is no proof, and a full device does not end the host.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from tightrank import auto
from tightrank.adapter import line
from tightrank.config import Guard
from tightrank.config.units import format_size
from tightrank.levels.ladder import LEVELS, STEPS, Ladder, Rules, Sample, advance, floor_in_seconds
from tightrank.records import (
    ActionKind,
    Decision,
    Event,
    LevelStatus,
    LineSpec,
    Phase,
    Shed,
    Snapshot,
    WorkerReading,
    WorkerView,
)

HOST = "host"
LONG_PROMPT_TOKENS = 2048      # what is refused where there is no line: more than vLLM's own default chunk
_SERVING = (Phase.UP, Phase.DRAINING)
_WOULD = {"tighten": "lower the line's budget", "shed": "refuse long prompts", "abort": "end the largest prefill in flight"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """How one worker is to be held while the levels are as they are."""
    budget: int | None
    shed: Shed | None


@dataclass(frozen=True, slots=True)
class Levels:
    """The ladders. Those of `workers` are for one generation each: (generation, the rank's name, ladder). `dry`: how a dry
    run would hold each worker by now, (generation, so)."""
    host: Ladder = field(default_factory=Ladder)
    workers: Mapping[str, tuple[int, str, Ladder]] = field(default_factory=dict)
    dry: Mapping[str, tuple[int, Wanted]] = field(default_factory=dict)
    aims: Mapping[str, auto.Aim] = field(default_factory=dict)     # the budgets of `auto` lines, from which a level lowers
    dry_stops: int | None = None           # crossings of the floor in a dry run of `stop`, as the guard counts them

    @property
    def busy(self) -> bool:
        return self.host.busy or any(ladder.busy for _, _, ladder in self.workers.values())

    def places(self, rules: Rules) -> Iterator[tuple[str, str, Ladder, Rules]]:
        """(worker, or "" for the host; the place in words; its ladder; its rules)."""
        yield "", HOST, self.host, rules
        for name, (_, rank, ladder) in self.workers.items():
            yield name, f"{name} {rank}", ladder, rules.alone("tighten")

    def depth(self, worker: str, level: str) -> int:
        _, _, ladder = self.workers.get(worker, (0, "", Ladder()))
        return max(self.host.depth(level), ladder.depth(level))


def step(before: Levels, guard: Guard, snapshot: Snapshot, views: Sequence[WorkerView]
         ) -> tuple[Levels, list[Event], list[Decision]]:
    """The levels now, what they say (with what a dry run would do), and what is to be done."""
    rules, aims = rules_now(guard, snapshot.guard), auto.step(before.aims, guard, snapshot, views)
    views = auto.based(views, aims)
    after = Levels(advance(before.host, rules, _host_sample(snapshot)), dict(_workers(before, rules, snapshot, views)),
                   aims=aims, dry_stops=snapshot.guard.get("dry_stops"))
    serving = [view for view in views if view.phase in _SERVING]
    dry = {view.name: (view.generation, wanted(after, guard, rules, view, "dry-run")) for view in serving}
    after = replace(after, dry=dry)
    decisions = [decision for view in serving for decision in _held(after, guard, rules, view)]
    events = [*_said(before, after, rules, snapshot.unix), *_dry(before, after, rules, serving, snapshot.unix),
              *_dry_stop(before, after, rules, snapshot.unix)]
    if after.host.rungs[2].acts > before.host.rungs[2].acts:
        aborted = _abort(after, rules, snapshot, serving)
        decisions += [aborted] if aborted and guard.abort.mode == "act" else []
        if aborted and guard.abort.mode == "dry-run":
            events.append(Event(snapshot.unix, "dry-run", aborted.worker, aborted.generation, f"dry run: {aborted.sentence}"))
    return after, events, decisions


def rules_now(guard: Guard, page: Mapping[str, Any]) -> Rules:
    """With the floor that the guard really keeps (it counts guard.priority)."""
    return replace(Rules.of(guard), floor_bytes=page.get("floor_bytes") or guard.floor_bytes)


# --- places -----------------------------------------------------------------------------------------------------------

def _host_sample(snapshot: Snapshot) -> Sample:
    return Sample(snapshot.monotonic, snapshot.memory.available_bytes, snapshot.memory.pressure_full_avg10)


def _workers(before: Levels, rules: Rules, snapshot: Snapshot, views: Sequence[WorkerView]
             ) -> Iterator[tuple[str, tuple[int, str, Ladder]]]:
    """A ladder for each worker that serves and has a rank with a device of its own."""
    for view in views:
        tightest = _tightest(snapshot.workers[view.name])
        if view.phase not in _SERVING or tightest is None:
            continue
        generation, _, ladder = before.workers.get(view.name, (0, "", Ladder()))
        if generation != view.generation:
            ladder = Ladder(armed=False)
        rank, available = tightest
        ladder = replace(ladder, armed=ladder.armed or (available is not None and available >= rules.highest))
        host = snapshot.memory.available_bytes
        own = available if available is None or host is None or available < host else None     # else the host's ladder speaks
        yield view.name, (view.generation, rank, advance(ladder, rules.alone("tighten"), Sample(snapshot.monotonic, own)))


def _tightest(reading: WorkerReading) -> tuple[str, int | None] | None:
    """(name, available) of the rank with the least; None: no rank has a device."""
    ranks = [rank for rank in reading.ranks if rank.device is not None]
    known = [rank for rank in ranks if rank.available_bytes is not None]
    if not ranks:
        return None
    chosen = min(known or ranks, key=lambda rank: rank.available_bytes or 0)
    return f"rank {chosen.rank if chosen.rank is not None else chosen.role}", chosen.available_bytes


# --- what is said -----------------------------------------------------------------------------------------------------

def _said(before: Levels, after: Levels, rules: Rules, unix: float) -> Iterator[Event]:
    """An event for each level that fires, goes back by a step or is over."""
    earlier = {worker: ladder for worker, _, ladder, _ in before.places(rules)}
    for worker, place, ladder, own in after.places(rules):
        was = earlier.get(worker, Ladder())
        for name, level, old, new in zip(LEVELS, own.levels, was.rungs, ladder.rungs, strict=True):
            acts, back = new.acts > old.acts, new.depth < old.depth
            if not acts and not back:
                continue
            seen = sentence(place, ladder, own)
            key = f"guard.{name}.threshold {format_size(level.threshold_bytes)}"
            would = f" (dry run: would {_WOULD[name]})" if level.mode == "dry-run" and acts else ""
            words = f"{name} fires{would}: {seen}; {key}" if acts else f"{name} {_back(new.depth)}: {seen}"
            yield Event(unix, "level", None, None, words, {
                "level": name, "place": place, "mode": level.mode, "state": "fires" if acts else "back", "depth": new.depth,
                "available_bytes": ladder.latest.available_bytes if ladder.latest else None, "floor_bytes": own.floor_bytes})


def _back(depth: int) -> str:
    return f"goes back, {depth} of {STEPS} steps left" if depth else "is over"


def sentence(place: str, ladder: Ladder, rules: Rules) -> str:
    """What memory looks like at a place."""
    seen = ladder.latest
    if seen is None or seen.available_bytes is None:
        return f"{place}: available memory is not known"
    over = (seen.available_bytes - rules.floor_bytes) >> 20
    words = f"{place}: {seen.available_bytes >> 20} MiB available, {abs(over)} MiB {'over' if over >= 0 else 'under'} the floor"
    seconds = floor_in_seconds(ladder, rules)
    if seconds is not None and ladder.fall >= 1 << 20:
        words += f", falling by {ladder.fall / (1 << 20):.0f} MiB/s (the floor in {seconds:.1f} s)"
    if seen.pressure_percent:
        words += f", all tasks wait for memory {seen.pressure_percent:.0f} % of the time"
    return words


# --- what is decided --------------------------------------------------------------------------------------------------

def wanted(levels: Levels, guard: Guard, rules: Rules, view: WorkerView, mode: str = "act") -> Wanted:
    """How `view` is to be held by the levels of this mode."""
    depth = levels.depth(view.name, "tighten") if guard.tighten.mode == mode else 0
    shed = guard.shed.mode == mode and levels.host.depth("shed") > 0
    return Wanted(lowered(view.line, depth) if view.line else None,
                  Shed(short_tokens(view.line), max(1, ceil(guard.shed.pause_seconds)),
                       sentence(HOST, levels.host, rules)) if shed else None)


def lowered(spec: LineSpec, depth: int) -> int:
    """The line's budget with `depth` of STEPS steps to go back. Never under the floor budget: what was accepted must end."""
    return spec.budget - (spec.budget - spec.floor_budget) * depth // STEPS


def short_tokens(spec: LineSpec | None) -> int:
    """The longest prompt that one chunk of the lowest budget holds."""
    if spec is None:
        return LONG_PROMPT_TOKENS
    return line.chunk_tokens(spec.floor_budget, 0, **spec.keywords()) or spec.minimum


def _held(levels: Levels, guard: Guard, rules: Rules, view: WorkerView) -> Iterator[Decision]:
    want = wanted(levels, guard, rules, view)
    yield from _changes(levels, rules, view, Wanted(view.budget, view.shed), want)


def _changes(levels: Levels, rules: Rules, view: WorkerView, held: Wanted, want: Wanted) -> Iterator[Decision]:
    tight = levels.depth(view.name, "tighten") > 0 or not view.line_why
    why = _why(levels, rules, view.name)
    said, reason = (why, "memory") if tight else (view.line_why, "auto")
    if want.budget is not None and held.budget is not None and want.budget != held.budget:
        way = "lowering" if want.budget < held.budget else "raising"
        yield Decision(ActionKind.TIGHTEN, view.name, view.generation,
                       f"{way} the line's budget from {held.budget:,} to {want.budget:,} token²: {said}",
                       reason=reason if want.budget < held.budget or not tight else "memory-back", budget=want.budget)
    if (want.shed is None) != (held.shed is None):
        words = f"refusing prompts of more than {want.shed.new_tokens} new tokens" if want.shed else "taking all prompts again"
        yield Decision(ActionKind.SHED, view.name, view.generation, f"{words}: {why}",
                       reason="memory" if want.shed else "memory-back", shed=want.shed)


def _why(levels: Levels, rules: Rules, worker: str) -> str:
    """Of the host or, where only that is short, of the worker's device."""
    _, rank, ladder = levels.workers.get(worker, (0, "", Ladder()))
    if ladder.depth("tighten") > levels.host.depth("tighten"):
        return sentence(f"{worker} {rank}", ladder, rules)
    return sentence(HOST, levels.host, rules)


def _dry(before: Levels, after: Levels, rules: Rules, views: Sequence[WorkerView], unix: float) -> Iterator[Event]:
    """What would have been decided by the levels that only say so."""
    for view in views:
        generation, held = before.dry.get(view.name, (0, None))
        if held is None or generation != view.generation:
            held = Wanted(view.line.budget if view.line else None, None)
        elif before.depth(view.name, "tighten") == after.depth(view.name, "tighten"):
            held = replace(held, budget=after.dry[view.name][1].budget)          # an `auto` line moves without a level
        for decision in _changes(after, rules, view, held, after.dry[view.name][1]):
            yield Event(unix, "dry-run", view.name, view.generation, f"dry run: {decision.sentence}",
                        {"action": decision.kind.value, "reason": decision.reason})


def _dry_stop(before: Levels, after: Levels, rules: Rules, unix: float) -> Iterator[Event]:
    if before.dry_stops is not None and (after.dry_stops or 0) > before.dry_stops:
        yield Event(unix, "dry-run", None, None, f"dry run: stop would end all ranks: the guard saw less than guard.floor "
                    f"{format_size(rules.floor_bytes)}; now {sentence(HOST, after.host, rules)}", {"action": "stop"})


def _abort(levels: Levels, rules: Rules, snapshot: Snapshot, views: Sequence[WorkerView]) -> Decision | None:
    """One worker of those that have prompts in flight: that whose last prefill step was over the longest prompt."""
    busy = [view for view in views if view.role != "decode" and _in_flight(snapshot.workers[view.name])]
    if not busy:
        return None
    view = max(busy, key=lambda view: view.prefill_width)
    return Decision(ActionKind.ABORT, view.name, view.generation,
                    f"ending the largest prefill in flight: {sentence(HOST, levels.host, rules)}", reason="memory")


def _in_flight(reading: WorkerReading) -> bool:
    """Whether there may be requests in its engine; where no rank tells, there may."""
    told = [rank.in_flight for rank in reading.ranks if rank.loops]
    return not told or max(told) > 0


# --- what is shown ----------------------------------------------------------------------------------------------------

def rows(levels: Levels, guard: Guard, page: Mapping[str, Any]) -> tuple[LevelStatus, ...]:
    """All levels at all places, and `stop` in the same words."""
    rules = rules_now(guard, page)
    shown = [LevelStatus(name, place, level.mode, own.mark(level), rung.depth > 0, rung.acts, floor_in_seconds(ladder, own),
                         sentence(place, ladder, own))
             for _, place, ladder, own in levels.places(rules)
             for name, level, rung in zip(LEVELS, own.levels, ladder.rungs, strict=True)
             if place == HOST or level.mode != "off"]
    dry = guard.stop_mode == "dry-run"
    stop = LevelStatus("stop", HOST, guard.stop_mode if rules.floor_bytes else "off", rules.floor_bytes, False,
                       page.get("dry_stops" if dry else "stops") or 0, floor_in_seconds(levels.host, rules),
                       sentence(HOST, levels.host, rules))
    return (*shown, stop)
