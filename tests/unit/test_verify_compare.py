"""Two ramps side by side, and two sets of greedy answers: what counts as worse, as a near tie, as a difference."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank.verify.compare import band_rows, compare, size_rows
from tightrank.verify.parity import NEAR_TIE, Answer, Prompt, alike, from_json, judge, read, request, sentence, to_json
from tightrank.verify.ramp import Chunk, Outcome, Ramp, Size

GIB = 1 << 30


def size(tokens: int, first_token_seconds: float, outcome: Outcome = Outcome.PASSED, lowest: int = 4 * GIB) -> Size:
    chunks = tuple(Chunk(prefix, 512, first_token_seconds * 512 / tokens, None) for prefix in range(0, tokens, 512))
    return Size(tokens, outcome, "shed fires", 1, 1, 1e9, 1.0, first_token_seconds, chunks, lowest_bytes={"host": lowest})


def ramp(*sizes: Size, **target: Any) -> Ramp:
    return Ramp(1e9, {"engine": "vllm", **target}, 2 * GIB, GIB, (1024, 2048, 4096), 4, sizes)


A = ramp(size(1024, 1.0), size(2048, 2.0))


@pytest.mark.parametrize(("b", "verdict", "says"), [
    (A, "same", ""), (ramp(size(1024, 1.04), size(2048, 1.94)), "same", ""),
    (ramp(size(1024, 1.0), size(2048, 1.5)), "better", ""),
    (ramp(size(1024, 0.5), size(2048, 2.2)), "worse", "2,048: 931 tokens/s in B, 1,024 in A (0.909 of it)"),
    (ramp(size(1024, 1.0), size(2048, 0.5, Outcome.GUARD_EVENT)), "worse", "2,048: passed in A, in B guard-event: shed fires")])
def test_worse_is_slower_than_the_tolerance_or_not_passed_any_more(b: Ramp, verdict: str, says: str) -> None:
    found = compare(A, b, 0.05)
    assert found.verdict == verdict and (found.worse == ((says,) if says else ()))


def test_each_band_of_both_is_set_beside_the_other() -> None:
    b = ramp(size(2048, 4.0, lowest=3 * GIB), size(4096, 9.0), engine="sglang")
    found = compare(A, b, 0.6)
    assert list(band_rows(found))[1:] == [("2,048", "0 - 1,024", "1,024", "512", "0.500"),
                                          ("2,048", "1,024 - 2,048", "1,024", "512", "0.500")]
    assert found.only == (1024, 4096) and found.different == ("engine was vllm and is sglang",)
    assert list(size_rows(found))[1:] == [
        ("2,048", "1,024", "512", "0.500", "4.00 GiB", "3.00 GiB", "not known", "not known")]
    body = found.to_json()
    assert body["sizes"][0]["ratio"] == body["bands"][0]["ratio"] == 0.5
    assert (body["sizes"][0]["a"]["lowest_bytes"], body["sizes"][0]["b"]["lowest_bytes"]) == (4 * GIB, 3 * GIB)


def test_what_is_not_known_is_no_ratio() -> None:
    unseen = replace(size(1024, 1.0), first_token_seconds=None, chunks=(), lowest_bytes={})
    found = compare(A, ramp(unseen), 0.05)
    assert list(band_rows(found))[1][3:] == ("none", "") and found.verdict == "same"
    assert list(size_rows(found))[1] == ("1,024", "1,024", "passed", "", "4.00 GiB", "not known", "not known", "not known")


def test_ramps_without_a_common_size_are_not_compared() -> None:
    with pytest.raises(ValueError, match="no size in common: 1,024, 2,048 and none"):
        compare(A, ramp(), 0.05)


# --- parity -----------------------------------------------------------------------------------------------------------

PROMPT = Prompt(0, 64, 5, 250)


def answer(*tokens: int, gap: float | None = 2.0, logprob: float = -0.5, at: dict[int, float] | None = None) -> Answer:
    gaps = tuple((at or {}).get(index, gap) for index in range(len(tokens)))
    return Answer(PROMPT, tokens, (logprob,) * len(tokens), gaps)


@pytest.mark.parametrize(("a", "b", "result", "at"), [
    (answer(1, 2, 3), answer(1, 2, 3), "equal", None),
    (answer(1, 2, 3, at={1: 0.05}), answer(1, 9, 7, at={1: 0.02}), "near-tie", 1),
    (answer(1, 2, 3, at={1: NEAR_TIE}), answer(1, 9, 3, at={1: 0.0}), "different", 1),
    (answer(1, 2, 3, at={1: 0.05}), answer(1, 9, 3), "different", 1),
    (answer(1, 2, 3, at={2: 0.01}), answer(1, 9, 3, at={2: 0.01}), "different", 1),
    (answer(1, 2, 3), answer(1, 2), "different", 2),
    (answer(1, 2, gap=None), answer(1, 3, gap=None), "different", 1),
    (answer(1, 2, gap=None), answer(1, 3, gap=0.01), "near-tie", 1)])
def test_only_where_neither_was_sure_a_difference_is_a_near_tie(a: Answer, b: Answer, result: str, at: int | None) -> None:
    for first, second in ((a, b), (b, a)):
        verdict = judge(first, second)
        assert (verdict.result, verdict.at) == (result, at)


def test_logprobs_are_compared_up_to_the_first_difference() -> None:
    a, b = answer(1, 2, 3), replace(answer(1, 2, 9), logprobs=(-0.5, -0.75, -9.0))
    assert judge(a, b).largest_logprob_difference == 0.25


def test_one_difference_is_enough() -> None:
    equal, tie = judge(answer(1), answer(1)), judge(answer(1, gap=0.0), answer(2, gap=0.0))
    different = judge(answer(1), answer(2))
    assert alike([equal, tie]) and not alike([equal, tie, different])
    assert sentence([equal, tie, different]) == "1 of 3 answers are equal, 1 part at a near tie, 1 differ"


@given(st.integers(0, 100), st.integers(1, 300))
def test_a_prompt_is_the_same_each_time_and_unlike_the_others(number: int, tokens: int) -> None:
    prompt = Prompt(number, tokens, 5, 250)
    assert prompt.ids() == Prompt(number, tokens, 5, 250).ids() and len(prompt.ids()) == tokens
    assert all(5 <= token < 250 for token in prompt.ids())
    assert tokens < 20 or prompt.ids() != Prompt(number + 1, tokens, 5, 250).ids()


def test_what_both_engines_say_is_read() -> None:
    vllm = {"choices": [{"logprobs": {"tokens": ["token_id:7", "token_id:9"], "token_logprobs": [-0.1, -0.7], "top_logprobs": [
        {"token_id:7": -0.1, "token_id:3": -2.1}, {"token_id:9": -0.7}]}}]}
    sglang = {"meta_info": {"output_token_logprobs": [[-0.1, 7, None], [-0.7, 9, "x"]],
                            "output_top_logprobs": [[[-0.1, 7, None], [-2.1, 3, None]], [[-0.7, 9, None]]]}}
    wanted = Answer(PROMPT, (7, 9), (-0.1, -0.7), (2.0, None))
    assert read("vllm", PROMPT, vllm) == wanted == read("sglang", PROMPT, sglang)
    assert from_json(to_json("http://h:1", "vllm", "m", [wanted])) == (wanted,)
    assert request("vllm", "m", PROMPT, 3)[1]["prompt"] == request("sglang", "m", PROMPT, 3)[1]["input_ids"] == PROMPT.ids()


@pytest.mark.parametrize(("engine", "body"), [
    ("vllm", {}), ("vllm", {"choices": []}), ("vllm", {"choices": [{"logprobs": None}]}), ("vllm", []),
    ("sglang", {"meta_info": {}}),
    ("vllm", {"choices": [{"logprobs": {"tokens": ["a:7"], "token_logprobs": [-1], "top_logprobs": [{"a:7": -1}]}}]}),
    ("vllm", {"choices": [{"logprobs": {"tokens": [" a"], "token_logprobs": [-1], "top_logprobs": [{" a": -1}]}}]}),
    ("vllm", {"choices": [{"logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []}}]}),
    ("sglang", {"meta_info": {"output_token_logprobs": [[-1, 1, None]], "output_top_logprobs": [[]]}}),
    ("sglang", {"meta_info": {"output_token_logprobs": [[-1, 1, None]], "output_top_logprobs": [None]}})])
def test_an_answer_without_token_ids_is_refused(engine: str, body: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, IndexError, AttributeError)):
        read(engine, PROMPT, body)
