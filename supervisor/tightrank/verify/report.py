"""A ramp as Markdown, for people: what passed, how fast at which prefix, how low memory was, what the guard did."""
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from tightrank.verify.ramp import Band, Ramp, Size, bands, short, verdict


def markdown(ramp: Ramp) -> str:
    passed, sentence = verdict(ramp)
    target = ramp.target
    begun = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ramp.started_unix))
    parts = [f"# Ramp of {target['worker']}: {'passed' if passed else 'not passed'}",
             f"{sentence[:1].upper()}{sentence[1:].rstrip('.')}.",
             f"{target['engine']} {target['engine_version'] or ''} with {target['served_model']}, begun {begun}; requests went "
             f"to {target['url']}, {ramp.answer_tokens} tokens of answer each. Available memory had to keep over "
             f"{ramp.floor_bytes >> 20:,} MiB; the guard ends all ranks under {ramp.guard_floor_bytes >> 20:,} MiB."]
    if ramp.sizes:
        parts += [_table(_sizes(ramp))]
    if any(size.chunks for size in ramp.sizes):
        parts += ["## Prefill rate at each prefix, tokens a second", _table(_bands(ramp)), "![](rate.svg)",
                  "## Chunks, new tokens of a step", _table(_chunks(ramp)), "![](chunk.svg)"]
    if ramp.sizes:
        parts += ["## Memory", _table(_memory(ramp)), "![](memory.svg)"]
    parts += list(_events(ramp))
    return "\n\n".join(parts) + "\n"


def gib(count: float | None) -> str:
    return "not known" if count is None else f"{count / 2**30:.2f} GiB"


def mib(count: float | None) -> str:
    return "not known" if count is None else f"{count / 2**20:,.0f} MiB"


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * (head.count(" | ") + 1), *rest])


def _sizes(ramp: Ramp) -> Iterator[tuple[str, ...]]:
    yield "prompt", "result", "first token", "tokens/s", "steps", "lowest available", "over the limit by"
    for size in ramp.sizes:
        over = None if size.lowest is None else size.lowest - ramp.floor_bytes
        yield (short(size.tokens), str(size.outcome), _seconds(size.first_token_seconds), number(size.rate), _steps(size),
               gib(size.lowest), mib(over))


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} s"


def number(value: float | None) -> str:
    """A rate; "" where there is none."""
    return "" if value is None else f"{value:,.0f}"


def _steps(size: Size) -> str:
    """Whole or not is said: records are datagrams, and a prompt may be cached or stopped."""
    if not size.chunks:
        return "no records"
    first, last = size.chunks[0].prefix, size.chunks[-1].prefix + size.chunks[-1].tokens
    part = "" if (first, last) == (0, size.tokens) else f" (of tokens {first:,} to {last:,})"
    with_others = f", {size.shared_steps} with other requests" if size.shared_steps else ""
    return f"{len(size.chunks)}{part}{with_others}"


def by_band(sizes: Sequence[Size]) -> dict[str, dict[int, Band]]:
    """Name of a band -> tokens of the size -> what was prefilled there; in the order of the prefixes."""
    found: dict[tuple[int, str], dict[int, Band]] = {}
    for size in sizes:
        for band in bands(size.chunks):
            found.setdefault((band.from_tokens, band.name), {})[size.tokens] = band
    return {name: found[start, name] for start, name in sorted(found)}


def _bands(ramp: Ramp) -> Iterator[tuple[str, ...]]:
    yield "prefix", *(short(size.tokens) for size in ramp.sizes)
    for name, row in by_band(ramp.sizes).items():
        yield name, *(number(row[size.tokens].rate) if size.tokens in row else "" for size in ramp.sizes)


def _chunks(ramp: Ramp) -> Iterator[tuple[str, ...]]:
    yield "prefix", *(short(size.tokens) for size in ramp.sizes)
    for name, row in by_band(ramp.sizes).items():
        yield name, *(_span(row[size.tokens]) if size.tokens in row else "" for size in ramp.sizes)


def _span(band: Band) -> str:
    if band.smallest_chunk == band.largest_chunk:
        return f"{band.largest_chunk:,}"
    return f"{band.largest_chunk:,} to {band.smallest_chunk:,}"


def _memory(ramp: Ramp) -> Iterator[tuple[str, ...]]:
    names = sorted({name for size in ramp.sizes for name in (*size.lowest_bytes, *size.peak_bytes)})
    yield "prompt", *(f"lowest available, {name}" for name in names), "highest peak of a step", "its steps' peaks differ by"
    for size in ramp.sizes:
        peaks = ", ".join(f"{name} {gib(peak)}" for name, peak in sorted(size.peak_bytes.items()))
        lowest = (gib(size.lowest_bytes.get(name)) for name in names)
        yield short(size.tokens), *lowest, peaks or "not known", mib(size.rise_bytes)


def _events(ramp: Ramp) -> Iterator[str]:
    yield "## What the guard and the supervisor decided"
    told = [f"- {short(size.tokens)}: {event}" for size in ramp.sizes for event in size.events]
    yield "\n".join(told) if told else "Nothing."
