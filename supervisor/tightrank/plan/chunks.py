"""The largest chunk at each prefix, by the line and by the memory that is left, and what the largest of them takes. Pure."""
from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from tightrank.adapter import line
from tightrank.plan.line import schedule
from tightrank.plan.peak import Peak
from tightrank.plan.terms import PlannedBand
from tightrank.records import LineSpec


@dataclass(frozen=True, slots=True)
class Chunks:
    """`pairs`: token² that memory allows, None: as many as one likes. `by_memory`: it is memory that keeps some chunk small.
    `longest_tokens`: the longest prompt that memory allows, None: any. `worst`: (bytes, new tokens, prefix) of the chunk that
    takes most. `what`: keeps chunks small where memory does not."""
    bands: tuple[PlannedBand, ...]
    pairs: int | None
    by_memory: bool
    longest_tokens: int | None
    worst: tuple[float, int, int]
    what: str
    minimum: int = 1

    def chunk_at(self, prefix: int) -> int:
        """The largest chunk behind `prefix`; the last band's beyond all of them."""
        index = bisect_right(self.bands, prefix, key=lambda band: band.from_tokens) - 1
        return self.bands[index].chunk_tokens or self.minimum


def chunks(spec: LineSpec | None, maximum: int, context: int, peak: Peak, spare_bytes: float | None) -> Chunks:
    """`spare_bytes`: what the tightest rank has left for a chunk; None: not known, so memory binds nothing."""
    pairs = None if spare_bytes is None else peak.pairs(max(spare_bytes, 0), maximum)
    if spec is None:
        return _static(maximum, context, peak, pairs)
    held = spec if pairs is None or pairs >= min(spec.budget, maximum * context) else replace(spec, budget=pairs)
    by_memory, found = held is not spec, schedule(held, context)
    bands = tuple(PlannedBand(band.from_tokens, band.to_tokens, band.chunk_tokens or (spec.minimum if by_memory else 0),
                              _by(band.chunk_tokens, spec, by_memory)) for band in found)
    longest = line.longest_prompt(held.budget, minimum=spec.minimum, granule=spec.granule, rule=_rule(spec))
    worst = _worst(bands, context, peak)
    return Chunks(bands, pairs, by_memory, longest if by_memory else None, worst, "the line allows", spec.minimum)


def _by(tokens: int, spec: LineSpec, by_memory: bool) -> str:
    if tokens >= spec.maximum // spec.granule * spec.granule:
        return "maximum"
    return ("memory" if by_memory else "line") if tokens or not by_memory else "minimum"


def _rule(spec: LineSpec) -> line.Rule:
    return "prefix" if spec.rule == "prefix" else "span"


def _static(maximum: int, context: int, peak: Peak, pairs: int | None) -> Chunks:
    """Without the line every chunk is of the engine's one size, and memory bounds the prefix alone."""
    bands = (PlannedBand(0, max(context - 1, 0), maximum, "maximum"),)
    longest = None if pairs is None else pairs // maximum
    by_memory = longest is not None and longest < context
    return Chunks(bands, pairs, by_memory, longest if by_memory else None, _worst(bands, context, peak),
                  f"chunks of {maximum:,} at {context:,} tokens take")


def _worst(bands: tuple[PlannedBand, ...], context: int, peak: Peak) -> tuple[float, int, int]:
    """At the end of each band: within it the prefix grows and the chunk does not."""
    ends = [(min(band.chunk_tokens, context), max(min(band.to_tokens, context - band.chunk_tokens), 0)) for band in bands]
    return max(((peak.bytes(tokens, prefix), tokens, prefix) for tokens, prefix in ends), default=(0.0, 0, 0))
