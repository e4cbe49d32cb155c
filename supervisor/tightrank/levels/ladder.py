"""Pure: available memory over time -> the levels before the floor. Samples in, a ladder of levels out.

    tighten -> shed -> abort -> (stop: the guard's own, at the floor)

There is a ladder for the host and one for each worker whose ranks have device memory of their own. A level fires when
available memory was under its mark, or about to be, for its duration, and never before the one in front of it. It goes back
once memory has been over mark and hysteresis for its pause, the last one first. Unknown is neither under a mark nor a reason to
stay. Times are CLOCK_MONOTONIC; what was between two samples that lie far apart is not known, so it counts for nothing.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from tightrank.config import Guard
from tightrank.config.shape import Level

LEVELS = ("tighten", "shed", "abort")
STEPS = 4                  # in which `tighten` goes back; it comes at once
WINDOW_SECONDS = 3.0       # of samples, for the slope
RECENT_SECONDS = 1.0       # ... and the end of it: a spike that is over predicts nothing
SPACING_SECONDS = 0.2      # between samples that are kept: ticks may come 50 times a second
LEAD_SECONDS = 4.0         # how far ahead is looked: a request gone, or a smaller chunk, shows in memory after one chunk or two
GAP_SECONDS = 2.0          # between two samples; a tick near the floor comes every 0.25 s
CLOSE_SECONDS = 15.0       # a mark that this rate reaches within this time is worth a closer look
PRESSURE_PERCENT = 20.0    # PSI full, avg10: all tasks waited for memory a fifth of the time. For `tighten` alone


@dataclass(frozen=True, slots=True)
class Sample:
    """`available_bytes` None: it could not be read."""
    monotonic: float
    available_bytes: int | None
    pressure_percent: float | None = None      # PSI full


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of a ladder. `depth`: 0 not in force; `full` when it has fired; `tighten` goes back through those between."""
    under_since: float | None = None
    clear_since: float | None = None
    depth: int = 0
    acts: int = 0                  # how often it has acted
    acted: float = 0.0             # when it last did


@dataclass(frozen=True, slots=True)
class Ladder:
    """The levels of one place: the host, or a worker's ranks. `armed` False: memory has not been over all marks yet and does
    not count: a device whose rest lies under a mark was sized so."""
    rungs: tuple[Rung, ...] = (Rung(),) * len(LEVELS)
    window: tuple[tuple[float, int], ...] = ()         # (monotonic, available), oldest first
    latest: Sample | None = None
    fall: float = 0.0              # bytes a second
    armed: bool = True

    def depth(self, name: str) -> int:
        return self.rungs[LEVELS.index(name)].depth

    @property
    def busy(self) -> bool:
        """Whether a level is in force, or about to be."""
        return any(rung.depth or rung.under_since is not None for rung in self.rungs)


@dataclass(frozen=True, slots=True)
class Rules:
    """The levels in their order. `floor_bytes`: the guard's."""
    floor_bytes: int
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, guard: Guard) -> Rules:
        return cls(guard.floor_bytes, (guard.tighten, guard.shed, guard.abort))

    def alone(self, name: str) -> Rules:
        """With the other levels off."""
        return replace(self, levels=tuple(level if other == name else replace(level, mode="off")
                                          for other, level in zip(LEVELS, self.levels, strict=True)))

    def mark(self, level: Level) -> int:
        return self.floor_bytes + level.threshold_bytes

    @property
    def highest(self) -> int:
        """Over this no level is in force for good; 0 where all are off."""
        return max((self.over(level) for level in self.levels if level.mode != "off"), default=0)

    def over(self, level: Level) -> int:
        """What it takes to go back."""
        return self.mark(level) + level.hysteresis_bytes


def advance(ladder: Ladder, rules: Rules, sample: Sample) -> Ladder:
    """The ladder after one more sample. One that is not newer than the last changes nothing."""
    before = ladder.latest
    if before is not None and sample.monotonic <= before.monotonic:
        return ladder
    gap = before is None or sample.monotonic - before.monotonic > GAP_SECONDS
    window = _window(() if gap else ladder.window, sample)
    known = sample.available_bytes
    armed = ladder.armed or (known is not None and known >= rules.highest)
    seen = replace(ladder, window=window, latest=sample, fall=fall(window), armed=armed)
    rungs: list[Rung] = []
    free = True                    # whether the levels before have fired
    for name, level, rung in zip(LEVELS, rules.levels, ladder.rungs, strict=True):
        if level.mode != "off":
            timed = _timed(rung, seen, rules, level, name == "tighten", gap)
            rung, free = _fired(timed, level, name, sample.monotonic) if free else timed, rung.depth > 0
        rungs.append(rung)
    return replace(seen, rungs=_relaxed(tuple(rungs), rules, sample.monotonic))


def _window(window: tuple[tuple[float, int], ...], sample: Sample) -> tuple[tuple[float, int], ...]:
    if sample.available_bytes is None:
        return ()
    kept = tuple(each for each in window if sample.monotonic - each[0] <= WINDOW_SECONDS)
    if kept and sample.monotonic - kept[-1][0] < SPACING_SECONDS:
        return kept
    return (*kept, (sample.monotonic, sample.available_bytes))


def fall(window: Sequence[tuple[float, int]]) -> float:
    """Bytes a second by which memory falls, 0 where it does not: the median slope of all pairs of samples (one outlier, or a
    step, moves it little), in the whole window and at its end alike."""
    recent = [each for each in window if window[-1][0] - each[0] <= RECENT_SECONDS]
    if len(recent) < 3 or window[-1][0] - window[0][0] < RECENT_SECONDS * 0.75:
        return 0.0
    return max(0.0, min(-_slope(window), -_slope(recent)))


def _slope(samples: Sequence[tuple[float, int]]) -> float:
    return median((b - a) / (later - earlier) for index, (earlier, a) in enumerate(samples) for later, b in samples[index + 1:])


def expected(ladder: Ladder) -> float | None:
    """Available memory as it is or, where it falls, as it will be after LEAD_SECONDS; None: not known, or not to count."""
    if ladder.latest is None or ladder.latest.available_bytes is None or not ladder.armed:
        return None
    return ladder.latest.available_bytes - ladder.fall * LEAD_SECONDS


def floor_in_seconds(ladder: Ladder, rules: Rules) -> float | None:
    """When the floor is reached if memory goes on falling so; None where it does not fall."""
    if ladder.latest is None or ladder.latest.available_bytes is None or not ladder.fall:
        return None
    return max(0.0, (ladder.latest.available_bytes - rules.floor_bytes) / ladder.fall)


def _timed(rung: Rung, seen: Ladder, rules: Rules, level: Level, pressure_counts: bool, gap: bool) -> Rung:
    """`rung` with since when memory is under the mark, or over it for good."""
    assert seen.latest is not None
    now, ahead, pressure = seen.latest.monotonic, expected(seen), seen.latest.pressure_percent
    pressed = pressure_counts and pressure is not None and pressure >= PRESSURE_PERCENT
    under = pressed or (ahead is not None and ahead < rules.mark(level))
    clear = not pressed and (ahead is None or ahead >= rules.over(level))
    return replace(rung, under_since=_since(rung.under_since, under, gap, now),
                   clear_since=_since(rung.clear_since, clear, gap, now))


def _since(before: float | None, true: bool, gap: bool, now: float) -> float | None:
    if not true:
        return None
    return now if before is None or gap else before


def _fired(rung: Rung, level: Level, name: str, now: float) -> Rung:
    full = STEPS if name == "tighten" else 1
    again = rung.depth < full or (name == "abort" and now - rung.acted >= level.pause_seconds)
    if rung.under_since is None or now - rung.under_since < level.duration_seconds or not again:
        return rung
    return replace(rung, depth=full, acts=rung.acts + 1, acted=now)


def _relaxed(rungs: tuple[Rung, ...], rules: Rules, now: float) -> tuple[Rung, ...]:
    """The last level in force goes back by a step when its pause is over."""
    last = max((index for index, rung in enumerate(rungs) if rung.depth), default=None)
    if last is None:
        return rungs
    rung, pause = rungs[last], rules.levels[last].pause_seconds
    if rung.clear_since is None or now - max(rung.clear_since, rung.acted) < pause:
        return rungs
    return (*rungs[:last], replace(rung, depth=rung.depth - 1, acted=now), *rungs[last + 1:])


def close(rules: Rules, before: Sample | None, now: Sample) -> bool:
    """Whether two looks far from the floor say that a closer one is due: under the first mark's way back, or soon there."""
    if now.available_bytes is None:
        return False
    room = now.available_bytes - rules.highest
    if room < 0:
        return True
    if before is None or before.available_bytes is None or now.monotonic <= before.monotonic:
        return False
    return (before.available_bytes - now.available_bytes) / (now.monotonic - before.monotonic) * CLOSE_SECONDS > room
