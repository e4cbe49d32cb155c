"""Hook `indexer` on ATOM: reads back in each runner that its indexer's scores are bounded as wanted.

ATOM has the bound itself since 2026-07-07, on the query axis. The supervisor sets its variable; the models' modules read it
when they are imported, which is while a runner is made.
"""
import sys
from importlib import import_module
from typing import Any

from .. import fault, rank, wire
from . import ranks

HOOK = "indexer"
VARIABLE, _CONSTANT = "ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB", "SPARSE_INDEXER_LOGITS_BUDGET_MB"
_MODELS = ("atom.models.deepseek_v2", "atom.models.deepseek_v4")  # v2 holds V3.2 and GLM-5.2 too


def install(module: Any) -> None:
    """Gets atom.model_engine.model_runner."""
    fault.wrap(fault.require(module, "ModelRunner"), "__init__", HOOK, after=_made)


def _made(token: None, result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    fault.contained(HOOK, VARIABLE, _verify, runner)(import_module("atom.utils.envs"))


def _verify(runner: Any, envs: Any) -> None:
    """Raises fault.Missing for a release without the variable, a model without an indexer, or where another value counts."""
    wanted = rank.settings().hooks[HOOK]["budget_bytes"]
    if VARIABLE not in envs.environment_variables:
        raise fault.Missing(VARIABLE, "no such variable in %s" % ranks.release())
    if not _has_indexer(runner):
        raise fault.Missing("a model with an indexer, which reads %s" % VARIABLE, "a configuration without index_topk")
    found = {"atom.utils.envs": getattr(envs, VARIABLE) << 20}
    found.update((name, getattr(sys.modules[name], _CONSTANT) << 20) for name in _MODELS if name in sys.modules)
    rank.fact(HOOK, {VARIABLE: max(found.values())})
    wrong = [name for name, size in found.items() if size != wanted]
    if rank.settings().observes(HOOK):
        rank.fact("indexer_wanted", {VARIABLE: wanted})
    elif wrong:
        raise fault.Missing("%s %d bytes" % (VARIABLE, wanted), "%d in %s" % (found[wrong[0]], wrong[0]))
    rank.hook(HOOK, wire.IN_FORCE)


def _has_indexer(runner: Any) -> bool:
    """V4 has one whatever its configuration says (atom/models/deepseek_v4.py gives index_topk a default)."""
    models = (runner.config.hf_config, runner.hf_text_config)
    return _MODELS[1] in sys.modules or any(hasattr(model, "index_topk") for model in models)
