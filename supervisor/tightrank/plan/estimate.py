"""The weights of a model that is not there, from its config.json alone: the tensors that such a model has. Pure.

They carry the names that checkpoints give them, so that what divides real weights (weights.py) divides these too. Norms, biases
and vision towers are left out: under 0.1 % of a large language model, except the last.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.engines.base import sections
from tightrank.plan.layers import NONE, STATE, whole
from tightrank.plan.safetensors import Tensor
from tightrank.plan.shape import Latent, ModelShape

_UNGATED = ("gpt2", "opt", "gpt_neox", "gptj", "falcon", "bloom", "mpt", "starcoder2", "phi", "nemotron", "nemotron_h")
_OUTPUT_GATE = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")   # its q_proj makes a gate too
_FLOAT = 16.0                          # bits of a weight that is not quantized
_MXFP4 = 4.25                          # a scale of 8 bits for 32 weights


@dataclass(frozen=True, slots=True)
class _Case:
    shape: ModelShape
    text: Mapping[str, Any]
    hidden: int
    linear_bits: float
    expert_bits: float

    def matrix(self, name: str, *sizes: int, bits: float | None = None) -> Tensor:
        """[*sizes], quantized as linear layers are where `bits` is not given."""
        bits = self.linear_bits if bits is None else bits
        return Tensor(f"{name}.weight", "BF16" if bits == _FLOAT else "U8", sizes, int(math.prod(sizes) * bits / 8))

    def number(self, name: str, otherwise: int = 0) -> int:
        found = self.text.get(name)
        return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else otherwise


def tensors(shape: ModelShape, model: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """() where config.json does not say enough."""
    hidden, rows = shape.hidden_size, shape.vocab_size
    if not hidden or not rows or not shape.layers.kinds or not (shape.num_attention_heads or STATE in shape.layers.kinds):
        return ()
    text = sections(model)
    linear, experts = _bits(text, model.get("quantization_config") or text.get("quantization_config"))
    case = _Case(shape, text, hidden, linear, experts)
    found = [case.matrix("model.embed_tokens", rows, hidden, bits=_FLOAT)]
    if not shape.tied_embeddings:
        found.append(case.matrix("lm_head", rows, hidden, bits=_FLOAT))
    for index, kind in enumerate(shape.layers.kinds):
        found += _layer(case, f"model.layers.{index}", index, kind)
    return tuple(found)


def _bits(text: Mapping[str, Any], config: Any) -> tuple[float, float]:
    """(of a linear layer's weights, of the experts'), scales included."""
    if not isinstance(config, Mapping):
        return _FLOAT, _FLOAT
    method = str(config.get("quant_method") or "").lower().replace("_", "-")
    if method == "mxfp4":                             # gpt-oss: the experts alone
        return _FLOAT, _MXFP4
    bits = _group_bits(config, method)
    return bits, _MXFP4 if text.get("expert_dtype") == "fp4" else bits      # DeepSeek-V4


def _group_bits(config: Mapping[str, Any], method: str) -> float:
    if method in ("awq", "gptq", "auto-round"):       # a scale of 16 bits and a zero for each group
        bits = whole(config.get("bits")) or 4
        return bits + (16 + bits) / (whole(config.get("group_size")) or 128)
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        weights = [group["weights"] for group in groups.values() if isinstance(group, Mapping)
                   and isinstance(group.get("weights"), Mapping)] if isinstance(groups, Mapping) else []
        bits = min((whole(each.get("num_bits")) or 16 for each in weights), default=8)
        return bits + (16 / (whole(weights[0].get("group_size")) or 1024) if weights else 0)
    if "nvfp4" in (method + str(config.get("quant_algo"))).lower():
        return 4.5                                    # a scale of 8 bits for 16 weights
    if method == "bitsandbytes":
        return 4.5 if config.get("load_in_4bit") or config.get("_load_in_4bit") else 8.0
    return 8.0 if "fp8" in method or "int8" in method or method == "modelopt" else _FLOAT


def _layer(case: _Case, name: str, index: int, kind: str) -> Iterator[Tensor]:
    alone = isinstance(case.text.get("hybrid_override_pattern"), str)      # each layer is one thing (Nemotron-H)
    if kind == STATE:
        yield from _state(case, f"{name}.mixer")
    elif kind != NONE:
        yield from _attention(case, f"{name}.self_attn", index)
    if not alone or kind == NONE:
        yield from _mlp(case, f"{name}.mlp", index)


def _attention(case: _Case, name: str, index: int) -> Iterator[Tensor]:
    shape, hidden = case.shape, case.hidden
    heads, dim, kv_heads = shape.num_attention_heads, shape.head_dim, shape.num_key_value_heads
    if not heads or not dim or not kv_heads:
        return
    if shape.latent is not None:
        yield from _latent(case, name, shape.latent, heads)
        yield from _indexer(case, name)
    elif shape.layers.ratios is not None:
        yield from _compressed(case, name, shape.layers.ratios[index], heads, dim)
    else:
        values = shape.value_head_dim or dim
        gate = 2 if shape.model_type in _OUTPUT_GATE else 1
        yield case.matrix(f"{name}.q_proj", gate * heads * dim, hidden)
        yield case.matrix(f"{name}.k_proj", kv_heads * dim, hidden)
        yield case.matrix(f"{name}.v_proj", kv_heads * values, hidden)
        yield case.matrix(f"{name}.o_proj", hidden, heads * values)


def _latent(case: _Case, name: str, latent: Latent, heads: int) -> Iterator[Tensor]:
    queries = heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank:
        yield case.matrix(f"{name}.q_a_proj", latent.query_rank, case.hidden)
        yield case.matrix(f"{name}.q_b_proj", queries, latent.query_rank)
    else:
        yield case.matrix(f"{name}.q_proj", queries, case.hidden)
    yield case.matrix(f"{name}.kv_a_proj_with_mqa", latent.elements, case.hidden)
    yield case.matrix(f"{name}.kv_b_proj", heads * (latent.nope_dim + latent.value_dim), latent.rank)
    yield case.matrix(f"{name}.o_proj", case.hidden, heads * latent.value_dim)


def _indexer(case: _Case, name: str) -> Iterator[Tensor]:
    found = case.shape.indexer
    if found is not None:
        yield case.matrix(f"{name}.indexer.wq_b", found.num_heads * found.head_dim, case.number("q_lora_rank", case.hidden))
        yield case.matrix(f"{name}.indexer.wk", found.head_dim, case.hidden, bits=_FLOAT)
        yield case.matrix(f"{name}.indexer.weights_proj", found.num_heads, case.hidden, bits=_FLOAT)


def _compressed(case: _Case, name: str, ratio: int, heads: int, dim: int) -> Iterator[Tensor]:
    """DeepSeek-V4: one KV vector, grouped outputs, and for a ratio over 1 what makes one entry of several tokens."""
    rank, groups, out = case.number("q_lora_rank", case.hidden), case.number("o_groups", 1), case.number("o_lora_rank", dim)
    yield case.matrix(f"{name}.wq_a", rank, case.hidden)
    yield case.matrix(f"{name}.wq_b", heads * dim, rank)
    yield case.matrix(f"{name}.wkv", dim, case.hidden)
    yield case.matrix(f"{name}.wo_a", groups * out, heads * dim // groups)
    yield case.matrix(f"{name}.wo_b", case.hidden, groups * out)
    if ratio > 1:
        yield case.matrix(f"{name}.compressor.wkv", 2 * (2 if ratio == 4 else 1) * dim, case.hidden, bits=_FLOAT)
    if ratio == 4:
        yield from _indexer(case, name)


def _state(case: _Case, name: str) -> Iterator[Tensor]:
    """The projections into and out of what a layer keeps as a state."""
    text, hidden = case.text, case.hidden
    if key_heads := whole(text.get("linear_num_key_heads")):                                 # Qwen3-Next
        keys = key_heads * case.number("linear_key_head_dim")
        values = case.number("linear_num_value_heads") * case.number("linear_value_head_dim")
        yield case.matrix(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
        yield case.matrix(f"{name}.in_proj_ba", 2 * case.number("linear_num_value_heads"), hidden)
        yield case.matrix(f"{name}.out_proj", hidden, values)
    elif expand := whole(text.get("mamba_expand")) or whole(text.get("expand")):              # Mamba, Jamba, Bamba
        inner, size = expand * hidden, case.number("mamba_d_state") or case.number("state_size")
        rank = case.number("mamba_dt_rank") or -(-hidden // 16)
        yield case.matrix(f"{name}.in_proj", 2 * inner, hidden)
        yield case.matrix(f"{name}.x_proj", rank + 2 * size, inner)
        yield case.matrix(f"{name}.out_proj", hidden, inner)
    elif heads := whole(text.get("mamba_num_heads")):                                         # Nemotron-H
        inner = heads * case.number("mamba_head_dim")
        yield case.matrix(f"{name}.in_proj", 2 * inner + 2 * case.number("n_groups") * case.number("ssm_state_size"), hidden)
        yield case.matrix(f"{name}.out_proj", hidden, inner)
    elif case.shape.state is not None and case.shape.num_attention_heads and case.shape.head_dim:
        wide = case.shape.num_attention_heads * case.shape.head_dim                          # Kimi-Linear, MiniMax-01
        yield case.matrix(f"{name}.qkv_proj", 3 * wide, hidden)
        yield case.matrix(f"{name}.o_proj", hidden, wide)


def _mlp(case: _Case, name: str, index: int) -> Iterator[Tensor]:
    shape, hidden = case.shape, case.hidden
    if shape.num_experts and shape.moe_intermediate_size and _has_experts(case, index):
        inner, many = shape.moe_intermediate_size, shape.num_experts
        yield case.matrix(f"{name}.gate", many, hidden, bits=_FLOAT)
        yield case.matrix(f"{name}.experts.gate_up_proj", many, _ups(case) * inner, hidden, bits=case.expert_bits)
        yield case.matrix(f"{name}.experts.down_proj", many, hidden, inner, bits=case.expert_bits)
        shared = case.number("shared_expert_intermediate_size") or inner * case.number("n_shared_experts")
        inner, name = shared, f"{name}.shared_experts"
    else:
        inner = shape.intermediate_size or 0
    if inner:
        yield case.matrix(f"{name}.gate_up_proj", _ups(case) * inner, hidden)
        yield case.matrix(f"{name}.down_proj", hidden, inner)


def _ups(case: _Case) -> int:
    """Matrices that go up: a gate and its values, or the values alone."""
    return 1 if case.shape.model_type in _UNGATED else 2


def _has_experts(case: _Case, index: int) -> bool:
    dense = case.text.get("mlp_only_layers")
    if index < case.number("first_k_dense_replace") or (isinstance(dense, list) and index in dense):
        return False
    if period := whole(case.text.get("expert_layer_period")):                                 # Jamba
        return index % period == case.number("expert_layer_offset")
    step = whole(case.text.get("decoder_sparse_step")) or whole(case.text.get("interleave_moe_layer_step")) or 1
    return (index + 1) % step == 0
