"""Hook `headroom` on vLLM: each worker's answer to `determine_available_memory` is lowered to what its rank can spare.

vLLM itself gives every rank the smallest worker's block count (v1/core/kv_cache_utils.py, get_kv_cache_configs), and an
exception of one worker ends all of them: no collective of ours is needed.
"""
from typing import Any

from .. import fault, rank, sizing
from . import ranks

TARGET = "determine_available_memory"


def gpu(module: Any) -> None:
    """Gets vllm.v1.worker.gpu_worker. Raises fault.Missing for a release without what is hooked."""
    owner = fault.require(module, "Worker", ranks.release())
    fault.wrap(owner, "initialize_from_config", sizing.HOOK, before=_blocks)
    _install(owner)


def cpu(module: Any) -> None:
    """Gets vllm.v1.worker.cpu_worker, whose worker answers for itself."""
    _install(fault.require(module, "CPUWorker", ranks.release()))


def _blocks(worker: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
    """What came of it: the blocks that this worker is told to make."""
    rank.fact("kv_blocks", int(kv_cache_config.num_blocks))


def _install(owner: Any) -> None:
    sizing.surround(owner, TARGET, lambda worker: int(worker.rank), lambda worker: sizing.alone, _later)


def _later(worker: Any) -> int:
    """Graphs, which are captured when the KV cache is there; their estimate is off vLLM's number. Not set without profiling."""
    return int(getattr(worker, "cudagraph_memory_estimate", 0))


def refuse(module: Any) -> None:
    """Gets vllm.v1.worker.xpu_worker, whose device's memory is not asked here. Raises fault.Missing."""
    raise fault.Missing("a worker on CUDA, ROCm or the CPU", module.__name__)
