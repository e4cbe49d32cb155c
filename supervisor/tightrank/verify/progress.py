"""How far a ramp is, for who waits: a bar on a terminal, lines elsewhere."""
from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Protocol, TextIO

from tightrank.verify.ramp import Chunk, Outcome, Ramp, Size, short
from tightrank.verify.report import gib, number

BAR_CELLS = 24
LINE_SECONDS = 30.0            # between lines where there is no terminal


class Display(Protocol):
    """What a ramp tells while it runs."""

    def begin(self, ramp: Ramp, tokens: int) -> None: ...
    def progress(self, chunks: Sequence[Chunk], lowest: int | None) -> None: ...
    def ended(self, ramp: Ramp, size: Size) -> None: ...


# --- the time that is left --------------------------------------------------------------------------------------------

def fitted(chunks: Sequence[Chunk]) -> tuple[float, float]:
    """(a, b) of a prefill's seconds a·n + b·n²/2, by least squares over chunks of T tokens behind L: a·T + b·T·(L + T/2).

    Attention is linear in the keys, all else in the tokens. Where that does not come out (few chunks, a negative term) the
    mean rate counts.
    """
    rows = [(chunk.tokens, chunk.tokens * (chunk.prefix + chunk.tokens / 2), chunk.seconds) for chunk in chunks]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    xs, ys = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (xs * yy - ys * xy) / determinant, (xx * ys - xy * xs) / determinant
        if a >= 0 and b >= 0:
            return a, b
    tokens = sum(row[0] for row in rows)
    return (sum(row[2] for row in rows) / tokens if tokens else 0.0), 0.0


def seconds(fit: tuple[float, float], tokens: int) -> float:
    """Of the prefill of a prompt's first `tokens`."""
    a, b = fit
    return a * tokens + b * tokens * tokens / 2


def forecast(ramp: Ramp, tokens: int, chunks: Sequence[Chunk]) -> tuple[float, float | None]:
    """(share of the whole ramp that is done, seconds left), while the prompt of `tokens` has come as far as `chunks`.
    None: nothing is measured yet."""
    known = [chunk for size in ramp.passed for chunk in size.chunks] + list(chunks)
    reached = chunks[-1].prefix + chunks[-1].tokens if chunks else 0
    fit = fitted(known) if known else (1.0, 0.0)
    done = sum(seconds(fit, size.tokens) for size in ramp.passed) + seconds(fit, reached)
    whole = sum(seconds(fit, size) for size in ramp.sizes_tokens)
    return (done / whole if whole else 0.0), (max(whole - done, 0.0) if known else None)


# --- showing ----------------------------------------------------------------------------------------------------------

def line_of(ramp: Ramp, tokens: int, chunks: Sequence[Chunk], lowest: int | None) -> str:
    """All that is known of the present prompt."""
    reached = chunks[-1].prefix + chunks[-1].tokens if chunks else 0
    taken = sum(chunk.seconds for chunk in chunks[-8:])
    rate = sum(chunk.tokens for chunk in chunks[-8:]) / taken if taken else None
    _, left = forecast(ramp, tokens, chunks)
    return (f"{short(tokens)}: {reached:,} of {tokens:,} tokens, {number(rate) or 'no'} tokens/s, lowest {gib(lowest)}"
            + (f", {duration(left)} left" if left is not None else ""))


def duration(left: float) -> str:
    minutes, rest = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def result_line(ramp: Ramp, size: Size) -> str:
    """One size that is over."""
    head = f"{short(size.tokens)}: {size.outcome}"
    if size.outcome is not Outcome.PASSED:
        return f"{head}: {size.why}"
    return (f"{head}, first token after {size.first_token_seconds:.2f} s, {number(size.rate)} tokens/s, {len(size.chunks)} "
            f"steps, lowest {gib(size.lowest)}")


class Lines:
    """For logs: a line when a size begins and ends, and now and then between."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._said = out, 0.0
        self._ramp: Ramp | None = None
        self._tokens = 0

    def begin(self, ramp: Ramp, tokens: int) -> None:
        self._ramp, self._tokens, self._said = ramp, tokens, time.monotonic()
        print(f"{short(tokens)}: sent, {len(ramp.passed) + 1} of {len(ramp.sizes_tokens)}", file=self._out, flush=True)

    def progress(self, chunks: Sequence[Chunk], lowest: int | None) -> None:
        if self._ramp is not None and time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(line_of(self._ramp, self._tokens, chunks, lowest), file=self._out, flush=True)

    def ended(self, ramp: Ramp, size: Size) -> None:
        print(result_line(ramp, size), file=self._out, flush=True)


class Bar:
    """For a terminal: one line that is drawn anew, and a line that stays for each size."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._ramp: Ramp | None = None
        self._tokens = 0

    def begin(self, ramp: Ramp, tokens: int) -> None:
        self._ramp, self._tokens = ramp, tokens
        self.progress((), None)

    def progress(self, chunks: Sequence[Chunk], lowest: int | None) -> None:
        if self._ramp is not None:
            share, _ = forecast(self._ramp, self._tokens, chunks)
            full = round(share * BAR_CELLS)
            text = (f"[{'#' * full}{'-' * (BAR_CELLS - full)}] {share * 100:3.0f} %  "
                    f"{line_of(self._ramp, self._tokens, chunks, lowest)}")
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r{text[:width]}\033[K")
            self._out.flush()

    def ended(self, ramp: Ramp, size: Size) -> None:
        self._out.write(f"\r\033[K{result_line(ramp, size)}\n")
        self._out.flush()


def display() -> Display:
    """On stderr: stdout is for the result."""
    return Bar(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)
