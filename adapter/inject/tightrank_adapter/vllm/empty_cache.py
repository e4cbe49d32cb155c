"""Hook `empty-cache` on vLLM: after a worker's step that held prefill rows (`../cache.py` says why there)."""
from typing import Any

from .. import cache, fault
from . import steps


def install(module: Any) -> None:
    """Gets vllm.v1.worker.gpu_worker, whose Worker the CPU and XPU workers inherit. Raises fault.Missing."""
    owner = fault.require(module, "Worker")
    if cache.begin():
        fault.wrap(owner, "execute_model", cache.HOOK, before=_is_prefill, after=_ended)


def refuse(module: Any) -> None:
    """Gets vllm.v1.worker.xpu_worker, whose allocator is another one. Raises fault.Missing."""
    raise fault.Missing("a worker on CUDA, ROCm or the CPU", module.__name__)


def _is_prefill(worker: Any, scheduler_output: Any) -> bool:
    return bool(steps.prefill_chunks(scheduler_output))


def _ended(is_prefill: bool, result: Any, worker: Any, scheduler_output: Any) -> None:
    if is_prefill:
        cache.chunk_ended()
