"""What a ramp measures and what follows from it. Pure: step records and samples in, chunks, rates and a verdict out."""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from tightrank.config.units import format_size

Json = Mapping[str, Any]
PUBLISHED_TOKENS = (64_000, 128_000, 200_000, 256_000, 400_000, 500_000)   # the published analysis, its validation of 2.1
MOST_TOKENS = 2**30
FIRST_BAND_TOKENS = 1024       # bands end at powers of two from here on, so that those of any two ramps are the same
_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}             # as both engines read their own flags


class Outcome(StrEnum):
    """How one size ended. Only a size that passed is followed by a longer one."""
    PASSED = "passed"
    UNDER_FLOOR = "under-floor"        # it was answered, and memory was lower than it may be
    GUARD_EVENT = "guard-event"        # a level fired, or the worker is no longer up
    REFUSED = "refused"                # the endpoint answered with an error
    TIMEOUT = "timeout"
    LOST = "lost"                      # the endpoint or the supervisor is gone and nobody says why
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill step of the prompt: `tokens` new ones behind `prefix`. `peak_bytes`: the rank's memory at its peak."""
    prefix: int
    tokens: int
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Size:
    """One prompt of a ramp. `chunks` may end early (stopped) or begin late (records were lost)."""
    tokens: int
    outcome: Outcome
    why: str                           # "" when it passed
    seed: int                          # of the prompt's token IDs
    generation: int                    # of the worker
    started_unix: float
    seconds: float                     # to its end, whatever that was
    first_token_seconds: float | None
    chunks: tuple[Chunk, ...] = ()
    shared_steps: int = 0              # that held rows of other requests too: the rates are not this prompt's alone
    memory: tuple[tuple[float, int], ...] = ()                 # (seconds since its start, available bytes of the host)
    lowest_bytes: Mapping[str, int] = field(default_factory=dict)      # "host", "guard" and each rank: the least available
    peak_bytes: Mapping[str, int] = field(default_factory=dict)        # each rank: the highest peak of a step
    events: tuple[str, ...] = ()       # what the supervisor decided and said meanwhile

    @property
    def rate(self) -> float | None:
        """Prefilled tokens a second, as the client saw it. None: it saw no token."""
        return self.tokens / self.first_token_seconds if self.first_token_seconds else None

    @property
    def rise_bytes(self) -> int | None:
        """By how much the peaks of its steps differ: what the rank holds at rest is in all of them. None: not known."""
        known = [chunk.peak_bytes for chunk in self.chunks if chunk.peak_bytes is not None]
        return max(known) - min(known) if known else None

    @property
    def lowest(self) -> int | None:
        """Of the host, which the guard looks at more often than the supervisor; None: not known. The memory of a device of
        its own is told per rank and not judged: engines keep what they have freed."""
        return min((self.lowest_bytes[name] for name in ("host", "guard") if name in self.lowest_bytes), default=None)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A ramp as far as it has come. `target`: what was measured, see `target.Target.identity`."""
    started_unix: float
    target: Json
    floor_bytes: int                   # available memory may not be less
    guard_floor_bytes: int
    sizes_tokens: tuple[int, ...]
    answer_tokens: int
    sizes: tuple[Size, ...] = ()

    @property
    def left(self) -> tuple[int, ...]:
        """The sizes that have not passed."""
        return self.sizes_tokens[len(self.passed):]

    @property
    def passed(self) -> tuple[Size, ...]:
        return tuple(size for size in self.sizes if size.outcome is Outcome.PASSED)


# --- sizes ------------------------------------------------------------------------------------------------------------

def parse_tokens(text: str) -> int:
    """64k is 64,000 and 64K is 65,536. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,10})([kKmM]?)", text.strip())
    tokens = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"'{text}': a number of tokens from 1 to {MOST_TOKENS} is wanted: 65536, 64k (64000) or 64K (65536)")
    return tokens


def parse_sizes(text: str) -> tuple[int, ...]:
    """Raises ValueError."""
    sizes = tuple(parse_tokens(part) for part in text.split(","))
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError(f"'{text}': each size must be longer than the one before, so that the ramp can stop in time")
    return sizes


def sizes_for(asked: Sequence[int] | None, longest: int | None) -> tuple[int, ...]:
    """The sizes of a ramp. Not asked for: the published ones, scaled down where the longest prompt is shorter.

    Raises ValueError for a size over `longest` (tokens; None: no limit known).
    """
    if asked is not None:
        if longest is not None and asked[-1] > longest:
            raise ValueError(f"{asked[-1]} tokens are more than the longest prompt here, {longest}; name sizes up to {longest}")
        return tuple(asked)
    if longest is None or longest >= PUBLISHED_TOKENS[-1]:
        return PUBLISHED_TOKENS
    return tuple(dict.fromkeys(max(1, size * longest // PUBLISHED_TOKENS[-1]) for size in PUBLISHED_TOKENS))


def short(tokens: int) -> str:
    """For headings: 128k where that is exact."""
    return f"{tokens // 1000}k" if tokens and tokens % 1000 == 0 else f"{tokens:,}"


# --- what the records say ---------------------------------------------------------------------------------------------

def chain(steps: Sequence[Json], tokens: int) -> tuple[Chunk, ...]:
    """The chunks of our prompt in order, from the records (as /steps has them) since it was sent.

    Found from its last token backwards: a short request of somebody else may begin like it, none ends like it. A step's time
    is the distance to the step before (vLLM on a GPU records when a step is launched); the first one's is its own.
    """
    last = max(((prefix + new, -step["rank"]) for step in steps for prefix, new in step["chunks"] if prefix + new <= tokens),
               default=None)
    if last is None:
        return ()
    wanted, rank = last[0], -last[1]
    found: list[tuple[Json, int, int]] = []
    for step in reversed([step for step in steps if step["rank"] == rank]):
        for prefix, new in step["chunks"]:
            if wanted and prefix + new == wanted and new:
                found.append((step, prefix, new))
                wanted = prefix
                break
    return tuple(_timed(found[::-1]))


def _timed(found: Sequence[tuple[Json, int, int]]) -> Iterator[Chunk]:
    before: Json | None = None
    for step, prefix, new in found:
        seconds = step["milliseconds"] / 1e3 if before is None else (step["monotonic_ns"] - before["monotonic_ns"]) / 1e9
        before = step
        yield Chunk(prefix, new, max(seconds, 0.0), step["peak_bytes"])


def shared(steps: Sequence[Json], chunks: Sequence[Chunk]) -> int:
    """How many steps held more than the prompt's own rows."""
    own = {(chunk.prefix, chunk.tokens) for chunk in chunks}
    return sum(len(step["chunks"]) > 1 and any(tuple(each) in own for each in step["chunks"]) for step in steps)


def peaks(steps: Sequence[Json]) -> dict[str, int]:
    """The highest peak of each rank."""
    found: dict[str, int] = {}
    for step in steps:
        if step["peak_bytes"] is not None:
            name = f"rank {step['rank']}"
            found[name] = max(found.get(name, 0), step["peak_bytes"])
    return found


# --- bands ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Band:
    """What was prefilled at prefixes in [from_tokens, to_tokens)."""
    from_tokens: int
    to_tokens: int
    tokens: int
    seconds: float
    smallest_chunk: int
    largest_chunk: int

    @property
    def rate(self) -> float | None:
        """Tokens a second; None where the clock saw no time pass."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def name(self) -> str:
        return f"{self.from_tokens:,} - {self.to_tokens:,}"


def bands(chunks: Sequence[Chunk]) -> tuple[Band, ...]:
    """By the prefix at which a chunk begins; the end of a prompt, shorter than a chunk may be, counts for the rate alone."""
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(_band_start(chunk.prefix), []).append(chunk)
    return tuple(_band(start, found[start], chunks[-1]) for start in sorted(found))


def _band_start(prefix: int) -> int:
    return 0 if prefix < FIRST_BAND_TOKENS else 1 << (prefix.bit_length() - 1)


def _band(start: int, chunks: Sequence[Chunk], last: Chunk) -> Band:
    whole = [chunk.tokens for chunk in chunks if chunk is not last] or [chunk.tokens for chunk in chunks]
    return Band(start, 2 * start or FIRST_BAND_TOKENS, sum(chunk.tokens for chunk in chunks),
                sum(chunk.seconds for chunk in chunks), min(whole), max(whole))


# --- verdict ----------------------------------------------------------------------------------------------------------

def judged(lowest: int | None, floor_bytes: int) -> tuple[Outcome, str]:
    """Of a prompt that was answered."""
    if lowest is not None and lowest < floor_bytes:
        return Outcome.UNDER_FLOOR, (f"available memory fell to {lowest / 2**30:.2f} GiB, under {floor_bytes / 2**30:.2f} GiB "
                                     f"({format_size(floor_bytes)})")
    return Outcome.PASSED, ""


def verdict(ramp: Ramp) -> tuple[bool, str]:
    """(whether all sizes passed, in a sentence)."""
    if not ramp.left:
        known = [size.lowest for size in ramp.sizes if size.lowest is not None]
        least = f"available memory never under {min(known) / 2**30:.2f} GiB" if known else "available memory is not known"
        return True, f"all {len(ramp.sizes_tokens)} sizes up to {short(ramp.sizes_tokens[-1])} tokens passed, {least}"
    if ramp.sizes and (last := ramp.sizes[-1]).outcome is not Outcome.PASSED:
        return False, f"{short(last.tokens)} tokens: {last.outcome}: {last.why}"
    return False, f"not finished: {', '.join(map(short, ramp.left))} tokens are still to be done"
