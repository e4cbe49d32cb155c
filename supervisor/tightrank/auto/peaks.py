"""What a prefill step holds at its peak, from the records of one rank. Pure but for what it remembers.

    rise = step + max(short_row·T, row·T + pair·T·W)        T rows, W the longest key length, bytes

`pair` is what the line bounds: scores of each row against each key. `row` is what a row costs however long the prompt is; a
buffer over the engine's largest length is among it. With a short prompt another phase of the step sets the peak: `short_row`.
Measured on a DeepSeek-V4 (docs/hooks.md): 48 KiB a row, then 22 KiB a row and 1.00 byte a pair.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from tightrank.least_squares import Row, Terms, gram, least

if TYPE_CHECKING:
    from tightrank_adapter.wire import Step

SAMPLES = 8                # before anything is said
SPAN = 2.0                 # of widths, smallest to largest: else `pair` cannot be told from `row`
RATIO, KEPT = 1.5, 3       # samples are kept by width: a few of each band, so that long prompts do not push out short ones
FRESH = 6                  # steps
HALF_LIFE, STALE = 16, 0.02        # steps after which a sample counts half; what it counts at the least
NEAR = 4                   # a step of so much less than the budget tells nothing of one that fills it
LATEST = 3                 # of the steps with the most pairs: two of them over the fit raise it at once
REFIT_SECONDS = 1.0
NOISE_BYTES = 1 << 20      # of a reading: the kernel counts pages by batches (mm/memory.c, percpu_counter)
UNBOUNDED = 10**15         # token²: more than any configuration may ask for
_ROUNDS = 4                # of reweighting
_TURNS = 5                 # places at which the other phase may end
_WORTH = 4                 # times closer with a constant
_PHASES = 2.0              # times closer with another phase for short prompts
_HUBER = 1.345             # 95 % efficient for normal errors (Huber 1964)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: rows, longest key length, bytes from rest to peak; `number` grows with time."""
    rows: int
    width: int
    rise_bytes: int
    number: int = 0

    @property
    def pairs(self) -> int:
        return self.rows * self.width

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.width


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes for each (row, key), for each row, for each row of a short prompt, and for a step."""
    pair_bytes: float
    row_bytes: float
    short_row_bytes: float
    step_bytes: float
    samples: int

    def rise_bytes(self, rows: int, width: int) -> float:
        """At the peak of a step."""
        return self.step_bytes + rows * max(self.short_row_bytes, self.row_bytes + self.pair_bytes * width)

    def pairs(self, room_bytes: float, rows: int) -> int:
        """The largest rows x width that a step of at most `rows` may have; 0: its rows alone are too much."""
        left = room_bytes - self.step_bytes - rows * self.row_bytes
        if left <= 0 or room_bytes < self.step_bytes + rows * self.short_row_bytes:
            return 0
        return int(min(left / self.pair_bytes, UNBOUNDED)) if self.pair_bytes else UNBOUNDED


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one rank's steps have told so far. `available_bytes`, `untouched_bytes`: as a step began, see wire.Step."""
    rank: int
    fit: Fit | None
    proven_pairs: int              # of the largest step that was lived through
    proven_bytes: int              # that it held
    available_bytes: int | None
    untouched_bytes: int | None


@dataclass(slots=True)
class Peaks:
    """The steps of one rank in one generation."""
    rank: int
    proven_pairs: int = 0
    proven_bytes: int = 0
    available_bytes: int | None = None
    untouched_bytes: int | None = None
    _bands: dict[int, deque[Sample]] = field(default_factory=dict)
    _latest: deque[Sample] = field(default_factory=lambda: deque(maxlen=LATEST))
    _fit: Fit | None = None
    _fitted: float = float("-inf")
    _stale: bool = False
    _urgent: bool = False

    def learn(self, step: Step) -> None:
        """A few comparisons: it runs for each step."""
        if step.available_bytes is not None:
            self.available_bytes, self.untouched_bytes = step.available_bytes, step.untouched_bytes
        if step.peak_bytes is None or step.rest_bytes is None or not step.rows:
            return
        sample = Sample(step.rows, step.width, max(step.peak_bytes - step.rest_bytes, 0), step.sequence)
        self._bands.setdefault(_band(sample.width), deque(maxlen=KEPT)).append(sample)
        if sample.pairs > self.proven_pairs:
            self.proven_pairs, self.proven_bytes = sample.pairs, sample.rise_bytes
        if 2 * sample.pairs >= self.proven_pairs:
            self._latest.append(sample)
            self._urgent |= self._fit is not None and sample.rise_bytes > self._fit.rise_bytes(*sample.shape) + NOISE_BYTES
        self._stale = True

    def evidence(self, now: float) -> Evidence:
        """Fits anew what has come, once in REFIT_SECONDS (it takes some milliseconds) or when a large step was over the fit."""
        if self._urgent or (self._stale and now - self._fitted >= REFIT_SECONDS):
            samples = [each for band in self._bands.values() for each in band]
            self._fit = fit(samples, tuple(self._latest), self._row(samples))
            self._fitted, self._stale, self._urgent = now, False, False
        return Evidence(self.rank, self._fit, self.proven_pairs, self.proven_bytes, self.available_bytes, self.untouched_bytes)

    def _row(self, samples: Sequence[Sample]) -> float | None:
        """The row bytes of the fit before, while no step of many rows is fresh: what has drifted since such a step would be
        taken for its rows."""
        most, newest = max(each.rows for each in samples), max(each.number for each in samples)
        fresh = any(2 * each.rows >= most and newest - each.number <= FRESH for each in samples)
        return None if fresh or self._fit is None else self._fit.row_bytes


def _band(width: int) -> int:
    """The number of the band of widths, each RATIO times the one before."""
    number, edge = 0, 256.0
    while edge < width:
        number, edge = number + 1, edge * RATIO
    return number


def fit(samples: Sequence[Sample], latest: Sequence[Sample] = (), row_bytes: float | None = None) -> Fit | None:
    """None: too few, or too much alike to tell the terms apart. `latest` may raise `pair_bytes`, and cannot lower it.
    `row_bytes`: known, and not to be fitted."""
    ordered = sorted(samples, key=lambda sample: sample.width)
    if len(ordered) < SAMPLES or ordered[-1].width < SPAN * ordered[0].width:
        return None
    found = [_from(ordered, len(ordered) * turn // (2 * _TURNS), row_bytes) for turn in range(_TURNS)]
    known = [each for each in found if each is not None]
    if not known:
        return None
    best = known[0]
    for other in known[1:]:
        if _PHASES * _misses(other, ordered) < _misses(best, ordered):
            best = other
    return _raised(best, latest)


def _from(ordered: Sequence[Sample], first: int, row_bytes: float | None) -> Fit | None:
    """The terms by the samples from `first` on, and the other phase by those before."""
    terms = _terms(ordered[first:], row_bytes)
    if terms is None:
        return None
    row, pair, step = terms
    short = median(max(each.rise_bytes - step, 0.0) / each.rows for each in ordered[:first]) if first else 0.0
    return Fit(pair, row, short, step, len(ordered))


def _misses(found: Fit, samples: Sequence[Sample]) -> float:
    return sum(abs(each.rise_bytes - found.rise_bytes(each.rows, each.width)) for each in samples)


def _raised(found: Fit, latest: Sequence[Sample]) -> Fit:
    """With the `pair_bytes` of the latest large steps where it is more: one spike does not count, a drift does."""
    own = [(each.rise_bytes - NOISE_BYTES - found.step_bytes - each.rows * found.row_bytes) / each.pairs for each in latest]
    seen = median(own) if len(own) == LATEST else 0.0
    return replace(found, pair_bytes=max(seen, found.pair_bytes))


# --- the estimate -----------------------------------------------------------------------------------------------------

def _terms(samples: Sequence[Sample], row_bytes: float | None) -> Terms | None:
    """(row, pair, step) by Huber's estimate.

    Under a line that binds rows x width hardly varies, and a constant takes what belongs to `pair`, which then lets the budget
    go too far. So there is one only where the steps cannot be told without it.
    """
    if len(samples) < SAMPLES // 2 or samples[-1].width < SPAN * samples[0].width:
        return None
    rows = [(float(each.rows), float(each.pairs), 1.0, float(each.rise_bytes)) for each in samples]
    newest = max(each.number for each in samples)
    fresh = [max(0.5 ** ((newest - each.number) / HALF_LIFE), STALE) for each in samples]
    if row_bytes is not None:
        return row_bytes, _huber([(row[0], row[1], row[2], row[3] - row[0] * row_bytes) for row in rows], fresh, (1,))[1], 0.0
    plain = _huber(rows, fresh, (0, 1))
    if max(each.rows for each in samples) < SPAN * min(each.rows for each in samples):
        return plain
    constant = _huber(rows, fresh, (0, 1, 2))
    return constant if median(_distances(rows, plain)) > NOISE_BYTES + _WORTH * median(_distances(rows, constant)) else plain


def _huber(rows: Sequence[Row], fresh: Sequence[float], columns: Sequence[int]) -> Terms:
    """By iterated reweighting: what lies far off counts less."""
    found = least(gram(rows, fresh), columns)
    for _ in range(_ROUNDS):
        misses = _distances(rows, found)
        limit = _HUBER * max(1.4826 * median(misses), NOISE_BYTES)
        weights = [old if miss <= limit else old * limit / miss for old, miss in zip(fresh, misses, strict=True)]
        found = least(gram(rows, weights), columns)
    return found


def _distances(rows: Sequence[Row], found: Terms) -> list[float]:
    return [abs(row[3] - sum(a * b for a, b in zip(row[:3], found, strict=True))) for row in rows]
