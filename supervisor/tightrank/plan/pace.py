"""How long prefill takes: a chunk's time from its size and its prefix, fitted to what the steps of a worker took. Pure.

    seconds = row_seconds · T + pair_seconds · T·(L + (T+1)/2) + step_seconds

for T new tokens behind L. A row costs the weights whatever is behind it, a (row, key) pair the attention (a causal row sees its
prefix, the rows before it and itself), a step what is paid once for it: launches, scheduling, collectives. An indexer that
scores all T·(L+T) pairs differs by T²/2, which lies between `row_seconds` and `pair_seconds` of chunks of like size.

On a host that is shared some steps take many times what they should, so the fit is one of least absolute relative errors,
then of least squares over what lies near it: a fifth of outliers, however large, does not move it.
"""
from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from tightrank.adapter import wire

if TYPE_CHECKING:
    from tightrank_adapter import wire as wire_types

FEWEST_SAMPLES = 16
CELLS, CELL_SAMPLES = 32, 8    # 256 samples are fitted in some 10 ms
_ROUNDS = 15                   # of reweighting; what they change after ten is under the noise
_NEAR = 1e-3                   # an error this small, relative, counts like any smaller one
_INLIERS = 3.0                 # standard deviations
MOST_TOKENS, MOST_SECONDS = 10**9, 1e6      # more in a record is garbage
_OPEN = 0.25                   # share of a sample's time that a term may be uncertain by, and still is told apart


@dataclass(frozen=True, slots=True)
class PaceSample:
    """One prefill step: its new tokens, its (row, key) pairs and what it took. `keys`: of its longest row, tokens."""
    rows: int
    pairs: int
    keys: int
    seconds: float

    @property
    def usable(self) -> bool:
        """Whether it is a step of this world: records come from processes that run other people's code."""
        return 0 < self.rows <= self.keys * self.rows <= MOST_TOKENS ** 2 and 0 < self.seconds < MOST_SECONDS


@dataclass(frozen=True, slots=True)
class Pace:
    """The coefficients, never negative, and of how many samples. No sample had a longer row than `longest_tokens`: what is
    said of longer prompts is extrapolated (0: nothing was measured). Where all chunks were alike in size a step's own part
    cannot be told from that of its rows: it is in `row_seconds`, and `step_seconds` is 0."""
    row_seconds: float
    pair_seconds: float
    step_seconds: float
    samples: int
    longest_tokens: int = 0

    def chunk_seconds(self, tokens: int, prefix: int) -> float:
        """One step with `tokens` new tokens of one prompt behind `prefix`."""
        return self.row_seconds * tokens + self.pair_seconds * pairs(tokens, prefix) + self.step_seconds

    def prompt_seconds(self, tokens: int, chunk: Callable[[int], int], prefix: int = 0) -> float:
        """`tokens` new tokens behind a cached `prefix`, alone in the engine; `chunk(prefix)` is the largest step there.

        Raises ValueError when no chunk is allowed at some prefix (0, as `line.chunk_tokens` says it).
        """
        return sum(self.chunk_seconds(size, at) for at, size in chunks(tokens, chunk, prefix))


def chunks(tokens: int, chunk: Callable[[int], int], prefix: int = 0) -> Iterator[tuple[int, int]]:
    """(prefix, new tokens) of each step, as for `Pace.prompt_seconds`."""
    at, end = prefix, prefix + tokens
    while at < end:
        size = min(chunk(at), end - at)
        if size < 1:
            raise ValueError(f"prefix={at}: no chunk is allowed there, so {end} tokens are never done")
        yield at, size
        at += size


def pairs(tokens: int, prefix: int) -> int:
    """(row, key) pairs of causal attention: row i of `tokens` sees `prefix` + i keys."""
    return tokens * prefix + tokens * (tokens + 1) // 2


def sample(step: Iterable[Sequence[int]], seconds: float) -> PaceSample:
    """Of a step's [prefix, new tokens] for each request, as in `wire.Step`."""
    held = [(prefix, new) for prefix, new in step if prefix >= 0 and new > 0]
    return PaceSample(sum(new for _, new in held), sum(pairs(new, prefix) for prefix, new in held),
                      max((prefix + new for prefix, new in held), default=0), seconds)


# --- the fit ----------------------------------------------------------------------------------------------------------

_Row = tuple[float, float, float, float]       # rows, pairs, 1, seconds
_Terms = tuple[float, float, float]            # row_seconds, pair_seconds, step_seconds


def fit(samples: Sequence[PaceSample]) -> Pace | None:
    """None: too few samples, or row and pair cannot be told apart by them (all prefixes and sizes alike)."""
    usable = [each for each in samples if each.usable]
    rows: list[_Row] = [(each.rows, each.pairs, 1.0, each.seconds) for each in usable]
    if len(rows) < FEWEST_SAMPLES:
        return None
    for columns in ((0, 1, 2), (0, 1)):
        found = _robust(rows, columns)
        if found is not None:
            return Pace(*found, samples=len(rows), longest_tokens=max(each.keys for each in usable))
    return None


def _robust(rows: Sequence[_Row], columns: tuple[int, ...]) -> _Terms | None:
    """The terms of `columns`, the others 0; None where one of them is not told apart by `rows`."""
    terms = _start(rows)
    for _ in range(_ROUNDS):
        expected = _expected(rows, terms)
        weights = [1.0 / (each * max(_NEAR * each, abs(row[3] - each))) for row, each in zip(rows, expected, strict=True)]
        terms = _least(_gram(rows, weights), columns)
    expected = _expected(rows, terms)
    errors = [abs(row[3] - each) / each for row, each in zip(rows, expected, strict=True)]
    deviation = 1.4826 * median(errors)        # of a normal distribution with this median
    near = [(row, 1.0 / (each * each)) for row, each, error in zip(rows, expected, errors, strict=True)
            if error <= _INLIERS * max(deviation, _NEAR)]
    kept, weights = [row for row, _ in near], [weight for _, weight in near]
    gram = _gram(kept, weights)
    if not _told_apart(gram, kept, weights, columns, max(deviation, _NEAR)):
        return None
    return _least(gram, columns)


def _start(rows: Sequence[_Row]) -> _Terms:
    """A first guess, of which only the ratios matter: how much a step of each size should weigh."""
    pair_seconds = median(row[3] / (row[1] + row[0] * wire.ROW_KEYS) for row in rows)
    return pair_seconds * wire.ROW_KEYS, pair_seconds, min(row[3] for row in rows)


def _expected(rows: Sequence[_Row], terms: _Terms) -> list[float]:
    a, b, c = terms
    return [max(a * row[0] + b * row[1] + c, 1e-9) for row in rows]


_Gram = tuple[list[list[float]], list[float]]


def _gram(rows: Sequence[_Row], weights: Sequence[float]) -> _Gram:
    """The weighted normal equations: (3 x 3 matrix, right side)."""
    matrix, right = [[0.0] * 3 for _ in range(3)], [0.0] * 3
    for one, two in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)):
        matrix[one][two] = matrix[two][one] = sum(w * row[one] * row[two] for row, w in zip(rows, weights, strict=True))
    for one in range(3):
        right[one] = sum(w * row[one] * row[3] for row, w in zip(rows, weights, strict=True))
    return matrix, right


def _least(gram: _Gram, columns: tuple[int, ...]) -> _Terms:
    """Non-negative least squares. With so few terms all sets of those that are not 0 can be tried."""
    best, terms = 0.0, [0.0, 0.0, 0.0]
    for count in range(1, len(columns) + 1):
        for chosen in combinations(columns, count):
            found = _solve(gram, chosen)
            if found is None or min(found) < 0:
                continue
            gain = sum(value * gram[1][column] for value, column in zip(found, chosen, strict=True))
            if gain > best:                    # what it takes off the sum of squares
                best, terms = gain, [0.0, 0.0, 0.0]
                for value, column in zip(found, chosen, strict=True):
                    terms[column] = value
    return terms[0], terms[1], terms[2]


def _solve(gram: _Gram, chosen: tuple[int, ...]) -> list[float] | None:
    """The normal equations of `chosen`; None where they are singular."""
    matrix, right = gram
    inverse = _inverse(matrix, chosen)
    return None if inverse is None else [sum(value * right[column] for value, column in zip(line, chosen, strict=True))
                                         for line in inverse]


def _inverse(matrix: Sequence[Sequence[float]], chosen: tuple[int, ...]) -> list[list[float]] | None:
    """Of the rows and columns `chosen`, by Gauss and Jordan; scaled, since rows are thousands and pairs billions."""
    scale = [matrix[column][column] ** -0.5 if matrix[column][column] > 0 else 0.0 for column in chosen]
    size = len(chosen)
    work = [[matrix[one][two] * scale[i] * scale[j] for j, two in enumerate(chosen)] + [float(i == j) for j in range(size)]
            for i, one in enumerate(chosen)]
    for i in range(size):                      # positive definite: the diagonal is the pivot
        if work[i][i] < 1e-9:
            return None
        work[i] = [value / work[i][i] for value in work[i]]
        for j in range(size):
            if j != i:
                work[j] = [value - work[j][i] * pivot for value, pivot in zip(work[j], work[i], strict=True)]
    return [[value * scale[i] * scale[j] for j, value in enumerate(line[size:])] for i, line in enumerate(work)]


def _told_apart(gram: _Gram, rows: Sequence[_Row], weights: Sequence[float], columns: tuple[int, ...],
                deviation: float) -> bool:
    """Whether each term's standard error, where the term weighs most, is a small share of that sample's time."""
    inverse = _inverse(gram[0], columns)
    if inverse is None or len(rows) < FEWEST_SAMPLES // 2:
        return False
    for place, column in enumerate(columns):
        largest = max(row[column] * row[column] * weight for row, weight in zip(rows, weights, strict=True))
        if deviation * (inverse[place][place] * largest) ** 0.5 > _OPEN:
            return False
    return True


# --- a worker's samples ----------------------------------------------------------------------------------------------

@dataclass(slots=True)
class PaceMeter:
    """The pace of one worker from its step records, with a bounded memory: the last steps of each size and prefix (by powers
    of two), so that a thousand short prompts do not drive out what one long one told. The stages of a pipeline count alike:
    there a step is one stage's, and a prompt of many chunks takes as many of them."""
    _cells: OrderedDict[tuple[int, int], deque[PaceSample]] = field(default_factory=OrderedDict)
    _last: dict[int, wire_types.Step] = field(default_factory=dict)      # of each process
    _new: int = 0
    _pace: Pace | None = None

    def learn(self, step: wire_types.Step, whole: bool) -> None:
        """`whole`: its milliseconds are those of the step. On a device vLLM's and ATOM's end at the last launch: there a step
        lasts until the next chunk of one of its prompts starts."""
        if not 0 <= step.milliseconds < MOST_SECONDS * 1000:
            return
        before, self._last[step.pid] = self._last.get(step.pid), step
        if whole:
            self._add(sample(step.chunks, step.milliseconds / 1000))
        elif before is not None and _follows(before, step):
            self._add(sample(before.chunks, (_started_ns(step) - _started_ns(before)) / 1e9))

    def _add(self, new: PaceSample) -> None:
        if not new.usable:
            return
        key = new.rows.bit_length(), (new.pairs // new.rows).bit_length()
        self._cells.setdefault(key, deque(maxlen=CELL_SAMPLES)).append(new)
        self._cells.move_to_end(key)
        if len(self._cells) > CELLS:
            self._cells.popitem(last=False)
        self._new += 1

    def forget(self) -> None:
        """The steps of a start are of another kind: they compile and warm up."""
        self._cells.clear()
        self._new, self._pace = 0, None

    @property
    def pace(self) -> Pace | None:
        """Fitted anew when a quarter of what it would be fitted to is new."""
        kept = sum(map(len, self._cells.values()))
        if self._new >= max(FEWEST_SAMPLES, kept // 4):
            self._new = 0
            self._pace = fit([each for cell in self._cells.values() for each in cell]) or self._pace
        return self._pace


def _follows(before: wire_types.Step, after: wire_types.Step) -> bool:
    """Whether `after` goes on with a prompt of `before`, and no record between them was lost."""
    ends = {prefix + new for prefix, new in before.chunks}
    return after.sequence == before.sequence + 1 and any(prefix in ends for prefix, _ in after.chunks if prefix)


def _started_ns(step: wire_types.Step) -> int:
    return step.monotonic_ns - int(step.milliseconds * 1e6)
