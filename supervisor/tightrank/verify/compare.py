"""Two ramps side by side: what the second is slower or faster at, and where memory was lower. Pure."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tightrank.verify.ramp import Outcome, Ramp, Size, short
from tightrank.verify.report import by_band, gib, mib, number
from tightrank.verify.target import differences


@dataclass(frozen=True, slots=True)
class Row:
    """One rate in both ramps, tokens a second, at the prefixes of a band."""
    tokens: int
    band: str
    a: float | None
    b: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`worse`: in sentences, what is worse in B than in A. `only`: sizes that one of them lacks, tokens."""
    verdict: str                       # better | same | worse
    worse: tuple[str, ...]
    pairs: tuple[tuple[Size, Size], ...]
    only: tuple[int, ...]
    different: tuple[str, ...]         # of what was measured

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "worse": list(self.worse), "only_in_one": list(self.only),
                "different": list(self.different),
                "sizes": [{"tokens": a.tokens, "ratio": ratio(a.rate, b.rate), "a": _numbers(a), "b": _numbers(b)}
                          for a, b in self.pairs],
                "bands": [{**asdict(row), "ratio": ratio(row.a, row.b)} for row in self.rows]}

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for pair in self.pairs for row in _rows(*pair))


def _numbers(size: Size) -> dict[str, Any]:
    return {"outcome": size.outcome, "tokens_per_second": size.rate, "lowest_bytes": size.lowest, "rise_bytes": size.rise_bytes}


def ratio(a: float | None, b: float | None) -> float | None:
    """B over A; None where one of them is not known."""
    return b / a if a and b else None


def compare(a: Ramp, b: Ramp, tolerance: float) -> Comparison:
    """`tolerance`: the share by which a whole prompt may be slower. Bands are shown and not judged: a few chunks each.

    Raises ValueError when they have no size in common.
    """
    ours, theirs = ({size.tokens: size for size in ramp.sizes} for ramp in (a, b))
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise ValueError(f"no size in common: {_sizes(a)} and {_sizes(b)}")
    pairs = tuple((ours[tokens], theirs[tokens]) for tokens in both)
    worse = tuple(sentence for pair in pairs for sentence in _worse(*pair, tolerance))
    faster = any((ratio(x.rate, y.rate) or 0.0) > 1 + tolerance for x, y in pairs)
    return Comparison("worse" if worse else "better" if faster else "same", worse, pairs,
                      tuple(sorted(ours.keys() ^ theirs.keys())), tuple(differences(a.target, b.target)))


def _sizes(ramp: Ramp) -> str:
    return ", ".join(short(size.tokens) for size in ramp.sizes) or "none"


def _rows(a: Size, b: Size) -> Iterator[Row]:
    first, second = by_band((a,)), by_band((b,))
    for band in by_band((a, b)):
        x, y = first.get(band, {}).get(a.tokens), second.get(band, {}).get(b.tokens)
        yield Row(a.tokens, band, x.rate if x else None, y.rate if y else None)


def _worse(a: Size, b: Size, tolerance: float) -> Iterator[str]:
    if a.outcome is Outcome.PASSED and b.outcome is not Outcome.PASSED:
        yield f"{short(a.tokens)}: passed in A, in B {b.outcome}: {b.why}"
    elif a.rate and b.rate and b.rate / a.rate < 1 - tolerance:
        yield f"{short(a.tokens)}: {b.rate:,.0f} tokens/s in B, {a.rate:,.0f} in A ({b.rate / a.rate:.3f} of it)"


def size_rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    """Whole prompts, for a person."""
    yield ("prompt", "A tokens/s", "B tokens/s", "B / A", "A lowest memory", "B lowest memory", "A peaks differ by",
           "B peaks differ by")
    for a, b in found.pairs:
        yield (short(a.tokens), number(a.rate) or str(a.outcome), number(b.rate) or str(b.outcome), _shown(a.rate, b.rate),
               gib(a.lowest), gib(b.lowest), mib(a.rise_bytes), mib(b.rise_bytes))


def band_rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    yield "prompt", "prefix", "A tokens/s", "B tokens/s", "B / A"
    for row in found.rows:
        yield short(row.tokens), row.band, number(row.a) or "none", number(row.b) or "none", _shown(row.a, row.b)


def _shown(a: float | None, b: float | None) -> str:
    share = ratio(a, b)
    return "" if share is None else f"{share:.3f}"
