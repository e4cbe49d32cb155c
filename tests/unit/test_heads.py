"""The arithmetic of the hook `heads`: widths, and bytes as published and as the releases reserve them."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank_adapter import heads

MIB = 2**20
UNITS, REQUESTS, QUERIES, VALUE = 256, 1, 512, 128  # the published setting
COUNTS = st.integers(1, 512)


@given(COUNTS)
def test_width_is_the_next_multiple_of_16(count: int) -> None:
    assert heads.width(count) % 16 == 0
    assert 0 <= heads.width(count) - count < 16


def in_all(count: int, wide: int) -> float:
    """MiB of workspace and metadata at `wide` heads in the published setting."""
    tiles = heads.tiles_by_heads(wide, UNITS, REQUESTS, QUERIES)
    return (heads.workspace_bytes(count, tiles, QUERIES, VALUE, wide)
            + heads.metadata_bytes(wide, UNITS, REQUESTS, QUERIES)) / MIB


@pytest.mark.parametrize(("count", "wide", "tiles", "mebibytes"), [
    (24, 24, 64, 193.6), (24, 32, 16, 68.6),  # published
    (12, 12, 128, 193.6), (12, 16, 32, 66.5), (16, 16, 32, 64.5),
])
def test_the_published_bytes(count: int, wide: int, tiles: int, mebibytes: float) -> None:
    assert heads.tiles_by_heads(wide, UNITS, REQUESTS, QUERIES) == tiles
    assert round(in_all(count, wide), 1) == mebibytes


@pytest.mark.parametrize(("wide", "mebibytes"), [(12, 6096), (16, 1968)])
def test_the_bytes_of_a_serving_setting(wide: int, mebibytes: int) -> None:
    """12 heads, 8192 tokens in a batch, 64 requests or more: 6.0 GiB at 12, 1.9 GiB at 16. ("About 6 GiB" is published.)"""
    for requests in (64, 256):
        tiles = heads.tiles_by_heads(wide, UNITS, requests, 8192)
        assert round(heads.workspace_bytes(12, tiles, 8192, VALUE, wide) / MIB) == mebibytes


def test_later_releases_count_tiles_by_tokens() -> None:
    assert heads.tiles_by_tokens(512, 1, UNITS) == 258
    assert heads.tiles_by_tokens(8192, 64, UNITS) == 351
    assert round(heads.workspace_bytes(12, 351, 8192, VALUE) / MIB) == 740


@given(COUNTS, st.integers(1, 512), st.integers(1, 9000), st.integers(1, 512))
def test_bytes_grow_with_tiles_and_an_aligned_count_needs_no_output(count: int, tiles: int, tokens: int, value: int) -> None:
    one, two = (heads.workspace_bytes(count, each, tokens, value) for each in (tiles, tiles + 1))
    assert two > one
    wide = heads.width(count)
    assert (one > heads.workspace_bytes(wide, tiles, tokens, value)) == (wide > count)


@pytest.mark.parametrize(("call", "name"), [
    (lambda: heads.width(0), "heads=0"),
    (lambda: heads.tiles_by_heads(16, 0, 1, 1), "compute_units=0"),
    (lambda: heads.tiles_by_tokens(-1, 1, 1), "batched_tokens=-1"),
    (lambda: heads.workspace_bytes(12, 1, 1, 0), "value_dim=0"),
    (lambda: heads.context_chunk_tokens(0, 1, 1), "model_tokens=0"),
])
def test_bad_input_is_named(call: object, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()  # type: ignore[operator]


def test_the_bf16_path_of_kimi_k3_at_197k_tokens() -> None:
    """96 heads on 8 ranks. vLLM's profile holds 384 MiB of a working set of 1213 MiB; the KV pool is hardly used.

    Pool: of 287.98 GiB, 0.95 asked for, 195 GB of weights, a tenth of the rest for activations. 24 MLA layers.
    """
    k3 = heads.KIMI_K3_TP8
    context = heads.context_chunk_tokens(1_048_576, 256, 1)
    peak = heads.fallback_bytes(k3, 8192, 197_000 - 8192, context)
    assert context == heads.CONTEXT_TOKENS
    assert (heads.profiled_bytes(k3) / MIB, peak / MIB) == (384, 1213.125)
    pool_bytes = int((287.98 * 0.95 * 2**30 - 195e9) * 0.9)
    assert 0.03 < heads.pool_share(k3, 197_000, layers=24, pool_bytes=pool_bytes) < 0.04


def test_the_bf16_path_grows_to_two_chunks_of_context_and_no_further() -> None:
    k3 = heads.KIMI_K3_TP8
    at = [heads.fallback_bytes(k3, 8192, context) for context in (0, 65_536, 131_072, 197_000, 1_000_000)]
    assert at == sorted(at)
    assert at[2] == at[3] == at[4]


def test_a_whole_prompt_in_one_batch_takes_the_most() -> None:
    """--max-num-batched-tokens as long as the prompt: 13.5 KiB for each token of it."""
    assert heads.fallback_bytes(heads.KIMI_K3_TP8, 197_000, 0) == 197_000 * 12 * 2 * (128 + 128 + 128 + 64 + 128)
