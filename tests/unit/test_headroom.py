"""The headroom's arithmetic, and what it says of a KV cache that is too small."""
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import rank
from tightrank import diagnose
from tightrank.diagnose import headroom as told
from tightrank.records import Diagnosis, Line
from tightrank_adapter import headroom
from tightrank_adapter.headroom import Terms

GIB, MIB = 2**30, 2**20
ROWS = [Terms(0, 40 * GIB, 60 * GIB, 5 * GIB), Terms(1, 40 * GIB, 12 * GIB, 5 * GIB)]
TOO_SMALL = Diagnosis("kv-pool-too-small", "No memory is left.", (), "raise --mem-fraction-static (now 0.9)", False)
sizes = st.integers(0, 2**48)
terms = st.builds(Terms, st.integers(0, 7), sizes, sizes, sizes)


@given(terms)
def test_never_more_than_the_engines_own_nor_than_what_is_free(row: Terms) -> None:
    assert row.available_bytes <= row.own_bytes and row.available_bytes <= row.free_bytes - row.headroom_bytes
    assert row.available_bytes == (row.own_bytes if row.bound == "engine" else row.free_bytes - row.headroom_bytes)


@given(st.lists(terms, min_size=1, max_size=8))
def test_all_ranks_get_what_the_tightest_can_spare(rows: list[Terms]) -> None:
    least = headroom.tightest(rows)
    assert all(least.available_bytes <= row.available_bytes for row in rows)
    assert f"rank {least.rank} is the tightest" in headroom.sentence(rows, {})


def test_balanced_ranks_keep_the_engines_number() -> None:
    rows = [Terms(number, 40 * GIB, 60 * GIB, 5 * GIB) for number in range(4)]
    assert headroom.tightest(rows) == rows[0] and headroom.tightest(rows).available_bytes == 40 * GIB


def test_the_sentence_has_all_terms_of_the_sum() -> None:
    assert headroom.sentence(ROWS, {"terms": {"prefill": 3 * GIB, "FP8 MLA workspace": 2 * GIB}, "guard_bytes": 2 * GIB}) == (
        "rank 1 is the tightest (rank 0 40960.0 MiB), 7168.0 MiB for the KV cache: 12288.0 MiB free - 5120.0 MiB headroom = "
        "7168.0 MiB, under the engine's own 40960.0 MiB; headroom is prefill 3072.0 MiB + FP8 MLA workspace 2048.0 MiB, and "
        "the guard's 2048.0 MiB where memory is the host's")
    assert "the engine's own 40960.0 MiB, under 61440.0 MiB free" in headroom.sentence(ROWS[:1], {})


@pytest.mark.parametrize(("values", "number", "shared", "wanted"), [
    ({"fraction": 0.08}, 0, False, int(0.08 * 100 * GIB)), ({"bytes": [5]}, 3, False, 5), ({"bytes": [5, 7]}, 1, True, 7),
    ({"bytes": [5], "guard_bytes": 2}, 0, True, 7), ({"bytes": [5], "guard_bytes": 2}, 0, False, 5)])
def test_what_is_wanted(values: dict[str, Any], number: int, shared: bool, wanted: int) -> None:
    assert headroom.wanted_bytes(values, number, 100 * GIB, shared) == wanted


def test_a_rank_without_a_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 2 has no headroom: 2 sizes are given"):
        headroom.wanted_bytes({"bytes": [5, 7]}, 2, GIB, False)


@pytest.mark.parametrize("fact", [None, 5, {}, {"rank": 0}, {**ROWS[0]._asdict(), "rank": "0"},
                                  {**ROWS[0]._asdict(), "more": 1}, {**ROWS[0]._asdict(), "own_bytes": True},
                                  {**ROWS[0]._asdict(), "free_bytes": 1.5}])
def test_a_fact_of_another_form_is_none(fact: Any) -> None:
    assert headroom.of_fact(fact) is None
    assert told.rows([rank(facts={"headroom": fact}), rank(facts={"headroom": dict(ROWS[1]._asdict())})]) == [ROWS[1]]


def test_the_status_names_bound_and_rank() -> None:
    found = told.summary(ROWS, {})
    assert found is not None
    assert (found["tightest_rank"], found["bound"], found["available_bytes"]) == (1, "headroom", 7 * GIB)
    assert told.summary([], {}) is None


@pytest.mark.parametrize(("cause", "engine", "flag"), [
    ("kv-pool-too-small", "vllm", "--max-num-seqs"), ("kv-pool-too-small", "sglang", "--max-running-requests"),
    ("context-exceeds-kv-pool", "vllm", "--max-model-len"), ("context-exceeds-kv-pool", "sglang", "--context-length"),
    ("kv-pool-too-small", "atom", "--max-num-seqs"), ("state-cache-too-small", "atom", "--max-num-seqs")])
def test_where_the_headroom_binds_nobody_is_told_to_raise_the_utilization(cause: str, engine: str, flag: str) -> None:
    diagnosis = told.explained(Diagnosis(cause, "Too small.", (), "raise --gpu-memory-utilization", False), engine, ROWS, {})
    assert diagnosis.cause == cause and flag in diagnosis.change and "headroom.reserve" in diagnosis.change
    assert "utilization" not in diagnosis.change and "rank 1" in diagnosis.change
    assert "rank 1 is the tightest" in diagnosis.summary


def test_where_the_engine_binds_its_own_advice_stands() -> None:
    for rows, values in ((ROWS[:1], {}), ([], {}), (ROWS, {"observe": True})):
        assert told.explained(TOO_SMALL, "sglang", rows, values) == TOO_SMALL
    other = Diagnosis("rank-died", "It died.", (), "see the log", True)
    assert told.explained(other, "sglang", ROWS, {}) == other


@pytest.mark.parametrize("engine", ["vllm", "sglang", "atom"])
@pytest.mark.parametrize(("text", "cause"), [
    ("tightrank_adapter.sizing.HeadroomError: tightrank: hook headroom failed on rank 1: without its numbers no rank can size "
     "its KV cache", "adapter-fault"),
    ("tightrank_adapter.sizing.HeadroomError: tightrank: headroom leaves no memory for the KV cache: rank 1 has 3.25 GiB free "
     "and keeps 5.00 GiB", "kv-pool-too-small")])
def test_our_own_errors_are_named_at_once(engine: str, text: str, cause: str) -> None:
    diagnosis = diagnose.deciding_line(engine, Line(1.0, 1.0, "stderr", text))
    assert diagnosis is not None and diagnosis.cause == cause and "rank 1" in diagnosis.summary
    if cause == "kv-pool-too-small":
        assert "headroom.reserve to less than 3.25GiB" in diagnosis.change and not diagnosis.restart_helps
