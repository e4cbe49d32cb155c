"""Admission: what can never fit is the client's to change; what cannot be served now may be tried again."""
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import LINE, TOO_SMALL, failed, status, worker
from tightrank.adapter import line
from tightrank.admission import FAILED_RETRY_SECONDS, STARTING_RETRY_SECONDS, AdmissionRequest, Verdict, admit
from tightrank.records import Phase, Shed, Status

NOW = 1000.0


def ask(held: Status, prompt: int, **more: Any) -> Verdict:
    return admit(held, AdmissionRequest(prompt, **more), NOW)


def test_a_fitting_request_is_admitted_with_the_largest_prompt() -> None:
    verdict = ask(status(), 8000, max_tokens=192)
    assert (verdict.status, verdict.worker, verdict.largest_prompt_tokens) == (200, "w0", 8000)
    assert verdict.body() == {"admit": True, "worker": "w0", "largest_prompt_tokens": 8000}


@pytest.mark.parametrize(("prompt", "answer", "largest"), [(8001, 192, 8000), (8192, 1, 8191), (1, 8192, 0), (1, 10**9, 0)])
def test_over_the_context_never_fits(prompt: int, answer: int, largest: int) -> None:
    verdict = ask(status(), prompt, max_tokens=answer)
    assert (verdict.status, verdict.code, verdict.param) == (400, "context_length_exceeded", "prompt_tokens")
    assert verdict.largest_prompt_tokens == largest and str(largest) in verdict.message
    assert verdict.retry_after_seconds is None


def test_the_line_at_the_present_budget_bounds_too() -> None:
    tight = worker(line_budget=1_000_000, context_tokens=None)
    longest = line.longest_prompt(1_000_000, minimum=256, granule=256)
    assert ask(status(tight), longest).status == 200
    refused = ask(status(tight), longest + 1)
    assert refused.status == 400 and refused.largest_prompt_tokens == longest


def test_a_remainder_that_fits_the_line_on_its_cached_prefix_is_taken() -> None:
    tight = worker(line_budget=1_000_000, context_tokens=None)
    prompt = line.longest_prompt(1_000_000, minimum=256, granule=256) + 500
    assert ask(status(tight), prompt, cached_tokens=prompt - 64).status == 200
    assert ask(status(tight), prompt, cached_tokens=prompt - 1000).status == 400


def test_no_known_limit_admits() -> None:
    verdict = ask(status(worker(line=None, context_tokens=None)), 10**9)
    assert verdict.status == 200 and verdict.largest_prompt_tokens is None


def test_never_fits_is_said_even_when_nothing_is_ready() -> None:
    assert ask(status(failed()), 100_000).status == 400


def test_a_failed_worker_gives_its_cause() -> None:
    verdict = ask(status(failed()), 10)
    assert (verdict.status, verdict.code) == (503, TOO_SMALL.cause)
    assert verdict.retry_after_seconds == FAILED_RETRY_SECONDS and TOO_SMALL.summary in verdict.message
    assert (verdict.cause, verdict.runbook) == (TOO_SMALL.cause, "docs/runbooks/causes.md#kv-pool-too-small")


def test_of_several_that_are_down_the_one_that_failed_is_named() -> None:
    verdict = ask(status(worker(name="a", ready=False, phase=Phase.STARTING), failed(name="b")), 10)
    assert (verdict.cause, verdict.retry_after_seconds) == (TOO_SMALL.cause, STARTING_RETRY_SECONDS)      # a may come


@pytest.mark.parametrize(("phase", "next_start", "retry"), [
    (Phase.STARTING, None, STARTING_RETRY_SECONDS), (Phase.BACKING_OFF, NOW + 9.2, 10 + STARTING_RETRY_SECONDS),
    (Phase.BACKING_OFF, NOW - 5, 1 + STARTING_RETRY_SECONDS), (Phase.STOPPED, None, FAILED_RETRY_SECONDS)])
def test_when_to_try_again(phase: Phase, next_start: float | None, retry: int) -> None:
    verdict = ask(status(worker(ready=False, phase=phase, next_start_unix=next_start)), 10)
    assert (verdict.status, verdict.code, verdict.retry_after_seconds) == (503, "not_ready", retry)
    assert verdict.cause is verdict.runbook is None


def test_a_draining_deployment_takes_nothing() -> None:
    assert ask(status(draining=True), 10).code == "draining"


def test_the_ready_worker_with_the_largest_budget_is_chosen() -> None:
    held = status(failed(name="a"), worker(name="b", line_budget=5_000_000), worker(name="c", line_budget=9_000_000))
    assert ask(held, 10).worker == "c"
    assert ask(held, 10, worker="b").worker == "b"
    assert ask(held, 10, worker="a").status == 503


def test_a_prompt_too_long_for_one_goes_to_the_other() -> None:
    held = status(worker(name="short", context_tokens=1024, line_budget=LINE.budget * 2), worker(name="long"))
    assert ask(held, 5000).worker == "long"


def test_unknown_workers_and_decode_workers_take_no_prompts() -> None:
    held = status(worker(name="p", role="prefill"), worker(name="d", role="decode"))
    assert ask(held, 10, worker="x").status == 404
    assert ask(held, 10, worker="d").status == 404
    assert ask(held, 10).worker == "p"


def test_a_prefill_worker_needs_a_decode_worker() -> None:
    held = status(worker(name="p", role="prefill"), failed(name="d", role="decode"))
    verdict = ask(held, 10)
    assert (verdict.status, verdict.code, verdict.cause) == (503, TOO_SMALL.cause, TOO_SMALL.cause)
    assert verdict.message.startswith("no decode worker is ready: d is failed")
    assert verdict.retry_after_seconds == FAILED_RETRY_SECONDS
    starting = status(worker(name="p", role="prefill"), worker(name="d", role="decode", ready=False, phase=Phase.STARTING))
    assert ask(starting, 10).retry_after_seconds == STARTING_RETRY_SECONDS


SHED = Shed(2048, 10, "host: 1700 MiB available, 164 MiB over the floor")


def test_while_memory_is_short_long_prompts_wait_and_short_ones_do_not() -> None:
    held = status(worker(shed=SHED))
    assert ask(held, 2048).status == 200
    refused = ask(held, 2049)
    assert (refused.status, refused.code, refused.param) == (429, "memory_pressure", "prompt_tokens")
    assert (refused.largest_prompt_tokens, refused.retry_after_seconds) == (2048, 10)
    assert "2048" in refused.message and SHED.why in refused.message
    assert ask(held, 100_000).status == 400, "what never fits is not to come back"


def test_what_is_cached_does_not_count_while_memory_is_short() -> None:
    held = status(worker(shed=SHED))
    assert ask(held, 4000, cached_tokens=1952).status == 200
    refused = ask(held, 4000, cached_tokens=1951)
    assert refused.status == 429 and refused.largest_prompt_tokens == 3999


def test_a_long_prompt_goes_where_memory_is_not_short() -> None:
    held = status(worker(name="a", shed=SHED, line_budget=10**9), worker(name="b"))
    assert ask(held, 5000).worker == "b" and ask(held, 100).worker == "a"
    assert ask(held, 5000, worker="a").status == 429


def test_a_decode_worker_that_is_short_of_memory_counts_unless_another_is_not() -> None:
    prefill, short = worker(name="p", role="prefill"), worker(name="d", role="decode", shed=SHED)
    assert ask(status(prefill, short), 5000).status == 429
    assert ask(status(prefill, short, worker(name="e", role="decode")), 5000).status == 200


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(1, 10**9), st.integers(1, 10**12))
def test_what_is_admitted_fits_the_context(prompt: int, cached: int, answer: int, budget: int) -> None:
    held = status(worker(line_budget=max(budget, LINE.floor_budget)))
    verdict = ask(held, prompt, cached_tokens=min(cached, prompt - 1), max_tokens=answer)
    assert (verdict.status == 200) == (prompt + answer <= 8192)
