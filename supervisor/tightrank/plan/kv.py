"""What a token, a window and a request take of the KV cache, in bytes on each rank. Pure.

A layer keeps of each token its keys and values (num_key_value_heads x 2 x head_dim elements, divided among the ranks until
each has one head), or one latent vector on every rank (MLA), or an entry for several tokens (DeepSeek-V4). A layer with a
window keeps so only the last of them, and a layer of linear attention a state of fixed size for each request.
Sources: vLLM 0.32 v1/kv_cache_interface.py, layers/attention/*.py, models/deepseek_v4/attention.py; SGLang 0.5.23
model_executor/pool_configurator.py (_compute_cell_size), mem_cache/kv_cache_configurator.py (calculate_mla_kv_cache_dim).
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tightrank.config.flags import value
from tightrank.plan.layers import FULL, STATE, WINDOW
from tightrank.plan.shape import ModelShape
from tightrank.records import WorkerSpec

_SCALE_BLOCK = 128                     # FP8 latents and index keys: a float32 scale for so many elements
_FLOAT_BYTES, _HALF_BYTES = 4, 2
_LOWEST_INDEXED = 4                    # DeepSeek-V4: layers of a higher ratio have no indexer


@dataclass(frozen=True, slots=True)
class Storage:
    """How KV is stored. `element_bytes`: with the scales of its blocks; `vector_bytes`: a scale for each token, head and side.

    `index`: the index keys of a sparse-attention indexer: fp8 | fp4 | 16 bit.
    """
    name: str
    element_bytes: float
    vector_bytes: int = 0
    index: str = "fp8"

    @property
    def is_fp8(self) -> bool:
        return self.element_bytes == 1 and not self.vector_bytes


_BY_NAME: Mapping[str, tuple[float, int]] = {
    "float32": (4, 0), "float": (4, 0), "float16": (2, 0), "half": (2, 0), "bfloat16": (2, 0), "bf16": (2, 0), "fp16": (2, 0),
    "fp8": (1, 0), "fp8_e4m3": (1, 0), "fp8_e5m2": (1, 0), "fp8_inc": (1, 0), "fp8_ds_mla": (1, 0),
    "mxfp8": (1 + 1 / 32, 0), "nvfp4": (1 / 2 + 1 / 16, 0), "fp4_e2m1": (1 / 2 + 1 / 16, 0),
    "int8_per_token_head": (1, 4), "fp8_per_token_head": (1, 4), "int4_per_token_head": (1 / 2, 4)}


def element_bytes(spec: WorkerSpec) -> int:
    """Of an activation, and of KV under `auto`: both engines take float32 models to 16 bits unless asked for float32."""
    return _FLOAT_BYTES if value(spec.argv, "--dtype") in ("float32", "float") else _HALF_BYTES


def storage(spec: WorkerSpec, shape: ModelShape) -> Storage | None:
    """As the worker's arguments want it; None: a form whose size is not known here."""
    asked = value(spec.argv, "--kv-cache-dtype") or "auto"
    if asked == "auto" and shape.layers.ratios is not None and spec.engine == "sglang":
        asked = "fp8_e4m3"             # arg_groups/overrides.py, _deepseek_v4_kv_cache_dtype
    if asked == "auto":
        return Storage("auto", element_bytes(spec))
    found = _BY_NAME.get(asked)
    return None if found is None else Storage(asked, *found)


def kv_heads(shape: ModelShape, tensor_parallel: int) -> int:
    """On each rank; with more ranks than heads several keep the same one (get_num_kv_heads of both engines)."""
    return max(1, (shape.num_key_value_heads or 0) // tensor_parallel)


def entry_bytes(shape: ModelShape, how: Storage, tensor_parallel: int) -> float | None:
    """What one layer keeps of one token (DeepSeek-V4: of one entry), without index keys; None: config.json does not say."""
    dim = shape.head_dim
    if shape.latent is not None:
        if how.is_fp8 and shape.indexer is not None:          # fp8_ds_mla: the rotary part stays 16 bit
            return _packed(shape.latent.rank, shape.latent.rope_dim)
        return shape.latent.elements * how.element_bytes + 2 * how.vector_bytes
    if dim is None or shape.num_key_value_heads is None:
        return None
    if shape.layers.ratios is not None:                       # 448 FP8 + 64 rotary of 16 bit + 8 of scales
        rope = 64
        return dim - rope + 2 * rope + 8 if how.is_fp8 else dim * how.element_bytes
    sides = (dim + (shape.value_head_dim or dim)) * how.element_bytes + 2 * how.vector_bytes
    return kv_heads(shape, tensor_parallel) * sides


def _packed(rank: int, rope_dim: int) -> int:
    """656 bytes for DeepSeek-V3.2: 512 in FP8, 4 scales in float32, 64 in 16 bit."""
    return rank + rank // _SCALE_BLOCK * _FLOAT_BYTES + rope_dim * _HALF_BYTES


def index_bytes(shape: ModelShape, how: Storage) -> float:
    """The index key of one token (or entry) in one layer with an indexer; 0 without one."""
    if shape.indexer is None:
        return 0.0
    dim = shape.indexer.head_dim
    return {"fp8": dim + dim // _SCALE_BLOCK * _FLOAT_BYTES, "fp4": dim / 2 + dim // 32, "16 bit": dim * _HALF_BYTES}[how.index]


def layer_bytes(shape: ModelShape, how: Storage, tensor_parallel: int, layer: int) -> float | None:
    """What one token adds in `layer` as long as it is kept; 0 in a layer with a state, or with no attention."""
    entry = entry_bytes(shape, how, tensor_parallel)
    if entry is None:
        return None if shape.layers.kinds[layer] in (FULL, WINDOW) else 0.0
    if shape.layers.ratios is not None:
        ratio = shape.layers.ratios[layer]
        indexed = index_bytes(shape, how) if ratio <= _LOWEST_INDEXED else 0
        return (entry + indexed) / ratio if ratio else 0.0
    return entry + index_bytes(shape, how) if shape.layers.kinds[layer] in (FULL, WINDOW) else 0.0


def token_bytes(shape: ModelShape, how: Storage, tensor_parallel: int, layers: Iterable[int] | None = None) -> float | None:
    """What a token takes for as long as its request lasts, in the layers of a rank (default: all); None: not known."""
    chosen = range(len(shape.layers.kinds)) if layers is None else layers
    found = {layer: layer_bytes(shape, how, tensor_parallel, layer) for layer in chosen}
    known = {layer: size for layer, size in found.items() if size is not None}
    if not shape.layers.kinds or len(known) < len(found):
        return None
    return sum(size for layer, size in known.items() if shape.layers.kinds[layer] != WINDOW)


def request_bytes(shape: ModelShape, how: Storage, tensor_parallel: int, tokens: int, state_size: int) -> float | None:
    """What a request of `tokens` takes in all layers: each token's, the windows, the states. `state_size`: bytes of a
    recurrent element. None: not known."""
    each = token_bytes(shape, how, tensor_parallel)
    entry = entry_bytes(shape, how, tensor_parallel)
    if each is None or entry is None:
        return None
    window = shape.layers.window_tokens or 0
    windows = len(shape.layers.kinds) if shape.layers.ratios is not None else shape.layers.kinds.count(WINDOW)
    states = shape.layers.kinds.count(STATE) * (state_bytes(shape, tensor_parallel, _HALF_BYTES, state_size) or 0)
    return each * tokens + windows * min(window, tokens) * entry + states


def state_bytes(shape: ModelShape, tensor_parallel: int, convolution_size: int, recurrent_size: int) -> int | None:
    """What one layer of linear attention keeps of one request on each rank; sizes are bytes of an element.

    None: there is no such layer, or config.json does not say what it keeps.
    """
    if shape.state is None:
        return None
    convolution = shape.state.convolution // tensor_parallel * convolution_size
    return convolution + shape.state.recurrent // tensor_parallel * (shape.state.recurrent_bytes or recurrent_size)
