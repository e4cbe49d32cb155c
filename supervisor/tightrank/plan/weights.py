"""What each rank holds of a model's weights: which tensors are divided among ranks, which each of them keeps whole. Pure.

Read from vLLM 0.32 (model_executor/layers/linear.py, vocab_parallel_embedding.py, distributed/utils.py) and SGLang 0.5.23 (the
same files under srt/): both keep norms, routers and MLA's way down whole and divide the rest by `tensor_parallel`.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightrank.config.flags import value
from tightrank.engines.base import sections
from tightrank.plan.safetensors import Tensor
from tightrank.plan.shape import ModelShape
from tightrank.records import WorkerSpec

VOCABULARY_STEP = 64                 # rows are padded to a multiple of it (DEFAULT_VOCAB_PADDING_SIZE of both engines)
# Each rank keeps all of it: routers, MLA's way down, indexers, embeddings of positions.
_REPLICATED = re.compile(r"\.(gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|wq_a|wkv|wpe|"
                         r"embed_positions|indexer[.\w]*)\.weight$")
# Of one dimension and divided all the same: biases of what is divided by its outputs, and one number for each head.
_DIVIDED = re.compile(r"((q|k|v|qkv|gate|up|gate_up|in|dt)_proj|query_key_value|c_attn|c_fc|fc1|conv1d)\.bias$|"
                      r"\.(A_log|D|dt_bias|sinks)$")
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte|embed_in|lm_head|embed_out|embed|head)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|head)\.weight$")
_KEYS = re.compile(r"\.(k|v)_proj\.(weight|bias|weight_scale\w*)$")
_QUERIES = re.compile(r"\.(q|o)_proj\.weight$")
_FUSED = re.compile(r"\.(qkv_proj|query_key_value|W_pack|c_attn|Wqkv)\.(weight|bias)$")
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_OTHER_MODALITY = re.compile(r"(^|\.)(visual|vision\w*|image\w*|audio\w*|multi_modal\w*|mm_\w+)\.")
_LAST = re.compile(r"(^|\.)(norm|final_layernorm|ln_f|norm_f)\.(weight|bias)$")
# SGLang's Llama makes the output embedding on every pipeline stage, though only the last one fills it (models/llama.py).
_HEAD_EVERYWHERE = ("LlamaForCausalLM", "MistralForCausalLM")
_FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_ASKED_BITS = {"float32": 32, "float": 32, "half": 16, "float16": 16, "bfloat16": 16}
# Quantizations that an engine makes itself from 16-bit weights; of the others 4 bits are the least.
_ONLINE_BITS = {"fp8": 8, "w8a8_fp8": 8, "mxfp8": 8, "w8a8_int8": 8}
_LEAST_BITS = 4


@dataclass(frozen=True, slots=True)
class Split:
    """How a worker's ranks share the weights. `dtype`: as asked for; `quantization`: its method, "" for none, and whether
    the files hold it already."""
    engine: str
    tensor_parallel: int
    pipeline_parallel: int
    dtype: str
    quantization: str
    in_files: bool
    pads_heads: bool = False           # SGLang on a CPU, where the ranks do not divide the heads (configs/update_config.py)


def split(spec: WorkerSpec, model: Mapping[str, Any], cpu: bool = False) -> Split:
    """Of a worker and its model's config.json."""
    in_files = bool(model.get("quantization_config") or sections(model).get("quantization_config"))
    return Split(spec.engine, spec.tensor_parallel, spec.pipeline_parallel, value(spec.argv, "--dtype") or "auto",
                 quantization(spec, model), in_files, cpu and spec.engine == "sglang")


def quantization(spec: WorkerSpec, model: Mapping[str, Any]) -> str:
    """The method asked for, or that config.json names; "" for none."""
    config = model.get("quantization_config") or sections(model).get("quantization_config")
    named = config.get("quant_method") if isinstance(config, Mapping) else None
    return str(value(spec.argv, "--quantization", "-q") or named or "")


def stages(engine: str, count: int, size: int) -> list[int]:
    """Layers of each pipeline stage. vLLM gives what is left over to the middle, never to the last; SGLang to the last ones.

    Source: get_pp_indices of both (distributed/utils.py).
    """
    sizes = [count // size] * size
    rest = count % size
    for index in range(rest):
        sizes[-(index + 2) if engine != "sglang" else -(index + 1)] += 1
    return sizes


def rank_bytes(tensors: Sequence[Tensor], shape: ModelShape, how: Split) -> tuple[int, ...]:
    """Bytes of the weights on each rank of each pipeline stage; the ranks of a stage hold alike."""
    count = shape.num_hidden_layers or 10**9
    ends = _ends(how, shape.num_hidden_layers or 0)
    totals = [0.0] * how.pipeline_parallel
    for tensor in tensors:
        layer = _layer(tensor.name)
        if tensor.name.startswith("mtp.") or (layer is not None and layer >= count):
            continue                                   # heads for speculation, which are loaded only when asked for
        share = tensor.size_bytes * _growth(tensor, how) * _fraction(tensor, shape, how)
        for stage in _places(tensor.name, layer, shape, ends, how.engine):
            totals[stage] += share
    return tuple(int(total) for total in totals)


def _ends(how: Split, count: int) -> list[int]:
    """The first layer after each stage."""
    sizes = stages(how.engine, count, how.pipeline_parallel)
    return [sum(sizes[:index + 1]) for index in range(len(sizes))]


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found is not None and not _OTHER_MODALITY.search(name) else None


def _places(name: str, layer: int | None, shape: ModelShape, ends: Sequence[int], engine: str) -> tuple[int, ...]:
    """The stages that hold a tensor."""
    last = len(ends) - 1
    if layer is not None:
        return (next((stage for stage, end in enumerate(ends) if layer < end), last),)
    if _HEAD.search(name):
        everywhere = engine == "sglang" and shape.architecture in _HEAD_EVERYWHERE
        return () if shape.tied_embeddings else tuple(range(len(ends))) if everywhere else (last,)
    if _LAST.search(name):
        return (last,)
    return (0, last) if last and shape.tied_embeddings and _VOCABULARY.search(name) else (0,)


def _fraction(tensor: Tensor, shape: ModelShape, how: Split) -> float:
    """The part of a tensor that one rank keeps, padding included."""
    size = how.tensor_parallel
    if _VOCABULARY.search(tensor.name) and len(tensor.shape) == 2:
        rows = tensor.shape[0]
        return -(-rows // VOCABULARY_STEP) * VOCABULARY_STEP / rows / size if rows else 1.0
    if _REPLICATED.search(tensor.name) or (len(tensor.shape) <= 1 and not _DIVIDED.search(tensor.name)):
        return 1.0
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if how.pads_heads and kv_heads and kv_heads % size and _QUERIES.search(tensor.name):     # with the key heads, to multiples
        return -(-kv_heads // size) / kv_heads
    if kv_heads and size > kv_heads and not shape.one_kv_vector:     # more ranks than key heads: several keep the same one
        if _KEYS.search(tensor.name):
            return 1 / kv_heads
        if heads and _FUSED.search(tensor.name):
            return (heads / size + 2) / (heads + 2 * kv_heads)
    return 1 / size


def _growth(tensor: Tensor, how: Split) -> float:
    """Bytes in memory for each in the file. `auto` takes float32 weights to 16 bits."""
    stored = _FLOAT_BITS.get(tensor.dtype)
    if stored is None:
        return 1.0
    if how.quantization:
        if how.in_files:
            return 1.0
        linear = len(tensor.shape) > 1 and not _VOCABULARY.search(tensor.name)
        bits = _ONLINE_BITS.get(how.quantization, _LEAST_BITS) if linear else 16
        return min(bits, stored) / stored
    return _ASKED_BITS.get(how.dtype, min(stored, 16)) / stored
