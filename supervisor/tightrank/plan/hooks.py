"""What each wanted hook is told, and what must be in the engine's environment for it. Pure.

The values are those of `wire.Settings.hooks`; bytes throughout.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.adapter import indexer, wire
from tightrank.config import Config, Worker
from tightrank.config.units import Reserve, format_size
from tightrank.engines.base import Engine
from tightrank.errors import ConfigError
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

    def place_of(self, variable: str) -> str:
        """Where a variable of the engine's environment was set."""
        path = f"workers[{self.index}].env"
        return self.config.places.get(path, path) if variable in self.worker.env else "env"

    @property
    def worker(self) -> Worker:
        return self.config.workers[self.index]

    @property
    def ranks(self) -> int:
        return self.worker.tensor_parallel * self.worker.pipeline_parallel

    def acts(self, hook: str) -> bool:
        """Whether `hook` is wanted, and not only observed."""
        return hook in self.config.hooks and hook not in self.config.observe

    @property
    def prefill_bytes(self) -> int:
        """What a prefill under the line holds at its peak; 0 without a line, and where nothing is prefilled."""
        pairs = self.chosen.spec.budget if self.chosen and self.acts("line") and self.worker.role != "decode" else 0
        held = self.config.headroom.pair_bytes
        if self.acts("indexer") and held > indexer.COPY_BYTES:
            found: int = indexer.peak_bytes(pairs, self.config.indexer.budget_bytes, held)
            return found
        return held * pairs


def tell(config: Config, index: int, engine: Engine, chosen: Chosen | None, theirs: Mapping[str, str],
         workspaces: Mapping[str, int]) -> Told:
    """`workspaces`: what the engine reserves after it has sized its KV cache. It has all the hooks. Raises ConfigError."""
    case = _Case(config, index, engine, chosen, theirs, workspaces)
    values = {hook: _values(case, hook) for hook in config.hooks}
    notes = [note for hook in config.hooks if hook in _NOTES and (note := _NOTES[hook](case, values[hook]))]
    notes += [f"hook {hook} is only observed: it computes and records, and changes nothing" for hook in config.observe]
    return Told(values, _score_variables(case) if case.acts("indexer") else {}, (*notes, *_idle_keys(config)))


def _values(case: _Case, hook: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _VALUES[hook](case) if hook in _VALUES else {}
    return {**found, wire.OBSERVE: True} if hook in case.config.observe else found


def _idle_keys(config: Config) -> list[str]:
    """Keys that somebody has set for a hook that is not wanted."""
    sections = {"indexer": "indexer", "headroom": "headroom", "empty_cache": "empty-cache"}
    return [f"{key} is set and has no effect: hooks does not name {sections[section]}"
            for key, place in config.places.items() if place != "default"
            and (section := key.partition(".")[0]) in sections and sections[section] not in config.hooks]


def _ranks(case: _Case) -> dict[str, Any]:
    auto = case.chosen is not None and case.chosen.spec.auto and case.acts("line")
    return {wire.PEAKS: True} if auto else {}


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
            more = "" if case.ranks == 1 else f", or {case.ranks} joined by +"
            raise case.config.error("headroom.reserve", f"{len(reserve)} sizes, and workers[{case.index}] has {case.ranks} "
                                    f"rank{'s' * (case.ranks > 1)}; give one for all workers' ranks{more}")
        return {"bytes": list(reserve), "ranks": case.ranks}
    if not case.acts("line"):
        way = "take line out of observe" if "line" in case.config.hooks else \
            "add line to hooks" if "line" in case.engine.releases else ""
        raise case.config.error("headroom.reserve", "derived: needs the hook line, whose prefill it is derived from; "
                                f"{way}{', or ' * bool(way)}give a fraction or a size")
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
    try:
        found = Reserve().parse(text)
    except ValueError:
        found = text
    if not isinstance(found, float):
        raise ConfigError(f"{case.place_of(ATOM_FRACTION)}: {ATOM_FRACTION}: {text!r} must be a fraction under 1, for example "
                          "0.08")
    return found


def _empty_cache(case: _Case) -> dict[str, Any]:
    wanted, guard = case.config.empty_cache, case.config.guard
    mark = wanted.mark_bytes
    if mark is None:
        mark = guard.floor_bytes + guard.margin_bytes + case.prefill_bytes
    return {"when": wanted.when, "mark_bytes": mark}


_VALUES = {"ranks": _ranks, "line": _line, "indexer": _indexer, "headroom": _headroom, "empty-cache": _empty_cache}


def _score_variables(case: _Case) -> Mapping[str, str]:
    """The engine's variables for the budget, which nobody else may have set."""
    found = case.engine.score_variables(case.config.indexer.budget_bytes)
    for name, text in found.items():
        if case.theirs.get(name, text) != text:
            raise ConfigError(f"{case.place_of(name)}: {name}: {case.theirs[name]} is not indexer.budget, which makes it "
                              f"{text}; leave it out")
    return found


def _indexer_note(case: _Case, values: Mapping[str, Any]) -> str:
    budget, held = case.config.indexer.budget_bytes, case.config.headroom.pair_bytes
    said = f"indexer: scores in pieces of at most {format_size(budget)}"
    if not case.acts("indexer") or case.chosen is None or held <= indexer.COPY_BYTES:
        return said if case.acts("indexer") else ""
    pairs = case.chosen.spec.budget
    more = indexer.largest_pairs(held * pairs, budget, held)
    less = indexer.peak_bytes(pairs, budget, held) / pairs
    return (f"{said}; where a prefill holds {held} bytes for each (new token, key), as published for DeepSeek V4.1, it then "
            f"holds {less:.1f}, and the memory of line.budget {pairs:,} is enough for {more:,}")


def _headroom_note(case: _Case, values: Mapping[str, Any]) -> str:
    if not case.acts("headroom"):
        return ""
    if "fraction" in values:
        return f"headroom: {values['fraction']:.4g} of each rank's memory stays free of KV"
    sizes, terms = values["bytes"], values.get("terms")
    if terms is None:
        on = "each rank" if len(sizes) == 1 else ""
        shown = [f"{_gib(size)} on {on or f'rank {number}'}" for number, size in enumerate(sizes)]
        return f"headroom: {', '.join(shown)} stay free of KV"
    made = " + ".join(f"{name} {_gib(size)}" for name, size in terms.items())
    return (f"headroom: {_gib(sum(terms.values()))} on each rank stay free of KV: {made}; where memory is the host's, "
            f"{_gib(values['guard_bytes'])} of the guard's besides")


def _empty_cache_note(case: _Case, values: Mapping[str, Any]) -> str:
    if not case.acts("empty-cache") or values["when"] != "pressure":
        return ""
    made = "" if case.config.empty_cache.mark_bytes is not None else \
        f" (guard.floor + guard.margin + {_gib(case.prefill_bytes)} of a prefill under the line)"
    return f"empty-cache: while less than {_gib(values['mark_bytes'])} are available{made}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


_NOTES: Mapping[str, Callable[[_Case, Mapping[str, Any]], str]] = {
    "indexer": _indexer_note, "headroom": _headroom_note, "empty-cache": _empty_cache_note}
