"""Which layers of a model keep all tokens, a window of them, or a state of fixed size; read from config.json. Pure."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FULL, WINDOW, STATE, NONE = "full", "window", "state", "none"      # NONE: no attention at all
MOST_LAYERS = 4096
_TYPES = {"full_attention": FULL, "attention": FULL, "sliding_attention": WINDOW, "chunked_attention": WINDOW,
          "linear_attention": STATE, "mamba": STATE, "mamba2": STATE, "conv": STATE, "recurrent": STATE}
_PATTERN = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}           # hybrid_override_pattern of Nemotron-H
_STATE_ONLY = ("mamba", "mamba2", "falcon_mamba")
# Every n-th layer keeps all tokens, where config.json leaves it to Transformers (configuration_*.py).
_USUAL_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}


@dataclass(frozen=True, slots=True)
class Layers:
    """`kinds`: of each layer. `window_tokens`: of the layers of kind WINDOW. `ratios`: tokens for each entry that a layer
    of DeepSeek-V4 keeps (0: a window alone); None for all other models."""
    kinds: tuple[str, ...]
    window_tokens: int | None = None
    ratios: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What one layer of kind STATE keeps of a request, in elements, of all ranks together."""
    convolution: int
    recurrent: int
    recurrent_bytes: int | None = None # of an element, as config.json or the model itself wants; None: the engine's choice


def whole(value: Any) -> int | None:
    """A positive whole number of this world, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else None


def layers(text: Mapping[str, Any], count: int) -> Layers:
    """`count`: num_hidden_layers, 0 when config.json does not say."""
    if not 0 < count <= MOST_LAYERS:
        return Layers(())
    window = whole(text.get("sliding_window")) or whole(text.get("attention_chunk_size"))
    ratios = text.get("compress_ratios")
    if isinstance(ratios, list) and len(ratios) >= count and all(isinstance(each, int) and each >= 0 for each in ratios):
        return Layers((FULL,) * count, window, tuple(_owned(text, layer, ratio) for layer, ratio in enumerate(ratios[:count])))
    kinds = _kinds(text, count, window)
    if window is None:
        kinds = tuple(FULL if kind == WINDOW else kind for kind in kinds)
    return Layers(kinds, window)


def _owned(text: Mapping[str, Any], layer: int, ratio: int) -> int:
    """0 for a layer of ratio 1 or 2 that reads what another one keeps (DeepSeek-V4.1)."""
    sources = text.get("kv_source_layer_ids")
    return ratio if ratio not in (1, 2) or not isinstance(sources, list) or layer in sources else 0


def _kinds(text: Mapping[str, Any], count: int, window: int | None) -> tuple[str, ...]:
    """The first of the ways in which models say it."""
    model_type = str(text.get("model_type"))
    types, pattern = text.get("layer_types"), text.get("hybrid_override_pattern")
    if isinstance(types, list) and len(types) >= count:
        return tuple(_TYPES.get(str(name), FULL) for name in types[:count])
    if isinstance(pattern, str) and len(pattern) >= count:
        return tuple(_PATTERN.get(letter, NONE) for letter in pattern[:count])
    if model_type in _STATE_ONLY:
        return (STATE,) * count
    attention = _attention(text, count)
    if attention is not None:
        return tuple(FULL if index in attention else STATE for index in range(count))
    return _windows(text, model_type, count) if window is not None else (FULL,) * count


def _attention(text: Mapping[str, Any], count: int) -> Sequence[int] | None:
    """The layers with attention of a model whose others keep a state; None: it is no such model."""
    linear = text.get("linear_attn_config")                       # Kimi-Linear counts from 1
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        return [index - 1 for index in linear["full_attn_layers"] if isinstance(index, int)]
    if isinstance(found := text.get("attn_layer_indices"), list):   # Bamba
        return [index for index in found if isinstance(index, int)]
    if isinstance(found := text.get("attn_type_list"), list):       # MiniMax-01
        return [index for index, kind in enumerate(found) if kind == 1]
    if interval := whole(text.get("full_attention_interval")):      # Qwen3-Next
        return range(interval - 1, count, interval)
    if period := whole(text.get("attn_layer_period")):              # Jamba
        offset = text.get("attn_layer_offset")
        return range(offset if isinstance(offset, int) and offset >= 0 else 0, count, period)
    return None


def _windows(text: Mapping[str, Any], model_type: str, count: int) -> tuple[str, ...]:
    """Of a model that has a window and no layers with a state."""
    if isinstance(ropes := text.get("no_rope_layers"), list) and len(ropes) >= count:      # Llama 4: 0 keeps all
        return tuple(WINDOW if rope else FULL for rope in ropes[:count])
    if every := whole(text.get("sliding_window_pattern")) or _USUAL_PATTERN.get(model_type):
        return tuple(WINDOW if (index + 1) % every else FULL for index in range(count))
    if text.get("use_sliding_window") is False:                     # Qwen2 writes a window that it does not use
        return (FULL,) * count
    first = whole(text.get("max_window_layers")) or 0
    return tuple(WINDOW if index >= first else FULL for index in range(count))


def state(text: Mapping[str, Any], hidden: int | None, heads: int | None) -> State | None:
    """None: there is none, or its shape cannot be told. Formulas: vLLM, layers/mamba/mamba_utils.py, *_state_shape."""
    dtype = text.get("mamba_ssm_dtype")
    asked = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype) if isinstance(dtype, str) else None
    return _gated_delta(text, asked) or _mamba2(text, asked) or _mamba1(text, hidden, asked) or _others(text, hidden, heads)


def _numbers(text: Mapping[str, Any], *names: str) -> list[int] | None:
    found = [number for name in names if (number := whole(text.get(name)))]
    return found if len(found) == len(names) else None


def _gated_delta(text: Mapping[str, Any], asked: int | None) -> State | None:
    """Qwen3-Next, Qwen3.5: a convolution over q, k and v, and one matrix for each value head."""
    found = _numbers(text, "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
                     "linear_conv_kernel_dim")
    if found is None:
        return None
    key_heads, key_dim, value_heads, value_dim, kernel = found
    return State((2 * key_heads * key_dim + value_heads * value_dim) * (kernel - 1), value_heads * value_dim * key_dim, asked)


def _mamba2(text: Mapping[str, Any], asked: int | None) -> State | None:
    """Bamba, Granite 4, Nemotron-H and Mamba-2 itself name the same five numbers differently."""
    found = _numbers(text, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv") or \
        _numbers(text, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel") or \
        (_numbers(text, "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
         if text.get("model_type") == "mamba2" else None)
    if found is None:
        return None
    count, dim, size, groups, kernel = found
    return State((count * dim + 2 * groups * size) * (kernel - 1), count * dim * size, asked)


def _mamba1(text: Mapping[str, Any], hidden: int | None, asked: int | None) -> State | None:
    """Jamba, Mamba."""
    found = _numbers(text, "mamba_d_state", "mamba_d_conv", "mamba_expand") or \
        _numbers(text, "state_size", "conv_kernel", "expand")
    if found is None or hidden is None:
        return None
    size, kernel, expand = found
    return State(expand * hidden * (kernel - 1), expand * hidden * size, asked)


def _others(text: Mapping[str, Any], hidden: int | None, heads: int | None) -> State | None:
    """Kimi-Linear (KDA, float32), MiniMax-01 (one matrix for each head, float32), LFM2 (a convolution alone)."""
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and (kda := _numbers(linear, "num_heads", "head_dim", "short_conv_kernel_size")):
        count, dim, kernel = kda
        return State(3 * count * dim * (kernel - 1), count * dim * dim, 4)
    if isinstance(text.get("attn_type_list"), list) and heads and (size := whole(text.get("head_dim"))):
        return State(0, heads * size * size, 4)
    if hidden and (length := whole(text.get("conv_L_cache"))):
        return State(hidden * (length - 1), 0)
    return None
