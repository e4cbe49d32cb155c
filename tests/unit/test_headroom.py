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
terms = st.builds(Terms, st.integers(0, 7), sizes, sizes, sizes, sizes)


@given(terms)
def test_never_more_than_the_engines_own_nor_than_what_is_free(row: Terms) -> None:
    assert row.available_bytes <= row.own_bytes and row.available_bytes <= row.free_bytes - row.headroom_bytes
    assert row.available_bytes == (row.own_bytes if row.bound == "engine" else row.left_bytes)


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
        "rank 1 is the tightest (rank 0 40960.0 MiB), with 7168.0 MiB to the KV cache: 12288.0 MiB free - 5120.0 MiB "
        "headroom = 7168.0 MiB, under the engine's own 40960.0 MiB; headroom is prefill 3072.0 MiB + FP8 MLA workspace "
        "2048.0 MiB, and of the guard's 2048.0 MiB this rank's share where memory is the host's")
    assert "the engine's own 40960.0 MiB, under 61440.0 MiB free" in headroom.sentence(ROWS[:1], {})
    assert headroom.sentence(ROWS[1:], {"ranks": 2}).startswith("rank 1 can give 7168.0 MiB to the KV cache: 12288.0 MiB free")
    observed = headroom.sentence(ROWS, {"observe": True})
    assert observed.startswith("only observed, the engine's own number stands; it would be: rank 1")


def test_what_the_engine_takes_later_is_not_free() -> None:
    row = Terms(0, 40 * GIB, 50 * GIB, 5 * GIB, 8 * GIB)
    assert (row.available_bytes, row.bound) == (37 * GIB, "headroom")
    assert "51200.0 MiB free - 8192.0 MiB that the engine takes later - 5120.0 MiB headroom" in headroom.sentence([row], {})


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


@pytest.mark.parametrize(("engine", "text", "kept"), [
    ("sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
     "mem_fraction_static=0.9", ""),
    ("vllm", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", ""),
    ("vllm", "ValueError: To serve at least one request with the model's max seq len (65536), (8.0 GiB KV cache is needed, "
     "which is larger than the available KV cache memory (4.0 GiB). Based on the available memory, the estimated maximum model "
     "length is 32768. Try increasing `gpu_memory_utilization`", "--max-model-len 32768, or "),
    ("atom", "RuntimeError: Per-request cache tensor (8.00GB for 512 slots) exceeds available KV budget (4.00GB) at "
     "--gpu-memory-utilization 0.85. Set --gpu-memory-utilization >= 0.95 (x) or reduce --max-num-seqs (currently 512).",
     "--max-num-seqs 243 at most (now 512), or ")])
def test_where_the_headroom_binds_nobody_is_told_to_take_a_larger_share(engine: str, text: str, kept: str) -> None:
    own = diagnose.deciding_line(engine, Line(1.0, 1.0, "stderr", text))
    assert own is not None and own.cause in ("kv-pool-too-small", "context-exceeds-kv-pool", "state-cache-too-small")
    diagnosis = told.explained(own, engine, ROWS, {})
    assert diagnosis.cause == own.cause and diagnosis.change.startswith(kept)
    assert not any(share in diagnosis.change for share in ("utilization", "mem-fraction"))
    assert "lower headroom.reserve, or free memory on rank 1" in diagnosis.change
    assert "rank 1 is the tightest" in diagnosis.summary
    derived = told.explained(own, engine, ROWS, {"terms": {"prefill": 5 * GIB}})
    assert "lower line.budget or headroom.pair_bytes" in derived.change


def test_other_advice_of_the_engine_is_kept() -> None:
    own = diagnose.deciding_line("sglang", Line(1.0, 1.0, "stderr", "ValueError: SWA pool (100 tokens) cannot hold even one "
                                                "request: the prefill admission floor is sliding_window_size (4096)"))
    assert own is not None
    assert told.explained(own, "sglang", ROWS, {}).change.startswith("raise --swa-full-tokens-ratio, or lower headroom.reserve")
    own = Diagnosis("kv-pool-too-small", "Too small.", (), "lower --max-total-tokens", False)
    assert told.explained(own, "sglang", ROWS, {}).change == own.change


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
