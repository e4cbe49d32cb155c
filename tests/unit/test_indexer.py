"""The arithmetic of the score budget: the published effect, and each function against its definition."""
from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank_adapter import indexer

GIB, MIB = 2**30, 2**20
PUBLISHED_PAIRS = 205_000_000  # 2048 tokens over 100k keys, the largest chunk that the published memory held


def test_the_published_effect() -> None:
    memory = indexer.peak_bytes(PUBLISHED_PAIRS, GIB)
    assert memory == 2_870_000_000 == 14 * PUBLISHED_PAIRS, "1 GiB is the engine's own budget, and does not bind"
    assert indexer.peak_bytes(PUBLISHED_PAIRS, 256 * MIB) / PUBLISHED_PAIRS == pytest.approx(11.3, abs=0.05)
    assert indexer.largest_pairs(memory, GIB) == PUBLISHED_PAIRS
    assert indexer.largest_pairs(memory, 256 * MIB) == pytest.approx(2.6e8, rel=0.001)
    assert indexer.largest_pairs(memory, 256 * MIB) // 2048 == pytest.approx(127_000, rel=0.01), "2048 reaches about 130k"


def test_the_examples_in_the_text() -> None:
    assert doctest.testmod(indexer) == (0, 2)


@given(st.integers(0, 2**38), st.integers(0, 2**34), st.integers(5, 64))
def test_the_largest_chunk_fits_and_one_pair_more_does_not(memory: int, budget: int, pair_bytes: int) -> None:
    pairs = indexer.largest_pairs(memory, budget, pair_bytes)
    assert indexer.peak_bytes(pairs, budget, pair_bytes) <= memory
    assert indexer.peak_bytes(pairs + 1, budget, pair_bytes) > memory


@given(st.integers(0, 2**31), st.integers(0, 2**34), st.integers(0, 2**34))
def test_a_smaller_budget_never_holds_more(pairs: int, budget: int, other: int) -> None:
    small, large = sorted((budget, other))
    assert indexer.peak_bytes(pairs, small) <= indexer.peak_bytes(pairs, large) <= 14 * pairs
    assert indexer.largest_pairs(pairs, small) >= indexer.largest_pairs(pairs, large)


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.floats(0, 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_derived_budget_is_never_over_what_was_asked_for_nor_what_the_engine_holds_fixed(
        wanted: int, fixed: int, fraction: float, free: int, cache: int) -> None:
    found = indexer.derived_budget_bytes(wanted, fixed, fraction, free + cache)
    assert 1 <= found <= min(wanted, fixed)
    assert found >= indexer.derived_budget_bytes(wanted, fixed, fraction, free), "page cache is available"


@pytest.mark.parametrize(("function", "arguments", "named"), [
    (indexer.peak_bytes, (-1, 0), "at least 0"),
    (indexer.peak_bytes, (1, -1), "budget_bytes=-1"),
    (indexer.largest_pairs, (1, 1, 4), "pair_bytes=4"),
])
def test_values_outside_their_range_are_named(function: object, arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        function(*arguments)  # type: ignore[operator]


class Model:
    def __init__(self, layers: dict[str, object]) -> None:
        self.layers = layers

    def named_modules(self) -> list[tuple[str, object]]:
        return list(self.layers.items())


class DeepseekV41Indexer:
    pass


@pytest.mark.parametrize(("layers", "has"), [
    ({"": object(), "layers.0.self_attn": object()}, False),
    ({"layers.0.self_attn.indexer": object()}, True),
    ({"layers.0.attn.scorer": DeepseekV41Indexer()}, True),
])
def test_a_model_has_an_indexer_by_the_name_of_a_layer_or_of_its_class(layers: dict[str, object], has: bool) -> None:
    assert indexer.has_indexer(Model(layers)) is has
