"""`line.budget: auto`: the line's budget from what memory allows and what prefills were seen to hold. Pure.

    B = (available at rest - KV cache not yet written - floor and margin - step - row·T) / pair, on the tightest rank

`pair`, `row` and `step` are fitted to the steps' peaks (peaks.py). B is lowered at once, a little more than it must be: memory
that comes and goes by as much moves nothing. Past the largest step that was lived through it is raised by a quarter at a
time: a fit tells little about sizes that nobody has seen.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tightrank.auto.peaks import NEAR, UNBOUNDED, Evidence
from tightrank.config import Guard
from tightrank.records import LineSpec, Phase, Snapshot, WorkerReading, WorkerView

RAISE = 1.25               # times the largest proven step
WORTH = 1.04               # a raise by less is not told: each one is a request to the engine
WORTH_UNPROVEN = 1.1       # nor, on the way there, by less than this: under a quarter, so that no step is cut for it
STEADY_SECONDS = 10.0      # the scarcest look of so long counts: memory that comes and goes would move the budget each time
SPARE = 1.02               # how much deeper a fall goes
_SERVING = (Phase.UP, Phase.DRAINING)
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankAim:
    """What one rank allows. `room_bytes`: for the transients of its steps, when it was scarcest of late: `seen_monotonic`.
    `pairs`: token², None: no step has told yet and the configuration gave the start."""
    rank: int
    available_bytes: int
    untouched_bytes: int
    room_bytes: int
    pairs: int | None
    proven_pairs: int
    seen_monotonic: float
    pair_bytes: float | None = None
    row_bytes: float | None = None
    short_row_bytes: float | None = None
    step_bytes: float | None = None
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Aim:
    """The budget of one generation, token², and why. `binds`: None while that is not known."""
    generation: int
    budget: int
    binds: bool | None
    sentence: str
    tightest_rank: int | None = None
    ranks: tuple[RankAim, ...] = ()


def step(before: Mapping[str, Aim], guard: Guard, snapshot: Snapshot, views: Sequence[WorkerView]) -> Mapping[str, Aim]:
    """The aims of all workers that serve under an `auto` line."""
    shared = _Shared.of(guard, snapshot, views)
    return {view.name: _aim(_before(before.get(view.name), view), view, view.line, list(_ranks(view, snapshot, shared, before)))
            for view in views if view.line is not None and view.line.auto and view.phase in _SERVING}


def based(views: Sequence[WorkerView], aims: Mapping[str, Aim]) -> list[WorkerView]:
    """The views with the budgets that the guard's levels start from."""
    return [replace(view, line=replace(view.line, budget=aim.budget), line_why=aim.sentence)
            if view.line is not None and (aim := aims.get(view.name)) is not None else view for view in views]


def _before(aim: Aim | None, view: WorkerView) -> Aim | None:
    return aim if aim is not None and aim.generation == view.generation else None


# --- memory -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Shared:
    """The host's memory among the ranks that compute in it: each takes its transients at the same time."""
    keep_bytes: int                # floor and margin
    margin_bytes: int
    untouched_bytes: int | None    # of all of them; None: not known of one
    ranks: int

    @classmethod
    def of(cls, guard: Guard, snapshot: Snapshot, views: Sequence[WorkerView]) -> _Shared:
        found = [each for view in views for each in view.evidence if not _own_device(snapshot.workers[view.name], each.rank)]
        computing = sum(1 for view in views if view.role != "decode" for each in view.evidence
                        if not _own_device(snapshot.workers[view.name], each.rank))
        untouched = [each.untouched_bytes for each in found]
        floor = snapshot.guard.get("floor_bytes") or guard.floor_bytes
        return cls(floor + guard.margin_bytes, guard.margin_bytes,
                   None if None in untouched else sum(each or 0 for each in untouched), max(computing, 1))


def _own_device(reading: WorkerReading, number: int) -> bool:
    """Whether a rank computes in memory that is not the host's."""
    return any(rank.rank == number and rank.device is not None and not rank.facts.get("memory_shared", False)
               for rank in reading.ranks)


def _ranks(view: WorkerView, snapshot: Snapshot, shared: _Shared, before: Mapping[str, Aim]) -> Iterator[RankAim]:
    reading, aim = snapshot.workers[view.name], _before(before.get(view.name), view)
    earlier = {rank.rank: rank for rank in aim.ranks} if aim is not None else {}
    idle = not any(rank.in_flight for rank in reading.ranks)
    for each in view.evidence:
        own = _own_device(reading, each.rank)
        available, untouched = each.available_bytes, each.untouched_bytes if own else shared.untouched_bytes
        if idle and _on_cpu(reading, each.rank) and snapshot.memory.available_bytes is not None:
            available = snapshot.memory.available_bytes     # what has come or gone since the last step
        if available is None or untouched is None:
            continue
        keep, ranks = (shared.margin_bytes, 1) if own else (shared.keep_bytes, shared.ranks)
        seen = RankAim(each.rank, available, untouched, max(available - untouched - keep, 0) // ranks, None, each.proven_pairs,
                       snapshot.monotonic)
        yield _rank(view, each, _scarcest(earlier.get(each.rank), seen))


def _on_cpu(reading: WorkerReading, number: int) -> bool:
    return any(rank.rank == number and rank.device is None for rank in reading.ranks)


def _scarcest(before: RankAim | None, seen: RankAim) -> RankAim:
    """With the memory of the look before, if that was scarcer and not long ago."""
    if before is None or before.room_bytes >= seen.room_bytes or seen.seen_monotonic - before.seen_monotonic >= STEADY_SECONDS:
        return seen
    return replace(seen, available_bytes=before.available_bytes, untouched_bytes=before.untouched_bytes,
                   room_bytes=before.room_bytes, seen_monotonic=before.seen_monotonic)


def _rank(view: WorkerView, each: Evidence, made: RankAim) -> RankAim:
    assert view.line is not None
    fit = each.fit
    if fit is None:
        return replace(made, pairs=_without_fit(view.line, each, made.room_bytes))
    return replace(made, pairs=fit.pairs(made.room_bytes, view.line.maximum), pair_bytes=fit.pair_bytes,
                   row_bytes=fit.row_bytes, short_row_bytes=fit.short_row_bytes, step_bytes=fit.step_bytes, samples=fit.samples)


def _without_fit(line: LineSpec, each: Evidence, room: int) -> int | None:
    """As published, or less: all that the largest step held may belong to its pairs."""
    found = [room // line.assumed_pair_bytes] if line.assumed_pair_bytes else []
    if each.proven_bytes and NEAR * each.proven_pairs >= line.budget:
        found.append(int(room / each.proven_bytes * each.proven_pairs))
    return min(found, default=None)


# --- the budget -------------------------------------------------------------------------------------------------------

def _aim(before: Aim | None, view: WorkerView, line: LineSpec, ranks: Sequence[RankAim]) -> Aim:
    held = before.budget if before is not None else line.budget
    known = [rank for rank in ranks if rank.pairs is not None]
    if len(known) < max(1, *(count for hook, _, count in view.hook_roles if hook == "ranks")):
        return Aim(view.generation, held, None, "auto: " + _unknown(view, ranks), None, tuple(ranks))
    tightest = min(known, key=lambda rank: rank.pairs or 0)
    most, ideal = line.maximum * (view.context_tokens or UNBOUNDED), tightest.pairs or 0
    budget = _moved(held, ideal, most, line, tightest)
    binds, fitted = budget < most, tightest.pair_bytes is not None
    if before is not None and (before.budget, before.binds, _fitted(before)) == (budget, binds, fitted):
        return replace(before, ranks=tuple(ranks), tightest_rank=tightest.rank)
    return Aim(view.generation, budget, binds, _sentence(line, tightest, budget, most), tightest.rank, tuple(ranks))


def _fitted(aim: Aim) -> bool:
    """Whether its sentence is of a fit."""
    return any(rank.pair_bytes is not None for rank in aim.ranks if rank.rank == aim.tightest_rank)


def _moved(held: int, ideal: int, most: int, line: LineSpec, tightest: RankAim) -> int:
    """Never under the floor budget: what the engine has accepted must end."""
    if ideal < held:
        return max(int(ideal / SPARE), line.floor_budget)
    allowed, fitted = min(ideal, most), tightest.pair_bytes is not None
    raised = min(allowed, int(RAISE * tightest.proven_pairs)) if fitted else allowed
    return raised if raised >= (WORTH if raised == allowed else WORTH_UNPROVEN) * held else held


def _unknown(view: WorkerView, ranks: Sequence[RankAim]) -> str:
    silent = [each.rank for each in view.evidence if each.rank not in {rank.rank for rank in ranks}]
    if not view.evidence or silent:
        named = f"rank {silent[0]}" if silent else "no rank"
        return f"{named} {'does not tell' if silent else 'has told'} what its KV cache has not yet written; the budget stays"
    return "no fit yet; the budget stays as configured"


def _sentence(line: LineSpec, rank: RankAim, budget: int, most: int) -> str:
    room = (f"rank {rank.rank} is the tightest, with room for {rank.room_bytes / _GIB:.2f} GiB "
            f"({rank.available_bytes / _GIB:.2f} available, {rank.untouched_bytes / _GIB:.2f} of KV not yet written)")
    if rank.pair_bytes is not None:
        made = f"{rank.pair_bytes:.3g} bytes for each (row, key), {rank.row_bytes:,.0f} for each row"
    elif line.assumed_pair_bytes:
        made = f"{line.assumed_pair_bytes} bytes for each (row, key) are assumed"
    else:
        made = f"no fit yet; all that the largest step held, of {rank.proven_pairs:,} token², is taken for its pairs"
    allowed = rank.pairs or 0
    enough = f"enough for {allowed:,} token²" if allowed < UNBOUNDED else "enough for any step"
    if budget >= most:
        return f"auto: the line does not bind: {made}; {room}; the largest step that can be is {most:,} token²"
    if allowed < line.floor_budget:
        return (f"auto: {made}; {room}, {enough}, which is under the floor budget "
                f"{line.floor_budget:,}: a longer prompt may cross the guard's floor; lower line.context, or free memory")
    proven = f"; a quarter more than the largest step so far, {rank.proven_pairs:,}" if budget < allowed else ""
    return f"auto: {made}; {room}, {enough}{proven}"
