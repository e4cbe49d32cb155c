"""What was measured of a worker, kept for the next plan and the next start (store.py), and held against what was expected.

Terms are numbers whose names carry the units; each rank has its own, and some are of the whole worker:

    kv_tokens, weights_bytes, available_bytes (at rest), pair_bytes, row_bytes and peak_pairs (auto/peaks.py),
    row_seconds, pair_seconds, step_seconds, pace_samples, pace_tokens (plan/pace.py)

A start is expected to measure what the plan says and what the last one under the same configuration did.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tightrank.auto.peaks import NEAR, Evidence
from tightrank.calibration.store import Calibration, Identity, RankTerms, Terms, merged
from tightrank.plan.pace import Pace
from tightrank.records import Comparison, WorkerReading

TOLERANCE = 0.10               # more is said
WORKER = "worker"              # in place of a rank: of all of them together
SAVE_SECONDS = 60.0            # between two writes of a pace that goes on learning
PACE_SAMPLES = 64              # before a pace is held against another: the first few are of a cold engine
_MOST = 1 << 53                # tokens, bytes; more in a hello is garbage
_NOTEWORTHY = 0.02             # a smaller change is not worth a write
_COMPARED_CHUNK_TOKENS = 2048  # paces are compared by what they say of a prompt in chunks of this size, peaks by what of one
# What each start of one configuration should measure alike: not what is available at rest, which others change too.
_REPEAT = ("kv_tokens", "weights_bytes")


def compare(predicted: Terms, measured: Terms, source: str = "plan") -> tuple[Comparison, ...]:
    """A row for each term that both have, in the order of `predicted`. `source`: who predicted."""
    return tuple(_compared(term, expected, measured[term], source) for term, expected in predicted.items() if term in measured)


def _compared(term: str, expected: float, found: float, source: str) -> Comparison:
    difference = _difference(expected, found)
    return Comparison(term, expected, found, source, difference, difference is not None and abs(difference) <= TOLERANCE)


def _difference(expected: float, found: float) -> float | None:
    """None: nothing was expected, and something was found."""
    if expected:
        return found / expected - 1
    return None if found else 0.0


def sentence(row: Comparison) -> str:
    """Both numbers, and by how much they differ."""
    share = f"{row.difference:+.1%}" if row.difference is not None else "none was expected"
    whence = "as the plan computes it" if row.source == "plan" else "as it was last measured here"
    return f"{row.term}: {_number(row.predicted)} expected ({whence}), {_number(row.measured)} measured ({share})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def measured(reading: WorkerReading, pace: Pace | None, at_rest: bool, evidence: Sequence[Evidence] = (),
             budget: int = 0) -> dict[str, dict[str, float]]:
    """What the daemon knows of a worker. `at_rest`: nothing has been computed yet but the warm-up. `evidence` of a rank's peaks
    counts once its largest step says something of one that fills `budget` (token²)."""
    found: dict[str, dict[str, float]] = {WORKER: {}}
    tokens = [value for rank in reading.ranks if (value := _counted(rank.facts.get("kv_tokens"))) is not None]
    if tokens:
        found[WORKER]["kv_tokens"] = min(tokens)
    if pace is not None:
        found[WORKER] |= {"row_seconds": pace.row_seconds, "pair_seconds": pace.pair_seconds,
                          "step_seconds": pace.step_seconds, "pace_samples": pace.samples, "pace_tokens": pace.longest_tokens}
    for rank in reading.ranks:
        weights = _counted(rank.facts.get("weights_bytes"))
        terms = {"weights_bytes": weights, "available_bytes": rank.available_bytes if at_rest else None}
        known = {name: float(value) for name, value in terms.items() if value is not None}
        if rank.rank is not None and known:
            found[str(rank.rank)] = known
    for each in evidence:
        if each.fit is not None and NEAR * each.proven_pairs >= budget:
            found.setdefault(str(each.rank), {}).update(
                pair_bytes=each.fit.pair_bytes, row_bytes=each.fit.row_bytes, peak_pairs=each.proven_pairs)
    return found


def _counted(value: object) -> int | None:
    return value if type(value) is int and 0 < value < _MOST else None


def pace_of(terms: Terms) -> Pace | None:
    """The pace among the worker's terms."""
    try:
        return Pace(terms["row_seconds"], terms["pair_seconds"], terms["step_seconds"], int(terms["pace_samples"]),
                    int(terms["pace_tokens"]))
    except KeyError:
        return None


def flat(terms: RankTerms) -> dict[str, float]:
    """One number for each term: that of the tightest rank."""
    found: dict[str, float] = {}
    for each in terms.values():
        for name, value in each.items():
            tighter = min if name == "available_bytes" else max
            found[name] = tighter(found.get(name, value), value)
    return found


@dataclass(slots=True)
class Account:
    """One generation: takes in what is measured, keeps it, and holds it against the plan (`planned`) and, under the same
    configuration, against the last measurement."""
    store: Calibration
    identity: Identity
    planned: Terms = field(default_factory=dict)
    rows: tuple[Comparison, ...] = ()
    pace: Pace | None = None                 # of an earlier start, under whatever configuration
    _before: Terms = field(default_factory=dict)
    _kept: RankTerms = field(default_factory=dict)
    _saved: float | None = None

    def __post_init__(self) -> None:
        self._before = flat(self.store.same(self.identity))
        self.pace = pace_of(flat(self.store.nearest(self.identity)))

    @property
    def fresh(self) -> bool:
        """Whether nothing was taken in yet."""
        return self._saved is None

    def step(self, found: RankTerms, now: float) -> list[Comparison]:
        """Takes in `measured`. Returns what disagrees and was not compared before."""
        new = self._compare(flat(found))
        self.rows += new
        if self._saved is None or (self._changed(found) and (now - self._saved >= SAVE_SECONDS or self._grown(found))):
            self._saved = now
            self._kept = merged(self._kept, found)
            self.store.keep(self.identity, self._kept)
        return [row for row in new if not row.agrees]

    def _compare(self, found: Terms) -> tuple[Comparison, ...]:
        done = {(row.term, row.source) for row in self.rows}
        before = {name: value for name, value in self._before.items() if name in _REPEAT}
        rows = (*compare(self.planned, found, "plan"), *compare(before, found, "before"),
                *compare(*_prompts(self._before, found), "before"), *compare(*_chunks(self._before, found), "before"))
        return tuple(row for row in rows if (row.term, row.source) not in done)

    def _grown(self, found: RankTerms) -> bool:
        return any(terms.keys() - self._kept.get(rank, {}).keys() for rank, terms in found.items())

    def _changed(self, found: RankTerms) -> bool:
        return any(abs(value - self._kept.get(rank, {}).get(name, 0.0)) > _NOTEWORTHY * value
                   for rank, terms in found.items() for name, value in terms.items())


def _prompts(before: Terms, found: Terms) -> tuple[Terms, Terms]:
    """What two paces say of the longest prompt that both have seen; single coefficients may trade with each other."""
    old, new = pace_of(before), pace_of(found)
    if old is None or new is None or new.samples < PACE_SAMPLES or not (tokens := min(old.longest_tokens, new.longest_tokens)):
        return {}, {}
    one, two = (pace.prompt_seconds(tokens, lambda _: _COMPARED_CHUNK_TOKENS) for pace in (old, new))
    return {"prompt_seconds": one}, {"prompt_seconds": two}


def _chunks(before: Terms, found: Terms) -> tuple[Terms, Terms]:
    """What two fits say of the largest chunk that both have seen; their terms may trade with each other too."""
    if not ({"pair_bytes", "row_bytes", "peak_pairs"} <= before.keys() & found.keys()):
        return {}, {}
    pairs = min(before["peak_pairs"], found["peak_pairs"])
    one, two = (terms["pair_bytes"] * pairs + terms["row_bytes"] * _COMPARED_CHUNK_TOKENS for terms in (before, found))
    return {"chunk_bytes": one}, {"chunk_bytes": two}
