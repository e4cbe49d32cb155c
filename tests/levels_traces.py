"""Memory of a made-up host over hours, and the ladder driven over it with the daemon's own pace. For tests and a bench."""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tightrank.config.shape import Level
from tightrank.daemon import BUSY_SECONDS, CALM_SECONDS, LOOK_SECONDS
from tightrank.levels import ladder as levels
from tightrank.levels.ladder import Ladder, Rules, Sample

MIB, GIB = 1 << 20, 1 << 30
FLOOR = 1536 * MIB
Trace = Callable[[float], int]
# As the configuration has them with the default margin of 512 MiB.
RULES = Rules(FLOOR, (Level("act", 512 * MIB, 1.0, 10.0, 256 * MIB), Level("act", 256 * MIB, 2.0, 10.0, 128 * MIB),
                      Level("act", 128 * MIB, 2.0, 5.0, 64 * MIB)))


class Fired(NamedTuple):
    """One act of a level: when, and how much was available."""
    name: str
    second: float
    available_bytes: int


def drive(trace: Trace, seconds: float, rules: Rules = RULES, ladder: Ladder | None = None) -> Iterator[tuple[float, Ladder]]:
    """(second, ladder) after each tick: every 5 s when calm, with a look every 0.5 s, every 0.25 s when close."""
    ladder, second, looked = ladder or Ladder(), 0.0, None
    while second <= seconds:
        ladder = levels.advance(ladder, rules, Sample(second, trace(second)))
        yield second, ladder
        if ladder.busy:
            second += BUSY_SECONDS
            looked = None
            continue
        for _ in range(round(CALM_SECONDS / LOOK_SECONDS)):
            before, looked = looked, Sample(second, trace(second))
            if levels.close(rules, before, looked):
                second += BUSY_SECONDS
                break
            second += LOOK_SECONDS


def fired(trace: Trace, seconds: float, rules: Rules = RULES) -> list[Fired]:
    """What acted, in order; not more than one level in a tick."""
    found: list[Fired] = []
    before = [0] * len(levels.LEVELS)
    for second, ladder in drive(trace, seconds, rules):
        now = [rung.acts for rung in ladder.rungs]
        new = [name for name, was, acts in zip(levels.LEVELS, before, now, strict=True) if acts > was]
        assert len(new) <= 1, "one level a tick"
        found += [Fired(name, second, trace(second)) for name in new]
        before = now
    return found


def noisy(seed: int, rest: int, jitter: int = 100 * MIB, spikes_an_hour: float = 20.0, spike: int = GIB,
          leak_an_hour: int = 0, swing: int = 0) -> Trace:
    """Memory at `rest`, jitter at each look, spikes of up to a second, a slow leak, and page cache that comes and goes."""
    plan = random.Random(seed)
    starts: list[tuple[float, float, float]] = []          # begin, end, share of the spike
    at = 0.0
    while at < 86_400:
        at += plan.expovariate(spikes_an_hour / 3600)
        starts.append((at, at + plan.uniform(0.05, 0.95), plan.uniform(0.5, 1.0)))
        at = starts[-1][1] + 1.0           # two that touch are one that is longer
    noise = random.Random(seed + 1)
    index = 0

    def available(second: float) -> int:
        nonlocal index
        while index < len(starts) and starts[index][1] < second:
            index += 1
        begin, end, share = starts[index] if index < len(starts) else (math.inf, math.inf, 0.0)
        taken = share * spike if begin <= second <= end else 0.0
        swung = swing * math.sin(second / 40.0) / 2
        return int(rest - taken - leak_an_hour * second / 3600 + swung + noise.uniform(-jitter, jitter))

    return available


def ramp(start: int, rate: float, begin: float = 30.0, until: int | None = None, jitter: int = 0) -> Trace:
    """Falls by `rate` bytes a second from `begin` on, and stops at `until`."""
    noise = random.Random(7)

    def available(second: float) -> int:
        held = start - rate * max(0.0, second - begin)
        held = held if until is None else max(until, held)
        return max(0, int(held + noise.uniform(-jitter, jitter)))

    return available
