"""Step records of vLLM's workers: what a worker was really given, how long it took, and its peak of memory.

Read from the scheduler's output as it reaches the worker, so a record also proves what the hook `line` did.
"""
import time
from typing import Any, List, NamedTuple, Optional, Tuple

from .. import fault, peak, pool, rank

HOOK = "ranks"
BUDGET = "tightrank_budget"  # attribute of the scheduler's output, set by the hook `line`; it survives pickling


class _Started(NamedTuple):
    chunks: List[List[int]]
    budget: int
    rest: peak.Rest
    nanoseconds: int


def install(module: Any) -> None:
    """Gets vllm.v1.worker.gpu_worker, whose Worker the CPU and XPU workers inherit."""
    owner = fault.require(module, "Worker")
    fault.wrap(owner, "execute_model", HOOK, before=_starts, after=_ended)
    fault.wrap(owner, "init_device", HOOK, after=_bound)
    fault.wrap(owner, "load_model", HOOK, after=_loaded)
    if rank.watches_memory():
        fault.wrap(owner, "initialize_from_config", HOOK, after=_filled)


def _filled(token: None, result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    pool.watch(getattr(worker.model_runner, "kv_caches", None))


def _bound(token: None, result: None, worker: Any) -> None:
    """The worker has its device, "cuda:1" for ROCm too; CPU and XPU workers have an init_device of their own."""
    if worker.device.type == "cuda":
        rank.locate(worker.device.index)


def _loaded(token: None, result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    rank.weights(getattr(worker.model_runner, "model_memory_usage", None))


_last: Tuple[Any, List[List[int]]] = (None, [])


def prefill_chunks(output: Any) -> List[List[int]]:
    """As `_prefill_chunks`; two hooks ask for each step."""
    global _last
    if _last[0] is not output:
        _last = output, _prefill_chunks(output)
    return _last[1]


def _prefill_chunks(output: Any) -> List[List[int]]:
    """[prefix, new tokens] of each request in a SchedulerOutput that is still computing its prompt.

    A cached request is one when it has no output yet. One that was preempted after its first token and computes its
    tokens anew is told by a chunk that is longer than a decode row.
    """
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    chunks = [[new.num_computed_tokens, counts[new.req_id]] for new in output.scheduled_new_reqs]
    drafts = output.scheduled_spec_decode_tokens
    only_decode = not drafts and output.total_num_scheduled_tokens == len(counts) and 0 not in cached.num_output_tokens
    if chunks or not only_decode:
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        chunks += [[prefix, counts[request]] for request, prefix, outputs in rows
                   if outputs == 0 or counts[request] > 1 + len(drafts.get(request, ()))]
    return chunks


def _starts(worker: Any, scheduler_output: Any) -> Optional[_Started]:
    rank.beat()
    budget = getattr(scheduler_output, BUDGET, None)
    if budget is None and "line" in rank.settings().hooks:
        return None  # not from the scheduler: vLLM warms kernels up with outputs of its own
    chunks = prefill_chunks(scheduler_output)
    if not chunks:
        return None
    return _Started(chunks, budget or 0, rank.starts(chunks), time.monotonic_ns())


def _ended(started: Optional[_Started], result: Any, worker: Any, scheduler_output: Any) -> None:
    """Milliseconds are those of the call: on a CPU the whole forward pass, on a GPU up to the last launch."""
    if started is not None:
        milliseconds = (time.monotonic_ns() - started.nanoseconds) / 1e6
        rank.step(started.chunks, started.budget, _is_over(started), round(milliseconds, 3), peak.read(), started.rest)


def _is_over(started: _Started) -> bool:
    """Budget 0 with the hook `line` off means that there is no line."""
    settings = rank.settings()
    if "line" not in settings.hooks:
        return False
    with_new = settings.line.get("rule", "span") == "span"
    width = max(prefix + new * with_new for prefix, new in started.chunks)
    return bool(sum(new for _, new in started.chunks) * width > started.budget)
