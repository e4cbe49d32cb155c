"""What was measured, on disk: `calibration.json` in the state directory.

It has one entry for each host, engine release, model, parallel sizes and configuration; in it the terms of each rank ("0", "1",
...) and those of the whole worker ("worker").

The file is read anew before it is written, and written whole: two daemons lose at most a measurement, which comes again. The
entry that was written last stands last; the first ones go when there is no room, so no dates are needed. What is torn, foreign
or too large counts as nothing, is said, and is set aside when there is something to write.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from tightrank.adapter import wire
from tightrank.records import WorkerSpec

SCHEMA = 1
MOST_ENTRIES, MOST_BYTES = 64, 1 << 20
_KEY_BYTES = 64                # more than what stands around an entry

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
        self._entries[identity.key] = _Entry(identity, merged(before, terms))
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


def merged(before: RankTerms, terms: RankTerms) -> RankTerms:
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
