"""Hook `indexer` for vLLM >= 0.28: the bytes of an indexer's logits at a time, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.

The supervisor starts vLLM with that variable. vLLM reads it at call time through vllm.envs, which keeps all its variables
once a worker is complete, so here it is set where it is missing, before a worker is made, and read back when the worker's
model is loaded: before its first use, the run that measures the memory of a step.

The variable bounds one call's [rows, keys] logits by splitting rows. A metadata builder that does not split by it, as that
of DeepSeek-V4 on the CPU (models/deepseek_v4/cpu/cpu_mla.py), is told by a trial and refused.
"""
import os
import sys
from importlib import import_module
from typing import Any

from .. import fault, rank, wire
from .. import indexer as arithmetic
from . import ranks

HOOK, NAME = "indexer", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
SPLIT = "_split_indexer_prefill_chunks"
_ROWS, _KEYS, _TRIAL_BYTES = 4096, 1 << 16, 1 << 20  # four rows of fp32 at a time


def _wanted_mib() -> int:
    return int(rank.settings().hooks[HOOK]["budget_bytes"]) >> 20


def worker(module: Any) -> None:
    """Gets vllm.v1.worker.worker_base. Raises fault.Missing for a release without the variable."""
    fault.wrap(fault.require(module, "WorkerWrapperBase", ranks.release()), "init_worker", HOOK,
               before=lambda *args, **kwargs: _set(), after=_made)


def _set() -> None:
    if not rank.settings().observes(HOOK):
        os.environ.setdefault(NAME, str(_wanted_mib()))


def _made(token: None, result: None, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """The worker's class is known and its model not yet loaded."""
    owner = type(wrapper.worker)
    if not fault.is_wrapped(getattr(owner, "load_model", None), HOOK):
        fault.contained(HOOK, "Worker.load_model", _watch)(owner)


def _watch(owner: Any) -> None:
    finish = fault.contained(HOOK, "Worker.load_model", fault.drilled("indexer.finish", _finish))
    fault.wrap(owner, "load_model", HOOK, after=lambda token, result, self, *args, **kwargs: finish(self))


def _finish(worker: Any) -> None:
    found = budget_mib()
    if found != _wanted_mib() and not rank.settings().observes(HOOK):
        raise fault.Missing("%s=%d" % (NAME, _wanted_mib()), "%d in vllm.envs" % found)
    model = fault.require(worker, "get_model")()
    if not arithmetic.has_indexer(model):
        raise fault.Missing("a model with an indexer, which reads %s" % NAME, "%s has none" % type(model).__name__)
    _try_builders(model)
    rank.fact(HOOK, {NAME: found << 20})
    if rank.settings().observes(HOOK):
        rank.fact("indexer_wanted", {NAME: _wanted_mib() << 20})
    rank.hook(HOOK, wire.IN_FORCE)


def _try_builders(model: Any) -> None:
    """Raises fault.Missing for a builder of the model's whose pieces do not keep a bound. <= 0.29 splits without one."""
    for name, layer in model.named_modules():
        if "indexer" in (name + type(layer).__name__).lower() and hasattr(layer, "get_attn_backend"):
            builder = layer.get_attn_backend().get_builder_cls()
            if hasattr(builder, SPLIT) and _largest_rows(getattr(builder, SPLIT)) * _KEYS * 4 > _TRIAL_BYTES:
                raise fault.Missing("an indexer that splits its rows by %s" % NAME,
                                    "%s, which takes them all at once" % builder.__name__)


def _largest_rows(split: Any) -> int:
    torch = import_module("torch")
    pieces = split(torch.tensor([_KEYS]), torch.tensor([_ROWS]), _ROWS * _KEYS, _TRIAL_BYTES)
    return max(int(rows.stop - rows.start) for _, rows in pieces)


def budget_mib() -> int:
    """The variable as vLLM reads it, MiB. Raises fault.Missing for a release that does not know it."""
    envs = sys.modules.get("vllm.envs") or import_module("vllm.envs")
    if NAME not in fault.require(envs, "environment_variables", ranks.release()):
        raise fault.Missing(NAME, "no such variable in vllm.envs of %s" % ranks.release())
    return int(getattr(envs, NAME))
