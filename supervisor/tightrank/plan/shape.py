"""What config.json says about a model's shape: its heads, its layers, and what each of these keeps of a token. Pure.

Nothing here raises for what makes no sense: such a value is None, as is one that is not there.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.engines.base import sections
from tightrank.plan.layers import Layers, State, layers, state, whole

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INNER = ("intermediate_size", "n_inner", "ffn_hidden_size")
_EXPERT_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size")


@dataclass(frozen=True, slots=True)
class Indexer:
    """A sparse-attention indexer: what scores each key before it is attended to (DeepSeek V3.2, V4)."""
    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: of a token a layer keeps one latent vector of `rank` and the rotary part, on each rank."""
    rank: int                          # kv_lora_rank
    rope_dim: int                      # qk_rope_head_dim
    nope_dim: int                      # qk_nope_head_dim
    value_dim: int                     # v_head_dim
    query_rank: int | None             # q_lora_rank; None: the queries are made in one step

    @property
    def elements(self) -> int:
        """Of one token in one layer."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of config.json; None: it does not say, or nothing that makes sense."""
    model_type: str
    architecture: str
    num_attention_heads: int | None
    num_key_value_heads: int | None
    num_hidden_layers: int | None
    num_experts: int | None
    hidden_size: int | None
    intermediate_size: int | None
    moe_intermediate_size: int | None
    experts_per_token: int             # those that a token goes through, shared ones among them; 0: no experts
    vocab_size: int | None
    head_dim: int | None
    value_head_dim: int | None
    tied_embeddings: bool              # input and output embeddings are one matrix
    latent: Latent | None
    indexer: Indexer | None
    layers: Layers
    state: State | None

    @property
    def one_kv_vector(self) -> bool:
        """Every rank keeps all of a token's KV: one vector for all heads."""
        return self.latent is not None or self.layers.ratios is not None


def shape(model: Mapping[str, Any]) -> ModelShape:
    """Of a parsed config.json. Never raises."""
    text = sections(model)
    heads, hidden, count = _first(text, _HEADS), _first(text, _HIDDEN), _first(text, _LAYERS)
    kv_heads = 1 if text.get("multi_query") is True else _first(text, _KV_HEADS) or heads
    head_dim = whole(text.get("head_dim")) or (hidden // heads if hidden and heads else 0) or None
    latent = _latent(text)
    experts = _first(text, _EXPERTS)
    inner = _first(text, _INNER) or (4 * hidden if hidden and text.get("model_type") == "gpt2" else None)
    return ModelShape(
        model_type=str(text.get("model_type") or ""), architecture=_architecture(model), num_attention_heads=heads,
        num_key_value_heads=kv_heads, num_hidden_layers=count, num_experts=experts, hidden_size=hidden,
        intermediate_size=inner, moe_intermediate_size=_first(text, _EXPERT_INNER) or (inner if experts else None),
        experts_per_token=_experts_per_token(text) if experts else 0,
        vocab_size=whole(text.get("vocab_size")), head_dim=head_dim,
        value_head_dim=head_dim if latent else whole(text.get("v_head_dim")) or head_dim,
        tied_embeddings=_tied(model, text), latent=latent, indexer=_indexer(text), layers=layers(text, count or 0),
        state=state(text, hidden, heads))


def _architecture(model: Mapping[str, Any]) -> str:
    names = model.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _experts_per_token(text: Mapping[str, Any]) -> int:
    routed = _first(text, ("num_experts_per_tok", "moe_topk", "top_k_experts")) or 1
    return routed + (whole(text.get("n_shared_experts")) or 0)


def _first(text: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := whole(text.get(name)))), None)


def _tied(model: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Where config.json leaves it out GPT-2's and Gemma's classes mean yes, and those of large models no."""
    said = model.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return said if isinstance(said, bool) else str(text.get("model_type")).startswith(("gpt2", "gemma"))


def _latent(text: Mapping[str, Any]) -> Latent | None:
    rank, rope = whole(text.get("kv_lora_rank")), whole(text.get("qk_rope_head_dim"))
    if not rank or not rope:
        return None
    nope = whole(text.get("qk_nope_head_dim")) or whole(text.get("v_head_dim")) or rank
    return Latent(rank, rope, nope, whole(text.get("v_head_dim")) or nope, whole(text.get("q_lora_rank")))


def _indexer(text: Mapping[str, Any]) -> Indexer | None:
    found = [whole(text.get(name)) for name in ("index_n_heads", "index_head_dim", "index_topk")]
    numbers = [number for number in found if number]
    return Indexer(*numbers) if len(numbers) == 3 else None
