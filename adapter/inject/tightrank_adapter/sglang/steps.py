"""The record of each prefill step of a SGLang scheduler: what was in the batch, how long it took, its peak of memory.

On a GPU a batch is launched by `run_batch` and its result comes with `process_batch_result`, by then the next one is
launched (overlap scheduling); both are in order. On a CPU the step is done when `run_batch` returns.
"""
import time
from collections import deque
from typing import Any, Deque, List, NamedTuple, Optional

from .. import fault, peak, rank
from . import line

HOOK = "ranks"


class _Step(NamedTuple):
    started: float
    chunks: List[List[int]]
    budget: int
    over: bool
    rest: peak.Rest
    peak_bytes: Optional[int]


_launched: Deque[_Step] = deque(maxlen=64)  # a few at most: one for each batch in the pipeline
_ended = 0.0


def install(scheduler: Any) -> None:
    """Gets the class Scheduler."""
    fault.wrap(scheduler, "run_batch", HOOK, before=_before_run, after=_after_run)
    fault.wrap(scheduler, "process_batch_result", HOOK, after=_after_result)


def _before_run(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Optional[_Step]:
    if not batch.forward_mode.is_extend():
        return None
    chunks = [[int(prefix), int(new)] for prefix, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    rest = rank.starts(chunks)
    return _Step(time.monotonic(), chunks, line.budget(), line.is_over(chunks), rest, None)


def _after_run(step: Optional[_Step], result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if step is None:
        return
    step = step._replace(peak_bytes=peak.read())
    if peak.on_device():
        _launched.append(step)
    else:
        _send(step, step.started)


def _after_result(token: None, result: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    global _ended
    if not peak.on_device():
        return
    if batch.forward_mode.is_extend() and _launched:
        step = _launched.popleft()
        _send(step, max(step.started, _ended))
    _ended = time.monotonic()


def _send(step: _Step, since: float) -> None:
    rank.step(step.chunks, step.budget, step.over, (time.monotonic() - since) * 1000.0, step.peak_bytes, step.rest)
