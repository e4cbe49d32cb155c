"""What was measured of a worker, kept on disk for the next plan and the next start, and held against what was expected.

`calibration.json` in the state directory has one entry for each host, engine release, model, parallel sizes and configuration;
in it the terms of each rank ("0", "1", ...) and those of the whole worker ("worker"). Their names carry the units:

    kv_tokens, weights_bytes, available_bytes (at rest), pair_bytes and row_bytes (of a chunk's peak),
    row_seconds, pair_seconds, step_seconds, pace_samples, pace_tokens (plan/pace.py)

A start is expected to measure what the last one under the same configuration did; the plan takes what is nearest. The file is
read anew before it is written, and written whole: two daemons lose at most a measurement, which comes again. The entry that was
written last stands last; the first ones go when there is no room, so no dates are needed. What is torn, foreign or too large
counts as nothing, is said, and is set aside when there is something to write.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from tightrank.adapter import wire
from tightrank.plan.pace import Pace
from tightrank.records import Comparison, WorkerReading, WorkerSpec

SCHEMA = 1
MOST_ENTRIES, MOST_BYTES = 64, 1 << 20
_KEY_BYTES = 64                # more than what stands around an entry
TOLERANCE = 0.10               # more is said
WORKER = "worker"              # in place of a rank: of all of them together
SAVE_SECONDS = 60.0            # between two writes of a pace that goes on learning
PACE_SAMPLES = 64              # before a pace is held against another: the first few are of a cold engine
_NOTEWORTHY = 0.02             # a smaller change is not worth a write
_COMPARED_CHUNK_TOKENS = 2048  # paces are compared by what they say of a prompt in chunks of this size
# What each start of one configuration should measure alike: not what is available at rest, which others change too.
_REPEAT = ("kv_tokens", "weights_bytes", "pair_bytes", "row_bytes")

Terms = Mapping[str, float]
RankTerms = Mapping[str, Terms]          # rank, or WORKER -> its terms


@dataclass(frozen=True, slots=True)
class Identity:
    """What the measured terms are of. `host`: as `breaker.facts`, with the engine's release. `config_sha256`: of the model's
    config.json; "" where it cannot be read. `configuration`: as `Breaker.key`."""
    host: tuple[str, ...]
    engine: str
    model: str
    config_sha256: str
    tensor_parallel: int
    pipeline_parallel: int
    configuration: str

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Entry:
    identity: Identity
    terms: RankTerms


class Calibration:
    """The entries of one state directory. `facts` are those of the host and the engine (`breaker.facts`); `say` takes a
    sentence for the journal. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None, facts: Sequence[str] = (),
                 say: Callable[[str], None] = lambda sentence: None) -> None:
        self._path, self._facts, self._say = path, tuple(facts), say
        self._broken = False               # what stands there is to be set aside
        self._trouble = ""                 # with writing, as it was last said
        self._entries = self._read() or {}

    def identity(self, spec: WorkerSpec, configuration: str) -> Identity:
        try:
            digest = hashlib.sha256(Path(spec.model, "config.json").read_bytes()).hexdigest()
        except OSError:
            digest = ""
        return Identity(self._facts, spec.engine, spec.model, digest, spec.tensor_parallel, spec.pipeline_parallel,
                        configuration)

    def same(self, identity: Identity) -> RankTerms:
        """What was measured last under this very configuration; empty where nothing was."""
        entry = self._entries.get(identity.key)
        return entry.terms if entry is not None else {}

    def nearest(self, identity: Identity) -> RankTerms:
        """The same, or what was measured last under any other configuration of this host, engine, model and sizes."""
        like = [entry.terms for entry in self._entries.values()
                if replace(entry.identity, configuration=identity.configuration) == identity]
        return self.same(identity) or (like[-1] if like else {})

    def keep(self, identity: Identity, terms: RankTerms) -> None:
        """Takes in `terms`; others that are kept stay."""
        found = self._read()               # whoever shares the file may have written since
        if found is not None:
            self._entries = {**found, **self._entries} if self._trouble else found
        before = self._entries.pop(identity.key, _Entry(identity, {})).terms
        self._entries[identity.key] = _Entry(identity, _merged(before, terms))
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._make_room()
        try:
            if self._broken:
                os.replace(self._path, self._path.with_name(self._path.name + ".broken"))
                self._broken = False
            wire.write_json(str(self._path), self._body())
            self._trouble = ""
        except OSError as error:
            if self._trouble != str(error.strerror):       # once: it is tried again with each measurement
                self._trouble = str(error.strerror)
                self._say(f"{self._path}: not written ({error.strerror}): the next start will not know what was measured")

    def _make_room(self) -> None:
        sizes = {key: len(json.dumps(asdict(entry))) + _KEY_BYTES for key, entry in self._entries.items()}
        while len(sizes) > MOST_ENTRIES or sum(sizes.values()) > MOST_BYTES - _KEY_BYTES:
            oldest = next(iter(sizes))
            del sizes[oldest], self._entries[oldest]

    def _body(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "entries": {key: asdict(entry) for key, entry in self._entries.items()}}

    def _read(self) -> dict[str, _Entry] | None:
        """None: what stands there cannot be used."""
        if self._path is None:
            return None
        try:
            found = _entries(_bounded(self._path))
            self._broken = False
            return found
        except FileNotFoundError:
            self._broken = False
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            if not self._broken:
                self._say(f"{self._path}: not readable ({type(error).__name__}: {str(error)[:200]}): what was measured earlier "
                          f"counts for nothing; the file is set aside as {self._path.name}.broken with the next measurement")
            self._broken = True
            return None


def _merged(before: RankTerms, terms: RankTerms) -> RankTerms:
    return {rank: {**before.get(rank, {}), **terms.get(rank, {})} for rank in dict.fromkeys((*before, *terms))}


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return text


def _entries(text: bytes) -> dict[str, _Entry]:
    """Raises an error of values, types or names for what `Calibration` does not write."""
    stored = json.loads(text)
    if stored["schema"] != SCHEMA:
        raise ValueError(f"schema {str(stored['schema'])[:20]}, wanted {SCHEMA}")
    found = [_Entry(_identity(values["identity"]), {str(rank): _terms(terms) for rank, terms in values["terms"].items()})
             for values in stored["entries"].values()]
    return {entry.identity.key: entry for entry in found}


def _identity(values: Mapping[str, Any]) -> Identity:
    return Identity(tuple(map(str, values["host"])), str(values["engine"]), str(values["model"]), str(values["config_sha256"]),
                    int(values["tensor_parallel"]), int(values["pipeline_parallel"]), str(values["configuration"]))


def _terms(values: Mapping[str, Any]) -> Terms:
    for name, value in values.items():
        if type(value) not in (int, float) or not isfinite(value) or value < 0:
            raise ValueError(f"{name[:40]} is no such number")
    return {name: float(value) for name, value in values.items()}


# --- measured and expected -------------------------------------------------------------------------------------------

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


def measured(reading: WorkerReading, pace: Pace | None, at_rest: bool) -> dict[str, dict[str, float]]:
    """What the daemon knows of a worker. `at_rest`: nothing has been computed yet but the warm-up."""
    found: dict[str, dict[str, float]] = {WORKER: {}}
    tokens = [value for rank in reading.ranks if type(value := rank.facts.get("kv_tokens")) is int and value > 0]
    if tokens:
        found[WORKER]["kv_tokens"] = min(tokens)
    if pace is not None:
        found[WORKER] |= {"row_seconds": pace.row_seconds, "pair_seconds": pace.pair_seconds,
                          "step_seconds": pace.step_seconds, "pace_samples": pace.samples, "pace_tokens": pace.longest_tokens}
    for rank in reading.ranks if at_rest else ():
        if rank.rank is not None and rank.available_bytes is not None:
            found[str(rank.rank)] = {"available_bytes": rank.available_bytes}
    return found


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
    _before: Terms = field(default_factory=dict)
    _kept: RankTerms = field(default_factory=dict)
    _saved: float | None = None

    def __post_init__(self) -> None:
        self._before = flat(self.store.same(self.identity))

    @property
    def fresh(self) -> bool:
        """Whether nothing was taken in yet."""
        return self._saved is None

    def step(self, found: RankTerms, now: float) -> list[Comparison]:
        """Takes in `measured`. Returns what disagrees and was not compared before."""
        new = self._compare(flat(found))
        self.rows += new
        if self._saved is None or (now - self._saved >= SAVE_SECONDS and self._changed(found)):
            self._saved = now
            self._kept = _merged(self._kept, found)
            self.store.keep(self.identity, self._kept)
        return [row for row in new if not row.agrees]

    def _compare(self, found: Terms) -> tuple[Comparison, ...]:
        done = {(row.term, row.source) for row in self.rows}
        before = {name: value for name, value in self._before.items() if name in _REPEAT}
        rows = (*compare(self.planned, found, "plan"), *compare(before, found, "before"),
                *compare(*_prompts(self._before, found), "before"))
        return tuple(row for row in rows if (row.term, row.source) not in done)

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
