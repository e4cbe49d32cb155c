"""What each wanted hook is told, and what must be in the engine's environment for it. Pure.

The values are those of `wire.Settings.hooks`; bytes throughout.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.adapter import indexer, wire
from tightrank.config import Config, Worker
from tightrank.config.units import format_size
from tightrank.engines.base import Engine
from tightrank.plan.line import Chosen

ATOM_FRACTION = "ATOM_KV_PREFILL_HEADROOM_FRAC"      # as the published change calls it


@dataclass(frozen=True, slots=True)
class Told:
    """`values`: of each wanted hook. `notes`: sentences for `tightrank plan`."""
    values: Mapping[str, Mapping[str, Any]]
    env: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    """`theirs`: the environment that the engine would get without us."""
    config: Config
    index: int
    engine: Engine
    chosen: Chosen | None
    theirs: Mapping[str, str]
    workspaces: Mapping[str, int]

    @property
    def worker(self) -> Worker:
        return self.config.workers[self.index]

    @property
    def ranks(self) -> int:
        return self.worker.tensor_parallel * self.worker.pipeline_parallel

    @property
    def prefill_bytes(self) -> int:
        """What a prefill under the line holds at its peak; 0 without a line."""
        pairs = self.chosen.spec.budget if self.chosen else 0
        held = self.config.headroom.pair_bytes
        if "indexer" in self.config.hooks and held > indexer.COPY_BYTES:
            found: int = indexer.peak_bytes(pairs, self.config.indexer.budget_bytes, held)
            return found
        return held * pairs


def tell(config: Config, index: int, engine: Engine, chosen: Chosen | None, theirs: Mapping[str, str],
         workspaces: Mapping[str, int]) -> Told:
    """`workspaces`: what the engine reserves after it has sized its KV cache. It has all the hooks. Raises ConfigError."""
    case = _Case(config, index, engine, chosen, theirs, workspaces)
    values: dict[str, Mapping[str, Any]] = {}
    env: dict[str, str] = {}
    notes: list[str] = []
    for hook in config.hooks:
        values[hook] = _VALUES[hook](case) if hook in _VALUES else {}
        if hook in config.observe:
            values[hook] = {**values[hook], wire.OBSERVE: True}
            notes.append(f"hook {hook} is observed: it computes and records, and changes nothing")
        elif hook == "indexer":
            env |= _score_variables(case)
    if "indexer" in config.hooks:
        notes.append(_indexer_note(case))
    if "headroom" in config.hooks:
        notes.append(_headroom_note(case, values["headroom"]))
    return Told(values, env, tuple(notes))


def _line(case: _Case) -> dict[str, Any]:
    assert case.chosen is not None
    return {"budget": case.chosen.spec.budget, **case.chosen.spec.keywords()}


def _indexer(case: _Case) -> dict[str, Any]:
    return {"budget_bytes": case.config.indexer.budget_bytes, "ranks": case.ranks}


def _headroom(case: _Case) -> dict[str, Any]:
    reserve = _reserve(case)
    if isinstance(reserve, float):
        return {"fraction": reserve, "ranks": case.ranks}
    if isinstance(reserve, tuple):
        if len(reserve) not in (1, case.ranks):
            raise case.config.error("headroom.reserve", f"{len(reserve)} sizes for the {case.ranks} ranks of "
                                    f"workers[{case.index}]; give one, or {case.ranks} joined by +")
        return {"bytes": list(reserve), "ranks": case.ranks}
    if case.chosen is None:
        raise case.config.error("headroom.reserve", "derived: needs the hook line, whose prefill it is derived from; add line "
                                "to hooks, or give a fraction or a size")
    terms = {"prefill": case.prefill_bytes, **case.workspaces}
    guard = case.config.guard
    return {"bytes": [sum(terms.values())], "terms": terms, "guard_bytes": guard.floor_bytes + guard.margin_bytes,
            "ranks": case.ranks}


def _reserve(case: _Case) -> float | str | tuple[int, ...]:
    """What was asked for; ATOM's own variable counts where our key does not say it."""
    text = case.theirs.get(ATOM_FRACTION) if case.engine.name == "atom" else None
    if text is None:
        return case.config.headroom.reserve
    if case.config.places.get("headroom.reserve", "default") != "default":
        raise case.config.error("headroom.reserve", f"{ATOM_FRACTION}={text} says it too; leave one of them out")
    if not re.fullmatch(r"0?\.[0-9]{1,6}|0", text):
        raise case.config.error(f"workers[{case.index}].env", f"{ATOM_FRACTION}: {text}: must be a fraction under 1, for "
                                "example 0.08")
    return float(text)


def _empty_cache(case: _Case) -> dict[str, Any]:
    wanted, guard = case.config.empty_cache, case.config.guard
    mark = wanted.mark_bytes
    if mark is None:
        mark = guard.floor_bytes + guard.margin_bytes + case.prefill_bytes
    return {"when": wanted.when, "mark_bytes": mark}


_VALUES = {"line": _line, "indexer": _indexer, "headroom": _headroom, "empty-cache": _empty_cache}


def _score_variables(case: _Case) -> Mapping[str, str]:
    """The engine's variables for the budget, which nobody else may have set."""
    found = case.engine.score_variables(case.config.indexer.budget_bytes)
    for name in found:
        if name in case.theirs:
            raise case.config.error("indexer.budget", f"{name} is set in the engine's environment too; leave it out there")
    return found


def _indexer_note(case: _Case) -> str:
    budget = case.config.indexer.budget_bytes
    said = f"indexer: scores in pieces of at most {format_size(budget)}"
    if case.chosen is None:
        return said
    pairs = case.chosen.spec.budget
    more = indexer.largest_pairs(indexer.PAIR_BYTES * pairs, budget)
    held = indexer.peak_bytes(pairs, budget) / pairs
    return (f"{said}; as published for DeepSeek V4.1 a prefill then holds {held:.1f} instead of {indexer.PAIR_BYTES} bytes for "
            f"each (new token, key), so the memory of line.budget {pairs:.2g} holds {more:.2g}")


def _headroom_note(case: _Case, values: Mapping[str, Any]) -> str:
    if "fraction" in values:
        return f"headroom: {values['fraction']:g} of each rank's memory stays free of KV"
    sizes = " + ".join(format_size(size) for size in values["bytes"])
    terms = values.get("terms")
    if terms is None:
        return f"headroom: {sizes} of each rank's memory stay free of KV"
    made = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in terms.items())
    return (f"headroom: {sum(terms.values()) / 2**20:.0f} MiB stay free of KV ({made}), and the guard's "
            f"{format_size(values['guard_bytes'])} on memory that is the host's")
