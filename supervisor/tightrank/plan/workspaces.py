"""What an engine needs after it has sized its KV cache, so that `headroom.reserve: derived` can leave it free. Pure.

vLLM makes the attention backends' workspaces after it has measured a step. Of those, the one that can be large is FP8 MLA
prefill on ROCm, which the hook `heads` is for; its arithmetic and sources are tightrank_adapter/heads.py.
"""
from __future__ import annotations

from collections.abc import Mapping

from tightrank.adapter import heads
from tightrank.config import Config
from tightrank.config.flags import value
from tightrank.engines.base import Engine, number, sections
from tightrank.inputs import Inputs
from tightrank.plan.line import Chosen

COMPUTE_UNITS = 256        # of an MI355X (gfx950), the device that has these kernels
MOST_REQUESTS = 1024       # vLLM 0.33's default of --max-num-seqs for a server on a large device (engine/arg_utils.py)
BLOCK_TOKENS = 16
_DIMENSIONS = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def reserved(config: Config, index: int, engine: Engine, inputs: Inputs, chosen: Chosen | None) -> Mapping[str, int]:
    """Name -> bytes on each rank. Raises ConfigError where `heads` is asked for and cannot be in force."""
    if "heads" not in config.hooks or engine.name != "vllm":
        return {}
    worker, path = config.workers[index], f"workers[{index}]"
    shape = _shape(config, inputs, worker.tensor_parallel)
    if not (value(worker.args, "--kv-cache-dtype") or "").startswith("fp8"):
        raise config.error(f"{path}.args", "the hook heads is for an FP8 KV cache; add --kv-cache-dtype fp8, or take heads "
                           "out of hooks", "hook-unavailable")
    tokens = chosen.spec.maximum if chosen else number("vllm", worker.args, "chunk") or 8192
    context = chosen.context if chosen else engine.own_context(inputs.model)
    requests = number("vllm", worker.args, "requests") or MOST_REQUESTS
    return _bytes(shape, tokens, context, requests, number("vllm", worker.args, "page") or BLOCK_TOKENS)


def _shape(config: Config, inputs: Inputs, tensor_parallel: int) -> heads.Shape:
    text = sections(inputs.model)
    found = [text.get(name) for name in _DIMENSIONS]
    whole = [size for size in found if isinstance(size, int) and size > 0]
    if len(whole) < len(found):
        missing = ", ".join(name for name, size in zip(_DIMENSIONS, found, strict=True) if size not in whole)
        raise config.error("hooks", f"heads is for MLA models, and {config.model}/config.json has no {missing}; take it out of "
                           "hooks", "hook-unavailable")
    return heads.Shape(-(-whole[0] // tensor_parallel), *whole[1:])


def _bytes(shape: heads.Shape, tokens: int, context: int, requests: int, block: int) -> Mapping[str, int]:
    """The release is not known here, so the larger of its two ways to count tiles."""
    wide = heads.width(shape.heads)
    queries = min(context, tokens)
    tiles = max(heads.tiles_by_heads(wide, COMPUTE_UNITS, requests, queries),
                heads.tiles_by_tokens(tokens, requests, COMPUTE_UNITS))
    workspace = heads.workspace_bytes(shape.heads, tiles, tokens, shape.value_dim)
    chunk = heads.context_chunk_tokens(context, requests, block)
    beside = heads.fallback_bytes(shape, tokens, max(context - tokens, 0), chunk) - heads.profiled_bytes(shape, chunk)
    return {"FP8 MLA workspace": workspace + heads.metadata_bytes(wide, COMPUTE_UNITS, requests, queries),
            "bf16 MLA prefill": max(beside, 0)}
