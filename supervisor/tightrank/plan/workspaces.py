"""What an engine needs after it has sized its KV cache, so that `headroom.reserve: derived` can leave it free. Pure.

vLLM makes the attention backends' workspaces after it has measured a step. Of those, the one that can be large is FP8 MLA
prefill on ROCm, which the hook `heads` is for; its arithmetic and sources are tightrank_adapter/heads.py.
"""
from __future__ import annotations

from collections.abc import Mapping

from tightrank.adapter import heads
from tightrank.config import Config
from tightrank.config.flags import FLAGS, value
from tightrank.engines.base import Engine, number, sections
from tightrank.inputs import Inputs
from tightrank.plan.line import Chosen

COMPUTE_UNITS = 256        # of an MI355X (gfx950), the device that has these kernels
MOST_REQUESTS = 1024       # vLLM 0.33's default of --max-num-seqs for a server on a large device (engine/arg_utils.py)
BLOCK_TOKENS = 16
_DIMENSIONS = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def reserved(config: Config, index: int, engine: Engine, inputs: Inputs, chosen: Chosen | None) -> Mapping[str, int]:
    """Name -> bytes on each rank; `chosen`: the line where it is kept. Raises ConfigError where `heads` cannot be in force."""
    if "heads" not in config.hooks or engine.name != "vllm":
        return {}
    worker, path = config.workers[index], f"workers[{index}]"
    shape = _shape(config, inputs, worker.tensor_parallel)
    if not (value(worker.args, "--kv-cache-dtype") or "").startswith("fp8"):
        raise config.error(f"{path}.args", "the hook heads is for an FP8 KV cache; add --kv-cache-dtype fp8, or take heads "
                           "out of hooks", "hook-unavailable")
    if chosen is None:             # only `derived` asks for the bytes, and that needs the line
        return {}
    requests = _given(config, index, "requests", MOST_REQUESTS)
    return sizes(shape, chosen.spec.maximum, chosen.context, requests, _given(config, index, "page", BLOCK_TOKENS))


def _given(config: Config, index: int, flag: str, default: int) -> int:
    found = number("vllm", config.workers[index].args, flag)
    if found is not None and found < 1:
        raise config.error(f"workers[{index}].args", f"{FLAGS['vllm'][flag][0]} {found}: must be at least 1 where the hook "
                           "heads plans its workspace; give the number")
    return default if found is None else found


def _shape(config: Config, inputs: Inputs, tensor_parallel: int) -> heads.Shape:
    text = sections(inputs.model)
    whole = [size for name in _DIMENSIONS if isinstance(size := text.get(name), int) and size > 0]
    if len(whole) < len(_DIMENSIONS):
        missing = ", ".join(name for name in _DIMENSIONS if not isinstance(text.get(name), int) or text[name] < 1)
        raise config.error("hooks", f"heads is for MLA models, and {config.model}/config.json has no {missing}; take it out of "
                           "hooks", "hook-unavailable")
    return heads.Shape(-(-whole[0] // tensor_parallel), *whole[1:])


def sizes(shape: heads.Shape, tokens: int, context: int, requests: int, block: int) -> Mapping[str, int]:
    """Name -> bytes, for chunks of `tokens` and prompts of `context`.

    The release is not known here, so the larger of its two ways to count tiles.
    """
    wide = heads.width(shape.heads)
    queries = min(context, tokens)
    tiles = max(heads.tiles_by_heads(wide, COMPUTE_UNITS, requests, queries),
                heads.tiles_by_tokens(tokens, requests, COMPUTE_UNITS))
    workspace = heads.workspace_bytes(shape.heads, tiles, tokens, shape.value_dim)
    chunk = heads.context_chunk_tokens(context, requests, block)
    beside = heads.fallback_bytes(shape, tokens, max(context - tokens, 0), chunk) - heads.profiled_bytes(shape, chunk)
    return {"FP8 MLA workspace": workspace + heads.metadata_bytes(wide, COMPUTE_UNITS, requests, queries),
            "bf16 MLA prefill": max(beside, 0)}
