"""What our functions add to one step of vLLM's own scheduler; run by scripts/bench/adapter in vLLM's environment.

Two schedulers of the same class, one as vLLM made it and one with our hook, get the same requests in lockstep; the order
of the two calls alternates. The rest of a step (heartbeat, step record) is timed as wrapped minus bare calls of an empty
function with the real scheduler's output. Prints one JSON object, microseconds.

    vllm_scheduler.py MODEL DECODES STEPS
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

from tightrank_adapter import rank
from tightrank_adapter.vllm import ranks, steps
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS, BLOCK, LONG_STEPS = 4096, 128, 15
PROMPT = 16 * 1024


def make_schedulers(model: str, decodes: int) -> tuple[Any, Any]:
    """vLLM's own scheduler, and the subclass that our hook makes of it. Both give a long prompt 1024 tokens a step."""
    config = EngineArgs(model=model, max_model_len=32768, max_num_batched_tokens=1024 + decodes, max_num_seqs=512,
                        enable_prefix_caching=False).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    import torch
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    steered = config.scheduler_config.get_scheduler_cls()
    assert steered is not Scheduler and issubclass(steered, Scheduler)

    def make(cls: Any) -> Any:
        kv = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        return cls(vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
                   block_size=BLOCK, hash_block_size=BLOCK)

    return make(Scheduler), make(steered)


def add(scheduler: Any, name: str, prompt: int) -> None:
    scheduler.add_request(Request(name, [1] * prompt, SamplingParams(max_tokens=30000, ignore_eos=True), None))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - started) / 1000, result


def advance(scheduler: Any, output: Any) -> None:
    """What a worker would answer: a token for each request whose prompt is done."""
    names = list(output.num_scheduled_tokens)
    done = [scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens for name in names]
    scheduler.update_from_output(output, ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[7] if each else [] for each in done], pooler_output=[]))


def run(pair: tuple[Any, Any], count: int, prefill: bool) -> tuple[list[float], list[float], Any]:
    """Microseconds of schedule(), ours minus theirs and theirs, for `count` steps of one load; and the last output."""
    added, bare, output = [], [], None
    for number in range(count):
        if prefill and number % LONG_STEPS == 0:  # the long prompt never ends: it starts anew
            for each in pair:
                each.finish_requests(["long"], RequestStatus.FINISHED_ABORTED)
                add(each, "long", PROMPT)
        first = number % 2
        taken: dict[int, tuple[float, Any]] = {}
        for which in (first, 1 - first):
            taken[which] = timed(pair[which].schedule)
        assert taken[0][1].num_scheduled_tokens == taken[1][1].num_scheduled_tokens
        for which in (0, 1):
            advance(pair[which], taken[which][1])
        bare.append(taken[0][0])
        added.append(taken[1][0] - taken[0][0])
        output = taken[1][1]
    return added, bare, output


def wrapped_cost(function: Callable[[Any], None], wrapped: Callable[[Any], None], argument: Any, count: int) -> float:
    """Median microseconds of wrapped(argument) less those of function(argument)."""
    return median(timed(lambda: wrapped(argument))[0] for _ in range(count)) - median(
        timed(lambda: function(argument))[0] for _ in range(count))


def worker_cost(output: Any, count: int) -> float:
    """One execute_model of a worker: heartbeat, and for a prefill step the record with its peak of memory."""
    class Worker:
        def init_device(self) -> None:
            """The hook wraps it; nothing here calls it."""

        def execute_model(self, scheduler_output: Any) -> None:
            return None
    bare = Worker.execute_model
    steps.install(SimpleNamespace(Worker=Worker))
    worker = Worker()
    return wrapped_cost(lambda each: bare(worker, each), lambda each: worker.execute_model(each), output, count)


def core_cost(scheduler: Any, count: int) -> float:
    """The two heartbeats around one step of the engine core's loop."""
    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = scheduler

    class EngineCoreProc(EngineCore):
        def _process_engine_step(self) -> None:
            return None
    bare = EngineCoreProc._process_engine_step
    ranks.core(SimpleNamespace(EngineCore=EngineCore, EngineCoreProc=EngineCoreProc))
    core = object.__new__(EngineCoreProc)
    core.scheduler = scheduler
    return wrapped_cost(bare, lambda each: each._process_engine_step(), core, count)


def main(model: str, decodes: int, count: int) -> None:
    pair = make_schedulers(model, decodes)
    rank.hello("engine-core")
    for each in pair:
        for number in range(decodes):
            add(each, f"decode-{number}", 8)
    run(pair, 50, prefill=False)
    added_decode, bare_decode, decode_output = run(pair, count, prefill=False)
    added_mixed, bare_mixed, mixed_output = run(pair, count, prefill=True)
    print(json.dumps({
        "decode_rows": decodes, "steps": count,
        "schedule_decode_us": median(bare_decode), "added_decode_us": median(added_decode),
        "schedule_prefill_us": median(bare_mixed), "added_prefill_us": median(added_mixed),
        "core_beats_us": core_cost(pair[1], count),
        "worker_decode_us": worker_cost(decode_output, count), "worker_prefill_us": worker_cost(mixed_output, count),
    }))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
