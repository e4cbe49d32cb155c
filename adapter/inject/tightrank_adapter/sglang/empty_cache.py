"""Hook `empty-cache` on SGLang: after `Scheduler.run_batch` of a prefill batch, which every loop of the scheduler calls.

The normal, overlap, pipeline and both disaggregated loops launch their batches there. `process_batch_result` would be too
late: with overlap scheduling the next chunk is launched before the result of this one is looked at.
"""
from typing import Any

from .. import cache, fault


def install(module: Any) -> None:
    """Gets sglang.srt.managers.scheduler. Raises fault.Missing for a release without what is hooked."""
    owner = fault.require(module, "Scheduler")
    if cache.begin():
        fault.wrap(owner, "run_batch", cache.HOOK, before=_is_prefill, after=_ended)


def _is_prefill(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(batch.forward_mode.is_extend())


def _ended(is_prefill: bool, result: Any, *args: Any, **kwargs: Any) -> None:
    if is_prefill:
        cache.chunk_ended()
