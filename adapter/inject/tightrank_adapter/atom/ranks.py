"""Hook `ranks` on ATOM >= 0.1.2: hellos of its server, engine cores and runners, the heartbeat of a core's loop.

Read in its sources and run on stand-ins only. An engine core (one for each pipeline stage) starts the runners of its stage,
one process for each rank; all are spawned, so sitecustomize brings us into each.
"""
from typing import Any, Optional

from .. import fault, rank, wire
from . import steps

HOOK = "ranks"


def main(module: Any) -> None:
    """Gets atom.model_engine.engine_core_mgr: what the server starts the engine cores with."""
    fault.wrap(fault.require(module, "CoreManager", release()), "__init__", HOOK, before=_server_starts)


def core(module: Any) -> None:
    """Gets atom.model_engine.engine_core. Every loop of a core, a pipeline stage's too, turns with its input queue."""
    owner = fault.require(module, "EngineCore", release())
    fault.wrap(owner, "__init__", HOOK, before=_core_starts, after=_core_started)
    fault.wrap(owner, "pull_and_process_input_queue", HOOK, before=_beat)


def runner(module: Any) -> None:
    """Gets atom.model_engine.model_runner."""
    owner = fault.require(module, "ModelRunner", release())
    fault.wrap(owner, "__init__", HOOK, before=_runner_starts, after=_runner_started)
    steps.install(owner)


def release() -> str:
    """The release as it was installed; ATOM itself does not say it."""
    return "ATOM " + (_version() or "of unknown release")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version
    try:
        return version("atom")
    except PackageNotFoundError:  # run from its sources
        return ""


def _server_starts(*args: Any, **kwargs: Any) -> None:
    rank.hello("main", engine_version=_version())


def _core_starts(core: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    rank.hello("engine-core", pp_rank=_stage(config), engine_version=_version())


def _core_started(token: None, result: None, core: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    blocks = getattr(config, "num_kvcache_blocks", None)
    if blocks:
        rank.fact("kv_tokens", int(blocks) * int(config.kv_cache_block_size))
    rank.fact("context_tokens", int(config.max_model_len))
    _in_force(type(core), "pull_and_process_input_queue")


def _beat(core: Any) -> None:
    held = getattr(core, "scheduler", None)
    rank.beat(len(held.waiting) + len(held.running) if held is not None else None)


def _runner_starts(runner: Any, number: int, config: Any) -> None:
    """`number` counts within a pipeline stage."""
    stage = _stage(config)
    rank.hello("runner", rank=stage * config.tensor_parallel_size + number, tp_rank=number, pp_rank=stage,
               engine_version=_version())


def _runner_started(token: None, result: None, runner: Any, number: int, config: Any) -> None:
    if runner.device.type == "cuda":
        rank.locate(runner.device.index)
    _in_force(type(runner), "forward")


def _stage(config: Any) -> int:
    """0 up to v0.1.6-rc0, which has no pipeline stages."""
    found: Optional[int] = getattr(config.parallel_config, "pipeline_parallel_rank", 0)
    return found or 0


def _in_force(owner: Any, name: str) -> None:
    """In force is what the engine will look up, not what we put somewhere."""
    if fault.is_wrapped(getattr(owner, name, None), HOOK):
        rank.hook(HOOK, wire.IN_FORCE)
    else:
        rank.hook(HOOK, wire.FAILED, "%s.%s" % (owner.__qualname__, name), "another function in %s" % release())
