"""Hook `headroom` on SGLang >= 0.5.16: the byte budget that the KV pools are cut from is bounded on every rank alike.

`KVCacheConfigurator._profile_available_bytes` is called once on every rank of the world (TP x PP), in lockstep: the
engine's own answer comes from a collective already. Its answer is the same on all ranks, so ours must be too.
"""
import os
from importlib import import_module
from typing import Any, Sequence

from .. import fault, rank, sizing

_RESIZE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


def install(module: Any) -> None:
    """Gets sglang.srt.mem_cache.kv_cache_configurator. Raises fault.Missing for a release without what is hooked."""
    owner = fault.require(module, "KVCacheConfigurator")
    if os.environ.get(_RESIZE, "").lower() in ("1", "true", "yes", "y", "t", "on"):
        raise fault.Missing(_RESIZE + " off: it sizes the KV pool a second time, after the headroom", "it is on")
    sizing.surround(owner, "_profile_available_bytes", lambda configurator: rank.number() or 0, lambda configurator: _gather)


def _gather(row: sizing.Row) -> Sequence[sizing.Row]:
    """`row` of every rank of the world, over the CPU group that the engine made for such things."""
    torch = import_module("torch")
    group = _world().cpu_group
    size = torch.distributed.get_world_size(group)
    rows = [torch.zeros(len(row), dtype=torch.int64) for _ in range(size)]
    torch.distributed.all_gather(rows, torch.tensor(row, dtype=torch.int64), group=group)
    return [each.tolist() for each in rows]


def _world() -> Any:
    """The group of all ranks: of the process's context from 0.5.21 on, before that of a function."""
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    found = getattr(parallel, "world_group", None)
    return found if found is not None else import_module("sglang.srt.distributed").get_world_group()
