"""Hook `ranks` for SGLang >= 0.5.20: hellos of its processes, the heartbeat of the scheduler's loop, prefill steps."""
import inspect
import sys
from importlib import import_module
from typing import Any, Callable, Dict, Optional, Tuple

from .. import fault, pool, rank, wire
from . import steps

HOOK, _GIB = "ranks", 1 << 30
_VERIFIED = ("process_input_requests", "run_batch", "process_batch_result")


def _version() -> str:
    return str(getattr(sys.modules["sglang"], "__version__", "unknown"))


def _hello_at(owner: Any, name: str, role: str) -> None:
    def before(*args: Any, **kwargs: Any) -> None:
        if not rank.said_hello():
            rank.hello(role, engine_version=_version())

    fault.wrap(owner, name, HOOK, before=before)


def main(module: Any) -> None:
    """Gets sglang.srt.entrypoints.engine, whose process sets its environment before it spawns the others."""
    _hello_at(module, "_set_envs_and_config", "main")


def detokenizer(module: Any) -> None:
    """Gets sglang.srt.managers.detokenizer_manager."""
    _hello_at(fault.require(module, "DetokenizerManager"), "__init__", "detokenizer")


def controller(module: Any) -> None:
    """Gets sglang.srt.managers.data_parallel_controller, of which there is a process with dp > 1."""
    _hello_at(fault.require(module, "DataParallelController"), "__init__", "controller")


def scheduler(module: Any) -> None:
    """Gets sglang.srt.managers.scheduler. Raises fault.Missing for a release without what is hooked."""
    owner = fault.require(module, "Scheduler")
    signature = inspect.signature(owner.__init__)
    fault.wrap(owner, "__init__", HOOK, before=_hello(signature), after=_begin)
    fault.wrap(owner, "process_input_requests", HOOK, after=_beat)
    steps.install(owner)


def _hello(signature: inspect.Signature) -> Callable[..., None]:
    def before(*args: Any, **kwargs: Any) -> None:
        tp, pp, dp, number = _place(signature.bind(*args, **kwargs).arguments)
        rank.hello("scheduler", number, tp, pp, dp, engine_version=_version())

    return before


def _place(given: Dict[str, Any]) -> Tuple[int, int, Optional[int], int]:
    """This scheduler's tp, pp and dp rank and its number.

    The ranks are arguments of its constructor up to 0.5.20; from 0.5.21 on the process's own context has them.
    """
    names = ("tp_rank", "pp_rank", "dp_rank")
    if "tp_rank" in given:
        tp, pp, dp = (given[name] for name in names)
    else:
        parallel = import_module("sglang.srt.runtime_context").get_parallel()
        tp, pp, dp = (getattr(parallel, name) for name in names)
    args = given["server_args"]
    replica = 0 if args.enable_dp_attention else dp or 0  # with DP attention, tp_rank counts all of them
    return tp, pp, dp, (replica * args.pp_size + pp) * args.tp_size + tp


def _begin(token: None, result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    fault.contained(HOOK, "Scheduler.__init__", _verify)(self)


def _verify(self: Any) -> None:
    for name in _VERIFIED:
        if not fault.is_wrapped(fault.require(type(self), name), HOOK):
            raise fault.Missing("%s.%s" % (type(self).__qualname__, name), "an override without the hook")
    rank.locate(self.tp_worker.model_runner.gpu_id)
    rank.fact("kv_tokens", int(self.max_total_num_tokens))
    rank.weights(getattr(self.tp_worker.model_runner, "weight_load_mem_usage", None), _GIB)
    if rank.watches_memory():
        pool.watch(getattr(self.tp_worker.model_runner, "token_to_kv_pool", None))
    rank.hook(HOOK, wire.IN_FORCE)


def _beat(token: None, result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    rank.beat(len(self.waiting_queue) + len(self.running_batch.reqs) + _prefilling(self))


def _prefilling(self: Any) -> int:
    """Requests whose prefill is not yet merged into the running batch; the unfinished one is among its batch's."""
    last = self.last_batch
    if last is not None and last.forward_mode.is_extend():
        return len(last.reqs)
    return int(self.chunked_req is not None)
