"""The hooks `ranks` and `line` inside a real vLLM on the CPU. Three servers, one after the other."""
from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import Proves, wait_until
from raw_engine import CACHE, RawEngine, interpreter
from tightrank_adapter import line, pages, wire

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PORT = 32500
BUDGET, MINIMUM, MAXIMUM = 1_500_000, 128, 1024  # vLLM's block on a CPU is 128 tokens, so the granule is 128
CONTEXT = 8192
LINE: dict[str, Any] = {"budget": BUDGET, "minimum": MINIMUM, "maximum": MAXIMUM, "granule": 64, "rule": "span",
                        "step": "granule"}
LENGTHS = (1, 2, 3, 5, 17, 64, 127, 128, 129, 500, 1000, 1024, 1025, 1500, 2048, 3000, 3333, 4500, 5999, 6000)
OUTPUT_TOKENS = 8


def tokens(count: int, seed: int = 0) -> list[int]:
    """Any tokens; another seed shares no prefix."""
    return [(index * 7919 + seed * 104729 + index * index) % 250 for index in range(count)]


def serve(directory: Path, port: int, settings: wire.Settings | None, *python: str) -> RawEngine:
    argv = [interpreter("vllm"), *python, "-m", "vllm.entrypoints.cli.main", "serve", str(CACHE / "models" / "dense"),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32",
            "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(MAXIMUM), "--max-num-seqs", "8",
            "--enforce-eager"]
    return RawEngine(directory, argv, port, settings, env={
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"})


def settings(drill: dict[str, Any] | None = None, **more: Any) -> wire.Settings:
    hooks = {"ranks": {wire.PEAKS: True}, "line": {**LINE, **more},
             "empty-cache": {"when": "every-chunk", "mark_bytes": 0}, "heads": {}}
    return wire.Settings("solo", 3, "vllm", hooks, drill)


def complete(engine: RawEngine, prompt: Sequence[int]) -> list[int]:
    """The greedy output tokens of one request."""
    status, body = engine.request("POST", "/v1/completions", {
        "model": "tiny", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True})
    assert status == 200, body
    return list(body["choices"][0]["token_ids"])


def complete_all(engine: RawEngine) -> list[list[int]]:
    return [complete(engine, tokens(length, seed)) for seed, length in enumerate(LENGTHS)]


class Plain(NamedTuple):
    """What a vLLM without the adapter did."""
    outputs: list[list[int]]
    hellos: list[wire.Hello]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """`-I` skips sitecustomize, PYTHONPATH and so our plugins: the adapter is asked for and not in force."""
    engine = serve(tmp_path_factory.mktemp("vllm") / "plain", PORT, settings(), "-I")
    try:
        return Plain(complete_all(engine.wait_ready()), engine.hellos())
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def steered(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawEngine]:
    """vLLM with both hooks in force."""
    engine = serve(tmp_path_factory.mktemp("vllm") / "steered", PORT + 1, settings())
    try:
        complete(engine.wait_ready(), tokens(9, 99))  # the first request compiles the sampler: up to 20 s
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def drilled(steered: RawEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawEngine]:
    """vLLM whose line raises inside the scheduler."""
    steered.stop()
    drill = {"where": "Steering.grant"}
    engine = serve(tmp_path_factory.mktemp("vllm") / "drilled", PORT + 2, settings(drill=drill))
    try:
        yield engine.wait_ready()
    finally:
        engine.stop()


def chunks(steps: Sequence[wire.Step]) -> list[list[int]]:
    return [chunk for step in steps for chunk in step.chunks]


def expected(prompt: int, cached: int = 0, budget: int = BUDGET) -> list[list[int]]:
    """The line's schedule for one prompt alone."""
    found, prefix = [], cached
    while prefix < prompt:
        left = prompt - prefix
        new = line.chunk_tokens(budget, prefix, minimum=MINIMUM, maximum=MAXIMUM, granule=128)
        if left <= MAXIMUM and line.fits(budget, prefix, left):   # the end of a prompt is not cut in two to be whole granules
            new = left
        new = min(new, left)
        found.append([prefix, new])
        prefix += new
    return found


def test_without_the_adapter_nobody_says_hello(plain: Plain) -> None:
    assert plain.hellos == []


def test_every_process_says_hello_with_its_hooks_in_force(steered: RawEngine, proves: Proves) -> None:
    main, core, worker = (steered.hello(role) for role in ("main", "engine-core", "worker"))
    in_force = {"state": wire.IN_FORCE, "wanted": "", "found": ""}
    assert main.pid == steered.process.pid
    assert main.hooks == {}
    assert core.hooks == {"ranks": in_force, "line": in_force}
    assert worker.hooks == {"ranks": in_force, "empty-cache": in_force, "heads": {      # it says what it found, and vLLM serves
        "state": wire.FAILED, "wanted": "vLLM's ROCm AITER MLA backend with FP8 prefill",
        "found": "attention backend CPU_ATTN on device cpu"}}
    assert worker.facts["cache_releases"] > 0
    assert (worker.rank, worker.tp_rank, worker.pp_rank, worker.dp_rank) == (0, 0, 0, 0)
    assert {core.engine_version, worker.engine_version} == {"0.32.0"}
    assert core.facts["granule_tokens"] == 128
    assert core.facts["maximum_tokens"] == MAXIMUM
    assert core.facts["context_tokens"] == CONTEXT
    assert core.facts["kv_tokens"] > CONTEXT
    assert core.facts["line_budget"] == BUDGET
    proves("vllm", core.engine_version, "ranks", "empty-cache", by="server")


def test_chunks_of_one_prompt_are_the_schedule_at_every_prefix(steered: RawEngine) -> None:
    before = len(steered.steps())
    complete(steered, tokens(7001, 100))
    steps = steered.steps_until(before, 7001)
    assert chunks(steps) == expected(7001)
    assert len({new for _, new in chunks(steps)}) >= 5  # the line bites: more than one size
    assert all(step.rows * step.width <= step.budget == BUDGET and not step.over for step in steps)
    assert all(step.milliseconds > 0 and step.peak_bytes > 1 << 28 for step in steps)
    assert [step.sequence for step in steps] == list(range(steps[0].sequence, steps[0].sequence + len(steps)))


def test_the_first_chunk_after_a_cached_prefix_counts_that_prefix(steered: RawEngine) -> None:
    shared = tokens(4000, 101)
    complete(steered, shared)
    before = len(steered.steps())
    complete(steered, shared + tokens(2500, 102))
    steps = steered.steps_until(before, 2500)
    assert chunks(steps) == expected(6500, cached=3968)


def test_prompts_in_flight_together_stay_under_the_line(steered: RawEngine, proves: Proves) -> None:
    lengths = (6000, 37, 2500, 1, 4100, 900, 1300, 3000)
    before = len(steered.steps())
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda item: complete(steered, tokens(item[1], 110 + item[0])), enumerate(lengths)))
    assert [len(answer) for answer in answers] == [OUTPUT_TOKENS] * len(lengths)
    steps = steered.steps_until(before, sum(lengths))
    assert sum(step.rows for step in steps) == sum(lengths)
    assert all(step.rows * step.width <= BUDGET and not step.over for step in steps)
    assert any(len(step.chunks) > 1 for step in steps)
    ends = set(lengths)
    slivers = [chunk for chunk in chunks(steps) if chunk[1] < line.SLIVER_TOKENS and sum(chunk) not in ends]
    assert slivers == []
    proves("vllm", steered.hello("engine-core").engine_version, "line", by="server")


def test_a_budget_cut_in_the_middle_of_a_prompt_takes_effect_and_the_prompt_ends(steered: RawEngine) -> None:
    before, prompt = len(steered.steps()), 8000
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(complete(steered, tokens(prompt, 120))))
    asking.start()
    try:
        wait_until(lambda: len(steered.steps()) > before, 60, "the first chunk")
        assert steered.control is not None
        steered.control.publish(BUDGET // 10)
        asking.join(120)
        assert steered.hello("engine-core").facts["line_budget"] == BUDGET // 10
    finally:
        steered.control.publish(BUDGET)
    assert [len(answer) for answer in answers] == [OUTPUT_TOKENS]
    steps = steered.steps_until(before, prompt)
    cut = [step for step in steps if step.budget == BUDGET // 10]
    assert 1 <= len(steps) - len(cut) < len(steps)
    assert all(step.budget == BUDGET // 10 for step in steps[-len(cut):])
    for step in cut:
        [[prefix, new]] = step.chunks
        fitting = line.chunk_tokens(BUDGET // 10, prefix, minimum=MINIMUM, maximum=MAXIMUM, granule=128)
        assert new == (fitting or MINIMUM) or prefix + new == prompt
        assert step.over == (step.rows * step.width > step.budget)
    assert cut[-1].over


def test_a_step_tells_the_memory_that_it_began_with(steered: RawEngine) -> None:
    steps = steered.steps()
    assert steps and all(step.rest_bytes and step.peak_bytes and step.peak_bytes >= step.rest_bytes for step in steps)
    looked = [step for step in steps if step.available_bytes is not None]
    assert looked and all(step.untouched_bytes is not None and step.untouched_bytes < step.available_bytes for step in looked)


def test_too_long_a_prompt_is_refused_by_the_engine(steered: RawEngine) -> None:
    status, body = steered.request("POST", "/v1/completions", {"model": "tiny", "prompt": tokens(CONTEXT + 1)})
    assert status == 400, body


def test_beats_say_that_nothing_is_left_in_flight(steered: RawEngine) -> None:
    complete(steered, tokens(300, 130))
    beats = pages.BeatReader(str(steered.directory), steered.hello("engine-core").pid)
    wait_until(lambda: beats.read().in_flight == 0, 10, "in flight 0")
    loops = beats.read().loops
    complete(steered, tokens(300, 131))
    assert beats.read().loops > loops
    worker = pages.BeatReader(str(steered.directory), steered.hello("worker").pid).read()
    assert worker.steps == len(steered.steps())
    assert worker.prefill_tokens == sum(step.rows for step in steered.steps())


def test_greedy_output_is_that_of_the_engine_alone(steered: RawEngine, plain: Plain) -> None:
    assert complete_all(steered) == plain.outputs
    assert len({tuple(output) for output in plain.outputs}) > len(LENGTHS) // 2  # not one answer to everything
    assert steered.faults() == []


def test_a_line_that_raises_answers_its_minimum_and_changes_no_token(drilled: RawEngine, plain: Plain) -> None:
    assert complete_all(drilled) == plain.outputs
    steps = drilled.steps()
    assert max(new for _, new in chunks(steps)) == MINIMUM
    faults = drilled.faults()
    assert {(fault.hook, fault.where, fault.replicated) for fault in faults} == {("line", "Steering.grant", False)}
    assert drilled.hello("engine-core").facts["faults"][0]["hook"] == "line"
