"""The line's arithmetic against its definition, tried number by number."""
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tightrank_adapter import line

PUBLISHED: dict[str, Any] = {"minimum": 256, "maximum": 2048, "granule": 256, "rule": "prefix", "step": "pow2"}
BUDGET = 200_000_000


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """minimum, maximum, granule, rule and step that go together."""
    granule = draw(st.sampled_from([1, 2, 3, 8, 64]))
    minimum = draw(st.integers(1, 4)) * granule
    return {"minimum": minimum, "maximum": minimum + draw(st.integers(0, 12)) * granule, "granule": granule,
            "rule": draw(st.sampled_from(line.RULES)), "step": draw(st.sampled_from(line.STEPS))}


def under(budget: int, prefix: int, tokens: int, rows: int, width: int, rule: str) -> bool:
    """The definition: rows of the batch times its longest key length (for `prefix`: without the new tokens)."""
    longest = max(width, prefix + tokens if rule == "span" else max(prefix, 1))
    return (rows + tokens) * longest <= budget


def brute(budget: int, prefix: int, rows: int, width: int, shape: dict[str, Any]) -> int:
    granule = shape["granule"]
    sizes = [granule * count for count in range(1, shape["maximum"] // granule + 1)]
    if shape["step"] == "pow2":
        sizes = [size for size in sizes if (size // granule).bit_count() == 1]
    return max((size for size in sizes
                if size >= shape["minimum"] and under(budget, prefix, size, rows, width, shape["rule"])), default=0)


@given(st.integers(0, 60_000), st.integers(0, 3000), st.integers(0, 300), st.integers(0, 3000), shapes())
@settings(max_examples=400)
def test_a_chunk_is_the_largest_size_that_keeps_the_batch_under_the_line(
        budget: int, prefix: int, rows: int, width: int, shape: dict[str, Any]) -> None:
    width = width if rows else 0
    assert line.batch_chunk_tokens(budget, prefix, rows, width, **shape) == brute(budget, prefix, rows, width, shape)


@given(st.integers(0, 60_000), st.integers(0, 3000), shapes())
def test_alone_is_an_empty_batch(budget: int, prefix: int, shape: dict[str, Any]) -> None:
    assert line.chunk_tokens(budget, prefix, **shape) == brute(budget, prefix, 0, 0, shape)


@given(st.integers(10**6, 10**15), st.integers(0, 10**7))
def test_span_is_exact_for_large_numbers(budget: int, prefix: int) -> None:
    tokens = line.chunk_tokens(budget, prefix, minimum=1, maximum=2**40, granule=1)
    assert tokens * (prefix + tokens) <= budget
    assert (tokens + 1) * (prefix + tokens + 1) > budget


@given(st.integers(0, 60_000), st.integers(0, 3000), st.integers(0, 3000), shapes())
def test_a_longer_prefix_never_takes_more(budget: int, first: int, second: int, shape: dict[str, Any]) -> None:
    shorter, longer = sorted((first, second))
    assert line.chunk_tokens(budget, shorter, **shape) >= line.chunk_tokens(budget, longer, **shape)


@pytest.mark.parametrize(("prefix", "chunk"), [
    (0, 2048), (97_656, 2048), (97_657, 1024), (195_312, 1024), (195_313, 512), (390_625, 512), (390_626, 256),
    (781_250, 256), (781_251, 0)])
def test_the_published_table(prefix: int, chunk: int) -> None:
    assert line.chunk_tokens(BUDGET, prefix, **PUBLISHED) == chunk


def test_the_published_formula_without_its_table() -> None:
    assert line.chunk_tokens(BUDGET, 100_000, **{**PUBLISHED, "step": "granule"}) == 1792


@given(st.integers(1, 60_000), shapes())
def test_longest_prefix_is_where_the_minimum_stops_to_fit(budget: int, shape: dict[str, Any]) -> None:
    granule = shape["granule"]
    shape |= {"minimum": shape["minimum"] // granule * granule, "step": "granule"}
    prefix = line.longest_prefix(budget, minimum=shape["minimum"], granule=granule, rule=shape["rule"])
    if prefix >= 0:
        assert line.chunk_tokens(budget, prefix, **shape) >= shape["minimum"]
    assert line.chunk_tokens(budget, prefix + 1, **shape) == 0


@given(st.integers(1, 40_000), shapes(), st.data())
def test_every_prompt_up_to_the_longest_ends_under_the_line(budget: int, shape: dict[str, Any], data: st.DataObject) -> None:
    shape["step"] = "granule"
    longest = line.longest_prompt(budget, minimum=shape["minimum"], granule=shape["granule"], rule=shape["rule"])
    if longest == 0:
        return
    prompt, prefix = data.draw(st.integers(1, longest)), 0
    while prefix < prompt:
        chunk = line.accepted_chunk_tokens(budget, prefix, prompt - prefix, 0, 0, alone=True, limit=shape["maximum"], **shape)
        assert chunk > 0
        assert line.fits(budget, prefix, chunk, rule=shape["rule"])
        prefix += chunk
    assert prefix == prompt


@given(st.integers(0, 60_000), st.integers(0, 3000), st.integers(1, 500), st.integers(0, 300), st.integers(0, 3000),
       st.booleans(), st.integers(1, 500), shapes())
@settings(max_examples=400)
def test_an_accepted_request_gets_what_fits_or_waits_or_alone_the_minimum(
        budget: int, prefix: int, remaining: int, rows: int, width: int, alone: bool, limit: int,
        shape: dict[str, Any]) -> None:
    rows, width = (0, 0) if alone else (rows, width)
    chunk = line.accepted_chunk_tokens(budget, prefix, remaining, rows, width, alone=alone, limit=limit, **shape)
    assert 0 <= chunk <= min(remaining, limit)
    if alone:
        assert chunk > 0
    if chunk and not under(budget, prefix, chunk, rows, width, shape["rule"]):
        assert alone
        assert chunk <= shape["minimum"]
    if 0 < chunk < min(shape["minimum"], limit // shape["granule"] * shape["granule"]):     # no sliver but a prompt's end
        assert chunk == remaining


@pytest.mark.parametrize(("change", "error", "name"), [
    ({"budget": -1}, ValueError, "budget"), ({"prefix": -1}, ValueError, "prefix"), ({"minimum": 0}, ValueError, "minimum"),
    ({"granule": 0}, ValueError, "granule"), ({"maximum": 128}, ValueError, "maximum"),
    ({"rule": "spam"}, ValueError, "rule"), ({"step": "two"}, ValueError, "step"),
    ({"budget": 1.0}, TypeError, "budget"), ({"prefix": True}, TypeError, "prefix"), ({"minimum": "1"}, TypeError, "minimum")])
def test_bad_input_is_refused_by_name(change: dict[str, Any], error: type[Exception], name: str) -> None:
    arguments: dict[str, Any] = {"budget": BUDGET, "prefix": 0, **PUBLISHED, **change}
    with pytest.raises(error, match=f"^{name}="):
        line.chunk_tokens(**arguments)
