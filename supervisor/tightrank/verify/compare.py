"""Two ramps side by side: what the second is slower or faster at, and where memory was lower. Pure."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tightrank.verify.ramp import Outcome, Ramp, Size, short
from tightrank.verify.report import by_band, gib, number
from tightrank.verify.target import differences


@dataclass(frozen=True, slots=True)
class Row:
    """One rate in both ramps, tokens a second: of a whole prompt (`band` "") or of a band of it."""
    tokens: int
    band: str
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        """B over A; None where one of them is not known."""
        return self.b / self.a if self.a and self.b else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`worse`: in sentences, what is worse in B than in A. `only`: sizes that one of them lacks, tokens."""
    verdict: str                       # better | same | worse
    worse: tuple[str, ...]
    rows: tuple[Row, ...]
    lowest: tuple[tuple[int, int | None, int | None], ...]     # (tokens, A, B), bytes
    only: tuple[int, ...]
    different: tuple[str, ...]         # of what was measured

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "worse": list(self.worse), "only_in_one": list(self.only),
                "different": list(self.different),
                "rates": [{"tokens": row.tokens, "band": row.band, "a": row.a, "b": row.b, "ratio": row.ratio}
                          for row in self.rows],
                "lowest_bytes": [{"tokens": tokens, "a": a, "b": b} for tokens, a, b in self.lowest]}


def compare(a: Ramp, b: Ramp, tolerance: float) -> Comparison:
    """`tolerance`: the share by which a whole prompt may be slower. Bands are shown and not judged: a few chunks each.

    Raises ValueError when they have no size in common.
    """
    ours, theirs = ({size.tokens: size for size in ramp.sizes} for ramp in (a, b))
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise ValueError(f"no size in common: {_sizes(a)} and {_sizes(b)}")
    pairs = [(ours[tokens], theirs[tokens]) for tokens in both]
    rows = tuple(row for pair in pairs for row in _rows(*pair))
    worse = tuple(sentence for pair in pairs for sentence in _worse(*pair, tolerance))
    faster = any(row.ratio is not None and row.ratio > 1 + tolerance for row in rows if not row.band)
    return Comparison("worse" if worse else "better" if faster else "same", worse, rows,
                      tuple((x.tokens, x.lowest, y.lowest) for x, y in pairs), tuple(sorted(ours.keys() ^ theirs.keys())),
                      tuple(differences(a.target, b.target)))


def _sizes(ramp: Ramp) -> str:
    return ", ".join(short(size.tokens) for size in ramp.sizes) or "none"


def _rows(a: Size, b: Size) -> Iterator[Row]:
    yield Row(a.tokens, "", a.rate, b.rate)
    first, second = by_band((a,)), by_band((b,))
    for band in by_band((a, b)):
        x, y = first.get(band, {}).get(a.tokens), second.get(band, {}).get(b.tokens)
        yield Row(a.tokens, band, x.rate if x else None, y.rate if y else None)


def _worse(a: Size, b: Size, tolerance: float) -> Iterator[str]:
    if a.outcome is Outcome.PASSED and b.outcome is not Outcome.PASSED:
        yield f"{short(a.tokens)}: passed in A, in B {b.outcome}: {b.why}"
    elif a.rate and b.rate and b.rate / a.rate < 1 - tolerance:
        yield f"{short(a.tokens)}: {b.rate:,.0f} tokens/s in B, {a.rate:,.0f} in A ({b.rate / a.rate:.3f} of it)"


def table_rows(found: Comparison) -> Sequence[tuple[str, ...]]:
    """For a person: rates first, then memory."""
    rows = [("prompt", "prefix", "A tokens/s", "B tokens/s", "B / A")]
    rows += [(short(row.tokens), row.band or "all", number(row.a) or "none", number(row.b) or "none",
              "" if row.ratio is None else f"{row.ratio:.3f}") for row in found.rows]
    rows += [(short(tokens), "lowest memory", gib(a), gib(b), "" if a is None or b is None else f"{(b - a) / 2**20:+,.0f} MiB")
             for tokens, a, b in found.lowest]
    return rows
