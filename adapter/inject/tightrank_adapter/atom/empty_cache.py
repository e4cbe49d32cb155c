"""Hook `empty-cache` on ATOM: after `ModelRunner.forward` of a prefill batch (`../cache.py` says why there).

By then the runner has let go of the chunk's tensors: what it keeps for the next step (sampled tokens) is a few bytes a row.
"""
from typing import Any

from .. import cache, fault
from . import steps


def install(module: Any) -> None:
    """Gets atom.model_engine.model_runner. Raises fault.Missing."""
    owner = fault.require(module, "ModelRunner")
    if cache.begin():
        fault.wrap(owner, "forward", cache.HOOK, before=_is_prefill, after=_ended)


def _is_prefill(runner: Any, batch: Any) -> bool:
    return steps.is_prefill(batch)


def _ended(is_prefill: bool, result: Any, runner: Any, batch: Any) -> None:
    if is_prefill:
        cache.chunk_ended()
