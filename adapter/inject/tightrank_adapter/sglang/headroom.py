"""Hook `headroom` on SGLang >= 0.5.20: the byte budget that the KV pools are cut from is bounded on every rank alike.

`KVCacheConfigurator._profile_available_bytes` is called once on every rank of the world (TP x PP), in lockstep: the
engine's own answer comes from a collective already. Its answer is the same on all ranks, so ours must be too.
"""
from importlib import import_module
from typing import Any, Sequence

from .. import fault, rank, sizing

_STATES = "_tightrank_states_bytes"  # on the configurator: what it sets aside for the states of hybrid models


def install(module: Any) -> None:
    """Gets sglang.srt.mem_cache.kv_cache_configurator. Raises fault.Missing for a release without what is hooked."""
    owner = fault.require(module, "KVCacheConfigurator")
    sizing.surround(owner, "_profile_available_bytes", lambda configurator: rank.number() or 0, lambda configurator: _gather,
                    lambda configurator: getattr(configurator, _STATES, 0), _refusal)
    if hasattr(owner, "_handle_max_mamba_cache"):
        fault.wrap(owner, "_handle_max_mamba_cache", sizing.HOOK, after=_note_states)


def _note_states(token: None, left_gib: float, configurator: Any, total_gib: float) -> None:
    """The state cache of hybrid models is made after sizing, and off the engine's number."""
    setattr(configurator, _STATES, int((total_gib - left_gib) * 2**30))


def _refusal(configurator: Any) -> str:
    if getattr(configurator, "post_capture_kv_active", False):
        return "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, which sizes the KV pool a second time, without the headroom"
    return ""


def _gather(row: sizing.Row) -> Sequence[sizing.Row]:
    """`row` of every rank of the world, over the CPU group that the engine made for such things."""
    torch = import_module("torch")
    group = import_module("sglang.srt.runtime_context").get_parallel().world_group.cpu_group
    size = torch.distributed.get_world_size(group)
    rows = [torch.zeros(len(row), dtype=torch.int64, device="cpu") for _ in range(size)]
    torch.distributed.all_gather(rows, torch.tensor(row, dtype=torch.int64, device="cpu"), group=group)
    return [each.tolist() for each in rows]
