"""Step records of ATOM's runners: what a runner was really given, how long it took, and its peak of memory.

A batch of ATOM holds prefill rows or decode rows, never both.
"""
import time
from typing import Any, List, NamedTuple, Optional

from .. import fault, peak, rank

HOOK = "ranks"


class _Started(NamedTuple):
    chunks: List[List[int]]
    rest: peak.Rest
    nanoseconds: int


def install(owner: Any) -> None:
    """Gets the class ModelRunner."""
    fault.wrap(owner, "forward", HOOK, before=_starts, after=_ended)


def is_prefill(batch: Any) -> bool:
    """Whether `batch` holds rows of prompts that somebody sent: the warm-up, before KV sizing, is a dummy."""
    return bool(batch.total_tokens_num_prefill) and not batch.is_dummy_run


def _starts(runner: Any, batch: Any) -> Optional[_Started]:
    rank.beat()
    if not is_prefill(batch):
        return None
    rows = zip(batch.num_cached_tokens, batch.num_scheduled_tokens, strict=False)
    chunks = [[int(prefix), int(new)] for prefix, new in rows][:batch.total_seqs_num_prefill]
    return _Started(chunks, rank.starts(chunks), time.monotonic_ns())


def _ended(started: Optional[_Started], result: Any, runner: Any, batch: Any) -> None:
    """Milliseconds are those of the call: on a GPU up to the last launch. There is no line here, hence budget 0."""
    if started is not None:
        milliseconds = round((time.monotonic_ns() - started.nanoseconds) / 1e6, 3)
        rank.step(started.chunks, 0, False, milliseconds, peak.read(), started.rest)
