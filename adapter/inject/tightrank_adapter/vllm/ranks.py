"""Hook `ranks` on vLLM: the hello of the server, of every engine core and worker, and the heartbeat of the core's loop.

The server is the process that starts the engine cores. A worker inside the engine core's own process (vLLM's `uni`
executor) says no hello of its own: the supervisor starts vLLM with the `mp` executor, one process per rank.
"""
import sys
from typing import Any

from .. import fault, rank, wire

HOOK = "ranks"


def main(module: Any) -> None:
    """Gets vllm.v1.engine.utils."""
    fault.wrap(fault.require(module, "CoreEngineProcManager"), "__init__", HOOK, before=_server_starts)


def core(module: Any) -> None:
    """Gets vllm.v1.engine.core."""
    fault.wrap(fault.require(module, "EngineCore"), "__init__", HOOK, before=_core_starts, after=_core_started)
    process = fault.require(module, "EngineCoreProc", release())
    fault.wrap(process, "_process_engine_step", HOOK, before=_beat, after=_beat_after)


def worker(module: Any) -> None:
    """Gets vllm.v1.worker.worker_base."""
    wrapper = fault.require(module, "WorkerWrapperBase", release())
    fault.wrap(wrapper, "init_worker", HOOK, before=_worker_starts, after=_worker_started)


def release() -> str:
    """The release as vLLM itself says it."""
    return "vLLM " + _version()


def _version() -> str:
    return str(getattr(sys.modules.get("vllm.version"), "__version__", ""))


def _server_starts(*args: Any, **kwargs: Any) -> None:
    rank.hello("main", engine_version=_version())


def _core_starts(core: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    rank.hello("engine-core", dp_rank=vllm_config.parallel_config.data_parallel_rank, engine_version=_version())


def _core_started(token: None, result: None, core: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    kv_tokens = getattr(vllm_config.cache_config, "kv_cache_size_tokens", None)  # what vLLM logs as its KV cache size
    if kv_tokens is not None:
        rank.fact("kv_tokens", int(kv_tokens))
    rank.fact("context_tokens", vllm_config.model_config.max_model_len)
    _in_force(type(core), "_process_engine_step")


def _beat(core: Any) -> None:
    """A scheduler that somebody paused has nothing to do, whatever it holds: its loop stands still until it is resumed."""
    rank.beat(sum(core.scheduler.get_request_counts()) if core.scheduler.has_requests() else 0)


def _beat_after(token: None, result: Any, core: Any) -> None:
    """After the last step nobody looks again until there is work; after any other the next one is about to say it."""
    if not core.scheduler.has_requests():
        rank.beat(0)


def _worker_starts(wrapper: Any, all_kwargs: Any) -> None:
    """`all_kwargs` are those of every worker of the node; ours are at `rpc_rank` (vLLM's own reading of it)."""
    if rank.said_hello():
        rank.fact("worker_in_this_process", True)
        return
    mine = all_kwargs[wrapper.rpc_rank]
    number, parallel = mine["rank"], mine["vllm_config"].parallel_config
    # vLLM lays ranks out as [data, pipeline, prefill context, tensor], the last one fastest; `rank` starts anew for
    # each data parallel replica.
    tensor = parallel.tensor_parallel_size
    inner = tensor * getattr(parallel, "prefill_context_parallel_size", 1)
    rank.hello("worker", rank=number, tp_rank=number % tensor, pp_rank=number // inner,
               dp_rank=parallel.data_parallel_rank, engine_version=_version())


def _worker_started(token: None, result: None, wrapper: Any, all_kwargs: Any) -> None:
    _in_force(type(wrapper.worker), "execute_model")


def _in_force(owner: Any, name: str) -> None:
    """In force is what the engine will look up, not what we put somewhere."""
    if fault.is_wrapped(getattr(owner, name, None), HOOK):
        rank.hook(HOOK, wire.IN_FORCE)
    else:
        rank.hook(HOOK, wire.FAILED, "%s.%s" % (owner.__qualname__, name), "another function in %s" % release())
