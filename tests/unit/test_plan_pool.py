"""Tokens of a KV pool, as the engines count them. The engines' own answers: tests/engines/test_planner.py."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tightrank.plan import pool
from tightrank.plan.kv import Storage
from tightrank.plan.layers import FULL, NONE, STATE, WINDOW
from tightrank.plan.pool import Question
from tightrank.plan.shape import shape

GIB = 2**30
DENSE: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
MIXED = {**DENSE, "num_hidden_layers": 6, "sliding_window": 1024, "architectures": ["GptOssForCausalLM"],
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
HYBRID = {**DENSE, "num_hidden_layers": 4, "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}


def ask(model: dict[str, Any], **changes: Any) -> Question:
    usual = Question(shape(model), Storage("auto", 2), "vllm", 1, 1, 128, 8192, 2048, 2, 4)
    return replace(usual, **changes)


def count(question: Question, pool_bytes: int = GIB) -> int:
    found = pool.tokens(question, pool_bytes)
    assert found is not None
    return found.tokens


def test_vllm_counts_blocks() -> None:
    """tests/engines/test_headroom.py: on two ranks a block of the tiny model takes 65,536 bytes of each."""
    assert count(ask(DENSE, tensor_parallel=2)) == GIB // 65536 * 128
    assert count(ask(DENSE, context_tokens=8000)) == int(GIB // (2 * 65536) / 63 * 8000), "63 blocks for 8000 tokens"
    assert count(ask(DENSE, engine="atom", block_tokens=16)) == GIB // 1024


@pytest.mark.parametrize(("kinds", "groups"), [
    ([FULL] * 4, [(FULL, 4)]), ([WINDOW] * 3, [(WINDOW, 3)]), ([FULL, WINDOW] * 3, [(FULL, 3), (WINDOW, 3)]),
    ([WINDOW, WINDOW, FULL] * 2, [(FULL, 2), (WINDOW, 2), (WINDOW, 2)]),
    ([FULL] * 13 + [WINDOW] * 12, [(FULL, 13), (WINDOW, 12)]),
    ([FULL] * 2 + [WINDOW] * 3, [(FULL, 2), (WINDOW, 2), (WINDOW, 1)]), ([STATE] * 3 + [FULL], [(FULL, 1), *[(STATE, 1)] * 3]),
    ([FULL, NONE, STATE, NONE], [(FULL, 1), (STATE, 1)])])
def test_groups_of_layers(kinds: list[str], groups: list[tuple[str, int]]) -> None:
    """vLLM, v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size."""
    assert [(kind, len(layers)) for kind, layers in pool.groups(kinds)] == groups


def test_windows_take_few_blocks_of_a_request() -> None:
    """64 blocks in the group that keeps all; in each of two others the window and the steps in flight: 24 and 1 more."""
    blocks = GIB // (2 * 65536)
    assert count(ask(MIXED)) == int(blocks / (64 + 2 * (24 + 1)) * 8192)
    assert count(ask({**DENSE, "sliding_window": 1024})) == int(blocks / 25 * 8192), "no layer keeps all"


def test_states_take_two_blocks_of_a_request_and_set_their_size() -> None:
    state = (2 * 2 * 64 + 4 * 64) * 3 * 2 + 4 * 64 * 64 * 4          # 68,608 bytes: more than a page of 128 tokens
    assert pool.block_tokens(ask(HYBRID)) == 256 and state > 128 * 512
    assert count(ask(HYBRID)) == int(GIB // (256 * 512) / (32 + 3 * 2) * 8192)
    assert count(ask(HYBRID, prefix_caching=False)) == int(GIB // (256 * 512) / (32 + 3) * 8192)


def test_sglang_counts_bytes_of_a_token() -> None:
    question = ask(DENSE, engine="sglang", block_tokens=1)
    assert count(question) == GIB // 1024
    assert count(replace(question, block_tokens=64), GIB - 1) == GIB // 1024 - 64, "whole pages"
    assert count(replace(question, most_tokens=5000)) == 5000 and count(replace(question, most_tokens=10**9)) == GIB // 1024
    three = ask({**DENSE, "num_hidden_layers": 5}, engine="sglang", block_tokens=1, pipeline_parallel=2)
    assert count(three) == GIB // (3 * 512), "the stage with three of five layers"


def test_sglang_keeps_windows_for_some_models_only() -> None:
    question = ask(MIXED, engine="sglang", block_tokens=1)
    assert count(question) == int(GIB // (512 * (2 + 0.8 * 4)))
    other = {**MIXED, "architectures": ["Gemma3ForCausalLM"]}
    assert count(ask(other, engine="sglang", block_tokens=1)) == GIB // (512 * 6)


def test_sglang_takes_the_states_first() -> None:
    each = 3 * ((2 * 2 * 64 + 4 * 64) * 3 * 2 + 4 * 64 * 64 * 4)
    slots = int((GIB * 0.9 / 1.9 - each) // each)
    question = ask(HYBRID, engine="sglang", block_tokens=1)
    assert count(question) == (GIB - (slots + 1) * each) // 512
    assert count(replace(question, most_states=100)) == (GIB - 101 * each) // 512


FOUR = {**DENSE, "model_type": "deepseek_v4", "head_dim": 512, "num_key_value_heads": 1, "compress_ratios": [0, 4],
        "sliding_window": 128, "index_n_heads": 1, "index_head_dim": 128, "index_topk": 512}


def test_a_compressed_cache_is_packed() -> None:
    """Of the tiny DeepSeek-V4: 23,301 blocks of 1 GiB, and 3.8 million tokens at 262,144 (vLLM's own code). By the bytes of a
    token alone there would be 6.0 million."""
    found = pool.tokens(ask(FOUR, how=Storage("fp8", 1), context_tokens=262_144), GIB)
    assert found is not None and found.exact and found.tokens == 3_796_281
    assert found.formula.startswith("23,301 blocks of 46,080 bytes, 4 groups")


def test_a_compressed_cache_of_sglang() -> None:
    """SGLang's sizing of a layer of ratio 4 and one with a window alone, page 256: entries of 585 bytes with padding, index
    keys of 132; a window slot has 2 entries and 320 bytes of the compressors' states. Not followed in all of its forms."""
    question = ask(FOUR, how=Storage("fp8", 1), engine="sglang", block_tokens=256)
    found = pool.tokens(question, GIB)
    each, slot = (585 + 132) / 4, 2 * 585 + 320
    assert found is not None and not found.exact
    assert found.tokens == int(GIB / (each + 0.1 * slot)) // 256 * 256
    slots = -(-(8 * (128 + 128 + 512) + 2048 + 256 + 32 * (128 + 256)) // 256) * 256
    assert count(replace(question, most_requests=8)) == int((GIB - slots * slot) / each) // 256 * 256
    assert count(replace(question, most_tokens=100_000)) == 100_000 // 256 * 256


def test_states_of_ratio_128_are_of_every_request() -> None:
    model = {**FOUR, "compress_ratios": [128, 128]}
    question = ask(model, how=Storage("fp8", 1), engine="sglang", block_tokens=256, most_requests=4)
    rows = (4 + 2) * 128 + 128
    slots = -(-(4 * (128 + 128 + 512) + 2048 + 256 + 16 * (128 + 256)) // 256) * 256
    left = GIB - 2 * rows * 2 * 512 * 4 - slots * 2 * 585
    assert count(question) == int(left / (2 * 864 / 128)) // 256 * 256


def test_layers_that_read_what_another_keeps() -> None:
    model = {**FOUR, "compress_ratios": [1, 2, 1, 4], "num_hidden_layers": 4, "kv_source_layer_ids": [0]}
    assert shape(model).layers.ratios == (1, 0, 0, 4)


@pytest.mark.parametrize("model", [{}, {"num_hidden_layers": 2}, {**DENSE, "head_dim": None, "hidden_size": None},
                                   {**DENSE, "layer_types": ["mamba", "attention"]}])
def test_what_cannot_be_told_is_none(model: dict[str, Any]) -> None:
    assert pool.tokens(ask(model), GIB) is None and pool.tokens(ask(model, engine="sglang"), GIB) is None
