"""How many tokens an engine makes of the bytes of its KV pool. Pure.

vLLM gives out blocks: all layers of one kind make groups of equal size, a block has one page for each layer of a group, and its
"KV cache size" is what so many requests of the maximum length would need (v1/core/kv_cache_utils.py, get_kv_cache_capacity).
SGLang counts bytes of a token and rounds down to pages (model_executor/pool_configurator.py).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightrank.plan import kv, packed, rings
from tightrank.plan.layers import FULL, STATE, WINDOW
from tightrank.plan.shape import ModelShape
from tightrank.plan.weights import stages

_STATE_BLOCKS = 2                      # vLLM with prefix caching keeps the state before and after (mamba_cache_mode align)
_WINDOW_SHARE = 0.8                    # SGLang: tokens in a layer with a window for each in one that keeps all
_STATE_SHARE = 0.9                     # SGLang: memory of states for each byte of KV (mamba_full_memory_ratio)
# SGLang keeps a window only for these; for all others every token in every layer (is_hybrid_swa_model).
_SGLANG_WINDOWS = ("GptOss", "Llama4", "MiMoV2", "Step3p5", "Gemma4", "GraniteSWA", "GraniteMoeSWA", "DeepseekV4", "Laguna")


@dataclass(frozen=True, slots=True)
class Question:
    """What decides the tokens of a pool. `context_tokens`: the longest request; `in_flight_tokens`: of all steps at once;
    `state_size`: bytes of a recurrent element; `most_tokens`, `most_states`, `most_requests`: bounds that were asked for."""
    shape: ModelShape
    how: kv.Storage
    engine: str
    tensor_parallel: int
    pipeline_parallel: int
    block_tokens: int
    context_tokens: int
    in_flight_tokens: int
    element_bytes: int
    state_size: int
    most_tokens: int | None = None
    most_states: int | None = None
    most_requests: int | None = None
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """`tokens`: what the engine will report; `held_bytes`: what a rank of the stage with most layers holds for them; `formula`:
    how it comes about; `exact`: False where its layout is not followed."""
    tokens: int
    held_bytes: float
    formula: str
    exact: bool = True
    capped: bool = False               # no more were asked for


def tokens(ask: Question, pool_bytes: int) -> Pool | None:
    """None: config.json does not say what a token takes."""
    if kv.token_bytes(ask.shape, ask.how, ask.tensor_parallel) is None or (STATE in ask.shape.layers.kinds and not _state(ask)):
        return None
    if ask.shape.layers.ratios is not None:
        return _compressed(ask, pool_bytes)
    return _sglang(ask, pool_bytes) if ask.engine == "sglang" else _blocks(ask, pool_bytes)


def _state(ask: Question) -> int:
    """Of one layer; SGLang's convolutions are bf16 in any case (configs/mamba_utils.py, SGLANG_MAMBA_CONV_DTYPE)."""
    convolution = 2 if ask.engine == "sglang" else ask.element_bytes
    return kv.state_bytes(ask.shape, ask.tensor_parallel, convolution, ask.state_size) or 0


def _entry(ask: Question) -> float:
    """Of a token in a layer with attention; `tokens` has seen that it is known."""
    return (kv.entry_bytes(ask.shape, ask.how, ask.tensor_parallel) or 0.0) + kv.index_bytes(ask.shape, ask.how)


def _stages(ask: Question) -> list[range]:
    """The layers of each pipeline stage."""
    found, start = [], 0
    for size in stages(ask.engine, len(ask.shape.layers.kinds), ask.pipeline_parallel):
        found.append(range(start, start + size))
        start += size
    return found


# --- vLLM and ATOM: blocks --------------------------------------------------------------------------------------------


def groups(kinds: Sequence[str]) -> list[tuple[str, list[int]]]:
    """(kind, layers) of vLLM's groups: as many layers in each as the rarest kind has, or the commonest where that is less
    than half as many more (_get_kv_cache_groups_uniform_page_size)."""
    by_kind = {kind: [layer for layer, each in enumerate(kinds) if each == kind] for kind in (FULL, WINDOW, STATE)}
    counts = [len(layers) for layers in by_kind.values() if layers]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    return [(kind, layers[number::many]) for kind, layers in by_kind.items() if layers
            for many in (-(-len(layers) // size),) for number in range(many)]


def block_tokens(ask: Question) -> int:
    """Of a block; in a model with states it is made so large that a layer's page holds a state (_align_hybrid_block_size)."""
    entry = _entry(ask)
    if STATE not in ask.shape.layers.kinds or not entry:
        return ask.block_tokens
    step = max(ask.block_tokens, 128) if ask.shape.latent is not None else ask.block_tokens
    return max(ask.block_tokens, step * math.ceil(_state(ask) / (step * entry)))


def _blocks(ask: Question, pool_bytes: int) -> Pool | None:
    found = groups(ask.shape.layers.kinds) if any(kind in (FULL, WINDOW, STATE) for kind in ask.shape.layers.kinds) else []
    if not found:
        return None
    block, entry = block_tokens(ask), _entry(ask)
    page = max(int(block * entry), _state(ask)) if STATE in ask.shape.layers.kinds else int(block * entry)
    wide = max(max(sum(layer in stage for layer in layers) for _, layers in found) for stage in _stages(ask))
    needed = sum(_blocks_of_request(ask, kind, block) for kind, _ in found)
    blocks = pool_bytes // (wide * page)
    count = int(blocks / needed * ask.context_tokens) if ask.engine == "vllm" else blocks * block
    shown = "" if len(found) == 1 else f", {len(found)} groups of layers"
    said = (f"{blocks:,} blocks of {wide} layers x {page:,} bytes ({block} tokens{shown}); {needed:,} blocks for a request of "
            f"{ask.context_tokens:,} tokens")
    return Pool(count, blocks * wide * page, said)


def _blocks_of_request(ask: Question, kind: str, block: int) -> int:
    """At the maximum length (max_memory_usage_bytes of the specs in v1/kv_cache_interface.py)."""
    if kind == STATE:
        return _STATE_BLOCKS if ask.prefix_caching else 1
    if kind == FULL:
        return -(-ask.context_tokens // block)
    window = (ask.shape.layers.window_tokens or 0) - 1 + ask.in_flight_tokens
    return -(-min(window, ask.context_tokens) // block) + 1


# --- SGLang: bytes of a token -----------------------------------------------------------------------------------------


def _sglang(ask: Question, pool_bytes: int) -> Pool:
    kinds = ask.shape.layers.kinds
    left, said = _after_states(ask, pool_bytes)
    share = _WINDOW_SHARE if FULL in kinds else 1.0
    windows = ask.shape.architecture.startswith(_SGLANG_WINDOWS)
    each = _entry(ask)
    cell = max(sum(each if kinds[layer] == FULL or not windows else share * each
                   for layer in stage if kinds[layer] in (FULL, WINDOW)) for stage in _stages(ask))
    found = int(left // cell) if cell else ask.context_tokens
    capped = ask.most_tokens is not None and ask.most_tokens <= found
    found = ask.most_tokens if capped and ask.most_tokens is not None else found
    found = found // ask.block_tokens * ask.block_tokens
    return Pool(found, found * cell + pool_bytes - left,
                f"{said}{int(left):,} bytes / {cell:,.0f} of a token, in whole pages of {ask.block_tokens}{_cap(ask)}",
                capped=capped)


def _cap(ask: Question) -> str:
    return "" if ask.most_tokens is None else f", at most {ask.most_tokens:,} as asked for"


def _after_states(ask: Question, pool_bytes: int) -> tuple[float, str]:
    """(bytes that are left for KV, how): the states of requests come first, with one more for padding
    (_handle_max_mamba_cache)."""
    each = max(sum(ask.shape.layers.kinds[layer] == STATE for layer in stage) for stage in _stages(ask)) * _state(ask)
    if not each:
        return pool_bytes, ""
    slots = ask.most_states or max(int((pool_bytes * _STATE_SHARE / (1 + _STATE_SHARE) - each) // each), 0)
    return max(pool_bytes - (slots + 1) * each, 0), f"less {slots + 1:,} states of {each:,} bytes; "


# --- DeepSeek-V4 ------------------------------------------------------------------------------------------------------


def _compressed(ask: Question, pool_bytes: int) -> Pool:
    return _compressed_sglang(ask, pool_bytes) if ask.engine == "sglang" else _packed(ask, pool_bytes)


def _packed(ask: Question, pool_bytes: int) -> Pool:
    made = packed.groups(packed.caches(ask.shape, ask.how))
    size = max(packed.block_bytes(made, stage) for stage in _stages(ask))
    needed = packed.request_blocks(made, ask.context_tokens, ask.in_flight_tokens)
    blocks = pool_bytes // size
    said = (f"{blocks:,} blocks of {size:,} bytes, {len(made)} groups of caches in them; {needed:,} blocks for a request of "
            f"{ask.context_tokens:,} tokens")
    known = packed.KNOWN_RATIOS.issuperset(ask.shape.layers.ratios or ())
    return Pool(int(blocks / needed * ask.context_tokens), blocks * size, said, exact=known)


def _compressed_sglang(ask: Question, pool_bytes: int) -> Pool:
    found = [rings.sizes(ask.shape, ask.how, ask.block_tokens, ask.most_requests, ask.in_flight_tokens, stage)
             for stage in _stages(ask)]
    heaviest = min(found, key=lambda each: each.tokens(pool_bytes, ask.block_tokens))
    count = heaviest.tokens(pool_bytes, ask.block_tokens)
    capped = ask.most_tokens is not None and ask.most_tokens <= count
    count = ask.most_tokens // ask.block_tokens * ask.block_tokens if capped and ask.most_tokens is not None else count
    said = (f"{pool_bytes:,} bytes less {heaviest.fixed_bytes:,.0f} of windows and states, / {heaviest.token_bytes:,.0f} of a "
            f"token{_cap(ask)}")
    return Pool(count, heaviest.held_bytes(count), said, exact=False, capped=capped)
