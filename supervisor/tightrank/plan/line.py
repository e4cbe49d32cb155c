"""The line of one worker: from what was asked for, the engine's own arguments and the model. Pure.

The engine's maximum length is capped at what `minimum` can finish under the budget: a request that was accepted must be
able to end, so what cannot is refused by the engine itself, with 400.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tightrank.adapter import line
from tightrank.config import AUTO, Config, Line, Worker
from tightrank.config.flags import FLAGS
from tightrank.engines.base import Engine, number
from tightrank.errors import ConfigError
from tightrank.inputs import Inputs
from tightrank.records import ChunkBand, LineSpec

_Band = TypeVar("_Band", bound=ChunkBand)
DEFAULT_MAXIMUM = 2048   # of the published analysis; also vLLM's own default chunk


@dataclass(frozen=True, slots=True)
class Chosen:
    """`context`: the engine's longest request (tokens). `cap`: that it must be told so, else it is its own choice."""
    spec: LineSpec
    context: int
    cap: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    """One worker's question. `where`: the key of its arguments, for messages."""
    config: Config
    worker: Worker
    engine: Engine
    inputs: Inputs
    where: str

    def flag(self, name: str) -> tuple[str, int | None]:
        """(as the engine spells it, its value in the user's arguments, which the plan has read before)."""
        return FLAGS[self.engine.name][name][0], number(self.engine.name, self.worker.args, name)

    def error(self, sentence: str) -> ConfigError:
        return self.config.error(self.where, sentence)


def own_context(config: Config, engine: Engine, model: Mapping[str, Any]) -> int:
    """The longest request by the model's config.json. Raises ConfigError when that file makes no sense."""
    try:
        own = engine.own_context(model)
        if not 0 < own < 2**40:
            raise ValueError(f"a length of {own}")
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise config.error("model", f"{config.model}/config.json: its length or rope values make no sense ({error}); "
                           "fetch the model again", "model-directory-missing") from None
    return own


def choose(config: Config, index: int, engine: Engine, inputs: Inputs) -> Chosen:
    """Raises ConfigError when what was asked for does not go together; the message has both numbers and the way out."""
    case = _Case(config, config.workers[index], engine, inputs, f"workers[{index}].args")
    granule = config.line.granule or engine.granule(case.worker.args, inputs.model)
    maximum = _maximum(case)
    _check_sizes(case, granule, maximum)
    longest = _longest(config, granule)
    context, cap, note = _context(case, granule, longest)
    wanted = config.line
    first, auto = wanted.first_budget, wanted.budget == AUTO
    spec = LineSpec(budget=first, floor_budget=min(first, wanted.minimum * context), minimum=wanted.minimum, maximum=maximum,
                    granule=granule, rule=wanted.rule, step=wanted.step, auto=auto,
                    assumed_pair_bytes=config.headroom.pair_bytes if auto and wanted.start is None else 0)
    assumed = () if wanted.granule else (f"granule {granule} is assumed; the engine's own is known once it runs, "
                                         "and chunks are multiples of both",)
    return Chosen(spec, context, cap, (note, *assumed, *_auto_note(spec)))


def _auto_note(spec: LineSpec) -> tuple[str, ...]:
    if not spec.auto:
        return ()
    then = f"then {spec.assumed_pair_bytes} bytes for each (row, key) are assumed" if spec.assumed_pair_bytes else "it stays"
    return (f"line.budget auto: the engine starts with {spec.budget:,} token², {then} until its steps have told",)


def _maximum(case: _Case) -> int:
    asked = case.config.line.maximum
    spelling, flag = case.flag("chunk")
    if flag is not None and flag < 1:
        raise case.error(f"{spelling} {flag} switches chunks off and the hook line needs them; set a size, or take line "
                         "out of hooks")
    if asked is not None and flag is not None and flag != asked:
        raise case.error(f"{spelling} {flag} is not line.maximum {asked}; name one of them only")
    return asked or flag or DEFAULT_MAXIMUM


def _check_sizes(case: _Case, granule: int, maximum: int) -> None:
    config, minimum = case.config, case.config.line.minimum
    flag = case.flag("chunk")
    shown = f"{flag[0]} {maximum}" if flag[1] is not None else f"line.maximum {maximum}"
    if minimum % granule:
        raise config.error("line.minimum", f"{minimum} is no multiple of the granule {granule}; use "
                           f"{_near(minimum, granule)}")
    if maximum % granule:
        key = case.where if flag[1] is not None else "line.maximum"
        raise config.error(key, f"{shown} is no multiple of the granule {granule}; use {_near(maximum, granule)}")
    if config.line.step == "pow2":
        for key, tokens in (("line.minimum", minimum), ("line.maximum", maximum)):
            if (tokens // granule).bit_count() != 1:
                below = granule << (tokens // granule).bit_length() - 1
                raise config.error(key, f"{tokens} is no power of two times the granule {granule}, as line.step pow2 needs; "
                                   f"use {below} or {2 * below}")
    if minimum > maximum:
        raise config.error("line.minimum", f"{minimum} is over {shown}; lower line.minimum to {maximum} or less")


def _near(tokens: int, granule: int) -> str:
    below = tokens // granule * granule
    return f"{below} or {below + granule}" if below else str(granule)


def _longest(config: Config, granule: int) -> int:
    wanted = config.line
    longest: int = line.longest_prompt(wanted.first_budget, minimum=wanted.minimum, granule=granule, rule=_rule(wanted.rule))
    if not longest:
        least = wanted.minimum ** (2 if wanted.rule == "span" else 1)
        raise config.error(_budget_key(wanted), f"{wanted.first_budget} does not hold one chunk of line.minimum "
                           f"{wanted.minimum}; use at least {least}")
    return longest


def _context(case: _Case, granule: int, longest: int) -> tuple[int, bool, str]:
    """(longest request, whether the engine must be told, a sentence)."""
    config = case.config
    own = own_context(case.config, case.engine, case.inputs.model)
    spelling, flag = case.flag("context")
    asked = config.line.context
    if flag is not None and flag < 1:                # auto: the engine may go as far as the model does
        flag = own
    if asked is not None and flag is not None and asked != flag:
        raise case.error(f"{spelling} {flag} is not line.context {asked}; name one of them only")
    wanted = asked or flag
    if wanted is not None and wanted > longest:
        raise _too_long(case, f"{spelling} {flag}" if asked is None else str(asked), wanted, longest)
    if wanted is not None:
        return wanted, asked is not None and flag is None, f"longest request {wanted} as set; the line allows {longest}"
    if longest < own:
        return longest, True, f"longest request {longest}: the line allows no more at line.minimum (model: {own})"
    return own, False, f"longest request {own}, the model's own; the line allows {longest}"


def _too_long(case: _Case, shown: str, wanted: int, longest: int) -> ConfigError:
    minimum, rule = case.config.line.minimum, case.config.line.rule
    budget = minimum * (wanted if rule == "span" else wanted - minimum)
    key = "line.context" if case.config.line.context is not None else case.where
    return case.config.error(key, f"{shown} is more than the line allows, {longest} ("
                             f"{_budget_key(case.config.line)} {case.config.line.first_budget} at line.minimum {minimum}); set "
                             f"{longest} or less, or {_budget_key(case.config.line)} to {budget} or more")


def _budget_key(wanted: Line) -> str:
    return "line.start" if wanted.budget == AUTO else "line.budget"


def _rule(rule: str) -> Any:
    """The adapter's annotation is narrower than text; `config` has checked the word."""
    return rule


def schedule(spec: LineSpec, context: int) -> tuple[ChunkBand, ...]:
    """The chunk at each prefix up to `context`, equal neighbours joined. A longer prefix never takes a larger chunk."""
    bands: list[ChunkBand] = []
    start = 0
    while start < context:
        chunk = line.chunk_tokens(spec.budget, start, **spec.keywords())
        end = bisect_right(range(start, context), -chunk,
                           key=lambda prefix: -line.chunk_tokens(spec.budget, prefix, **spec.keywords())) + start
        bands.append(ChunkBand(start, end - 1, chunk))
        start = end
    return tuple(bands)


def grouped(bands: Sequence[_Band], most: int = 16) -> Iterator[Sequence[_Band]]:
    """The bands in at most `most` runs of neighbours, for a person."""
    size = -(-len(bands) // most)
    for start in range(0, len(bands), size or 1):
        yield bands[start:start + size]
