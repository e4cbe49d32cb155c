"""The memory plan as text: what each rank holds, the chunks, the numbers, and two plans side by side."""
from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from tightrank.cli.common import table
from tightrank.plan.line import grouped
from tightrank.plan.terms import MemoryPlan, PlannedBand, RankPlan, Term

GIB = 2**30
_LEAST_WIDTH = 32          # of a formula
_MOST_RANKS = 8            # columns that a terminal has room for; of more, those that differ


def lines(plan: MemoryPlan, width: int | None) -> Iterator[str]:
    """Of one worker. Formulas are wrapped at `width` columns; None: nowhere."""
    yield f"binds: {plan.binds}"
    if plan.ranks:
        yield ""
        yield from _ranks(plan, width)
    yield ""
    yield from _wrapped([_row(term) for term in (*plan.numbers, *plan.first_token)], (1,), width)
    yield ""
    yield from chunks(plan.bands)
    if plan.unknown:
        yield ""
        yield from (f"not known: {sentence}" for sentence in plan.unknown)


def _row(term: Term) -> tuple[str, str, str, str]:
    return term.name, shown(term), term.origin, term.formula + (f" ({term.source})" if term.source else "")


def _wrapped(rows: Sequence[tuple[str, ...]], right: tuple[int, ...], width: int | None) -> Iterator[str]:
    """A table whose last column is wrapped."""
    starts = table([(*row[:-1], "|") for row in rows], right).splitlines()
    for row, start in zip(rows, starts, strict=True):
        place = start.rindex("|")
        room = 10**6 if width is None else max(width - place, _LEAST_WIDTH)
        first, *more = textwrap.wrap(row[-1], room) or [""]
        yield (start[:place] + first).rstrip()
        yield from (" " * place + line for line in more)


def shown(term: Term) -> str:
    """The value with its unit, as a person reads it."""
    if term.unit == "bytes":
        return f"{term.value / GIB:.2f} GiB" if abs(term.value) >= GIB / 100 else f"{term.value:,.0f} B"
    if term.unit == "seconds":
        return f"{term.value:.1f} s" if term.value < 120 else f"{term.value / 60:.1f} min"
    return f"{term.value:,.0f} {term.unit}"


def _ranks(plan: MemoryPlan, width: int | None) -> Iterator[str]:
    """One column for each rank, the tightest marked; a row for each thing that it holds."""
    chosen = _columns(plan)
    heads = [_named(rank, plan) for rank in chosen]
    rows = [("GiB", *(head for head in heads), "", "")]
    for name, terms in _terms(chosen):
        first = next(term for term in terms if term is not None)
        cells = [f"{term.value / GIB:.2f}" if term is not None else "" for term in terms]
        rows.append((name, *cells, first.origin, first.formula + (f" ({first.source})" if first.source else "")))
    yield from _wrapped(rows, tuple(range(1, len(chosen) + 1)), width)
    yield from (f"rank {rank.rank}: {rank.binds}" for rank in plan.ranks
                if rank.rank == plan.tightest_rank or rank.spare.value < 0)
    if len(chosen) < len(plan.ranks):
        yield f"the other {len(plan.ranks) - len(chosen)} ranks hold what their neighbour to the left does"


def _named(rank: RankPlan, plan: MemoryPlan) -> str:
    return f"rank {rank.rank}" + ("*" if plan.is_tightest(rank) else "")


def _columns(plan: MemoryPlan) -> list[RankPlan]:
    """All ranks, or the first of each run of neighbours that hold alike."""
    if len(plan.ranks) <= _MOST_RANKS:
        return list(plan.ranks)
    alike = groupby(plan.ranks, key=lambda rank: (rank.memory.value, tuple(term.value for term in rank.rest)))
    return [next(run) for _, run in alike][:_MOST_RANKS]


def _terms(ranks: Sequence[RankPlan]) -> Iterator[tuple[str, list[Term | None]]]:
    yield "memory", [rank.memory for rank in ranks]
    names = list(dict.fromkeys(term.name for rank in ranks for term in rank.rest))
    for name in names:
        yield name, [next((term for term in rank.rest if term.name == name), None) for rank in ranks]
    if any(rank.guard.value for rank in ranks):
        yield "guard", [rank.guard for rank in ranks]
    yield "peak of a chunk", [rank.peak for rank in ranks]
    yield "to spare", [rank.spare for rank in ranks]


def chunks(bands: Sequence[PlannedBand]) -> list[str]:
    """The largest chunk at each prefix, neighbours in groups where there are many."""
    rows = [("prefix from", "to", "chunk", "down to", "by")]
    for _, run in groupby(bands, key=lambda band: band.by):
        for group in grouped(list(run)):
            first, last = group[0], group[-1]
            down = _chunk(last.chunk_tokens) if last is not first else ""
            rows.append((f"{first.from_tokens:,}", f"{last.to_tokens:,}", _chunk(first.chunk_tokens), down, first.by))
    return table(rows, right=(0, 1, 2, 3)).splitlines()


def _chunk(tokens: int) -> str:
    """0: only the rest of a prompt, shorter than the smallest chunk, still stands there."""
    return f"{tokens:,}" if tokens else "the rest"


def compared(before: MemoryPlan, after: MemoryPlan) -> Iterator[str]:
    """What differs, before | after."""
    rows = [("", "before", "after", "difference"), *_different(before, after)]
    yield from table(rows, right=(1, 2, 3)).splitlines()
    yield ""
    yield f"binds before: {before.binds}"
    yield f"binds after:  {after.binds}"
    if before.bands != after.bands:
        yield ""
        yield "chunks before:"
        yield from chunks(before.bands)
        yield "chunks after:"
        yield from chunks(after.bands)


def _different(before: MemoryPlan, after: MemoryPlan) -> Iterator[tuple[str, str, str, str]]:
    one, other = _all(before), _all(after)
    for name in dict.fromkeys((*one, *other)):
        first, second = one.get(name), other.get(name)
        if first is None or second is None or first.value != second.value:
            yield (name, shown(first) if first else "none", shown(second) if second else "none", _difference(first, second))


def _difference(before: Term | None, after: Term | None) -> str:
    if before is None or after is None or not before.value:
        return ""
    return f"{(after.value - before.value) / before.value:+.1%}"


def _all(plan: MemoryPlan) -> dict[str, Term]:
    found = {term.name: term for term in (*plan.numbers, *plan.first_token)}
    for rank in plan.ranks:
        found |= {f"rank {rank.rank}, {term.name}": term
                  for term in (rank.memory, *rank.rest, rank.guard, rank.peak, rank.spare)}
    return found
