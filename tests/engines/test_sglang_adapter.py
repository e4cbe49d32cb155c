"""The hooks in a real SGLang on the CPU, without a supervisor: what its schedulers really put into their batches."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers import ROOT, Proves, free_ports, wait_until
from raw_engine import RawEngine, interpreter, wire
from tightrank_adapter import line, pages

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STUBS = str(ROOT / "scripts" / "cpu" / "stubs")
MINIMUM, MAXIMUM, GRANULE, BUDGET = 64, 1024, 64, 1_500_000
KEYWORDS = {"minimum": MINIMUM, "maximum": MAXIMUM, "granule": GRANULE}
HOOKS = {"ranks": {wire.PEAKS: True}, "line": {"budget": BUDGET, **KEYWORDS},
         "empty-cache": {"when": "every-chunk", "mark_bytes": 0}}
LENGTHS = (1, 2, 63, 64, 65, 100, 255, 256, 511, 700, 1000, 1023, 1024, 1025, 1500, 2048, 2500, 3000, 4097, 6000)
MIXED = (3000, 40, 700, 2100, 5, 1024, 330, 1500)
FLAGS = ("--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
         "--max-total-tokens", "32768", "--max-running-requests", "16", "--chunked-prefill-size", str(MAXIMUM),
         "--sleep-on-idle")
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
# `python -I` takes no PYTHONPATH, so the stand-ins go onto sys.path by hand; the adapter does not.
ISOLATED = ("import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
            "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)")
Start = Callable[..., RawEngine]


@pytest.fixture(scope="module")
def start(dense_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a SGLang; the one before it is stopped first, so that one at a time holds memory."""
    running: list[RawEngine] = []

    def begin(*flags: str, drill: dict[str, Any] | None = None, isolated: bool = False,
              env: dict[str, str] | None = None) -> RawEngine:
        while running:
            running.pop().stop()
        settings = wire.Settings("w", 1, "sglang", HOOKS, drill)
        port = free_ports(1)[0]
        program = ["-I", "-c", ISOLATED, STUBS] if isolated else ["-m", "sglang.launch_server"]
        argv = [interpreter("sglang"), *program, "--model-path", dense_model, "--port", str(port), *FLAGS, *flags]
        engine = RawEngine(tmp_path_factory.mktemp("sglang") / "run", argv, port, settings, python_path=STUBS,
                           env={**ENVIRONMENT, **(env or {})})
        running.append(engine)
        return engine.wait_ready()

    yield begin
    while running:
        running.pop().stop()


def prompt(length: int, salt: int) -> list[int]:
    """Token IDs that no prompt of another salt begins with (the prefix cache would know that one token)."""
    return [3 + salt, *((place * 7 + salt * 13) % 250 + 3 for place in range(1, length))]


def generate(engine: RawEngine, ids: list[int], tokens: int = 4) -> list[int]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, answer = engine.request("POST", "/generate", {"input_ids": ids, "sampling_params": sampling})
    assert status == 200, answer
    assert len(answer["output_ids"]) == tokens
    return list(answer["output_ids"])


def all_at_once(engine: RawEngine, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: generate(engine, ids, 8), prompts))


def mark(engine: RawEngine, rank: int = 0) -> int:
    return len([step for step in engine.steps() if step.rank == rank])


def set_budget(engine: RawEngine, value: Any) -> bool:
    status, answer = engine.request("POST", "/set_internal_state", {"server_args": {"tightrank_line_budget": value}})
    return status == 200 and answer == [True]


@contextlib.contextmanager
def budget(engine: RawEngine, value: int) -> Iterator[None]:
    assert set_budget(engine, value)
    yield
    assert set_budget(engine, BUDGET)


def assert_on_schedule(steps: list[wire.Step], budget: int = BUDGET) -> None:
    """Every chunk of these steps, one request alone, is the line's; the last one is what is left."""
    for step in steps[:-1]:
        [[prefix, new]] = step.chunks
        assert new == line.chunk_tokens(budget, prefix, **KEYWORDS), step
    [[prefix, new]] = steps[-1].chunks
    assert new <= line.chunk_tokens(budget, prefix, **KEYWORDS)


def assert_under_the_line(steps: list[wire.Step]) -> None:
    for step in steps:
        assert step.rows == sum(new for _, new in step.chunks)
        assert step.width == max(prefix + new for prefix, new in step.chunks)
        assert step.rows * step.width <= step.budget, step
        assert not step.over


@pytest.fixture(scope="module")
def expected(start: Start) -> list[list[int]]:
    """The greedy output of prompts of LENGTHS from the engine alone: started so that sitecustomize and plugins are
    skipped, which leaves no hello and no record."""
    engine = start(isolated=True)
    outputs = [generate(engine, prompt(length, salt)) for salt, length in enumerate(LENGTHS)]
    assert not engine.hellos() and not engine.records
    return outputs


@pytest.fixture(scope="module")
def engine(expected: list[list[int]], start: Start) -> RawEngine:
    return start()


def test_every_process_says_hello_with_its_hooks_in_force(engine: RawEngine, proves: Proves) -> None:
    assert {hello.role for hello in engine.hellos()} == {"main", "scheduler", "detokenizer"}
    scheduler = engine.hello("scheduler")
    assert {name: hook["state"] for name, hook in scheduler.hooks.items()} == dict.fromkeys(HOOKS, "in-force")
    assert (scheduler.rank, scheduler.tp_rank, scheduler.pp_rank) == (0, 0, 0)
    assert scheduler.engine_version.startswith("0.")
    assert scheduler.facts["line_budget"] == BUDGET and scheduler.facts["granule_tokens"] == GRANULE
    assert all(wire.start_time(hello.pid) == hello.start_time for hello in engine.hellos())
    proves("sglang", engine.hello("scheduler").engine_version, "ranks", by="server")


def test_chunks_are_the_schedule_at_every_prefix_cold_and_on_a_cached_prefix(engine: RawEngine) -> None:
    before, ids = mark(engine), prompt(6000, 100)
    generate(engine, ids)
    cold = engine.steps_until(before, 6000)
    assert [step.chunks[0][0] for step in cold] == [sum(s.rows for s in cold[:i]) for i in range(len(cold))]
    assert_on_schedule(cold)
    assert_under_the_line(cold)
    assert len({step.rows for step in cold}) > 5, "the line must bind for this to show anything"

    before = mark(engine)
    generate(engine, ids + prompt(2000, 101))
    warm = engine.steps_until(before, 2000)
    assert warm[0].chunks[0][0] >= 6000
    assert_on_schedule(warm)
    assert_under_the_line(warm)


def test_mixed_prompts_in_flight_keep_every_batch_under_the_line(engine: RawEngine, proves: Proves) -> None:
    before, prompts = mark(engine), [prompt(length, 200 + salt) for salt, length in enumerate(MIXED)]
    outputs = all_at_once(engine, prompts)
    steps = engine.steps_until(before, sum(MIXED))
    assert_under_the_line(steps)
    assert any(len(step.chunks) > 1 for step in steps), "no batch held two prompts"
    for step in steps:
        assert sum(new >= GRANULE for _, new in step.chunks) or step.rows < GRANULE
    assert outputs == [generate(engine, ids, 8) for ids in prompts]
    proves("sglang", engine.hello("scheduler").engine_version, "line", by="server")


def test_the_heap_goes_back_after_every_chunk(engine: RawEngine, proves: Proves) -> None:
    """The counter is written at most once a second."""
    before = mark(engine)
    time.sleep(1.1)
    generate(engine, prompt(3000, 250))
    steps = engine.steps_until(before, 3000)
    assert engine.hello("scheduler").facts["cache_releases"] >= before
    time.sleep(1.1)
    generate(engine, prompt(70, 251))
    wait_until(lambda: engine.hello("scheduler").facts["cache_releases"] >= before + len(steps), 10, "the counter")
    proves("sglang", engine.hello("scheduler").engine_version, "empty-cache", by="server")


def test_budget_cut_tenfold_in_the_middle_of_a_prompt(engine: RawEngine) -> None:
    before = mark(engine)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, engine, prompt(6000, 300))
        wait_until(lambda: mark(engine) - before >= 3, 60, "the prompt is under way")
        with budget(engine, BUDGET // 10):
            answer.result(timeout=180)
            steps = engine.steps_until(before, 6000)
            assert engine.hello("scheduler").facts["line_budget"] == BUDGET // 10
    cut = [step for step in steps if step.budget == BUDGET // 10]
    assert cut and steps[0].budget == BUDGET
    for step in cut[:-1]:
        [[prefix, new]] = step.chunks
        assert new == (line.chunk_tokens(BUDGET // 10, prefix, **KEYWORDS) or MINIMUM)
        assert step.over == (step.rows * step.width > step.budget)
    assert any(step.over for step in cut)


@pytest.mark.parametrize("value", [0, -5, 1.5, 1e6])
def test_a_bad_budget_is_refused_and_changes_nothing(engine: RawEngine, value: float) -> None:
    assert not set_budget(engine, value)
    assert engine.hello("scheduler").facts["line_budget"] == BUDGET


def test_another_key_beside_ours_still_reaches_the_engine(engine: RawEngine) -> None:
    def both(other: str) -> Any:
        body = {"server_args": {"tightrank_line_budget": 10**6, other: 8}}
        return engine.request("POST", "/set_internal_state", body)
    assert both("no_such_key") == (200, [False])
    assert engine.hello("scheduler").facts["line_budget"] == BUDGET
    assert both("pp_max_micro_batch_size") == (200, [True])
    assert engine.hello("scheduler").facts["line_budget"] == 10**6
    assert set_budget(engine, BUDGET)


def test_greedy_output_is_that_of_the_engine_alone(engine: RawEngine, expected: list[list[int]]) -> None:
    assert [generate(engine, prompt(length, salt)) for salt, length in enumerate(LENGTHS)] == expected


def test_peak_time_and_beat_are_measured(engine: RawEngine) -> None:
    pid, before = engine.hello("scheduler").pid, mark(engine)
    first = pages.BeatReader(str(engine.directory), pid).read()
    generate(engine, prompt(500, 400))
    [step] = engine.steps_until(before, 500)
    assert step.pid == pid and step.milliseconds > 0
    assert step.peak_bytes is not None and step.peak_bytes > 50 << 20
    last = pages.BeatReader(str(engine.directory), pid).read()
    assert last.loops > first.loops and last.steps > first.steps
    assert last.prefill_tokens - first.prefill_tokens >= 500
    assert not engine.faults()


def test_a_step_tells_the_memory_that_it_began_with(engine: RawEngine) -> None:
    before = mark(engine)
    generate(engine, prompt(3000, 211))
    steps = engine.steps_until(before, 3000)
    assert all(step.rest_bytes and step.peak_bytes and step.peak_bytes >= step.rest_bytes for step in steps)
    looked = [step for step in engine.steps() if step.available_bytes is not None]
    assert looked and all(step.untouched_bytes is not None and step.untouched_bytes < step.available_bytes for step in looked)


def test_too_long_a_prompt_is_refused_by_the_engine(engine: RawEngine) -> None:
    body = {"input_ids": prompt(40_000, 450), "sampling_params": {"max_new_tokens": 1}}
    assert engine.request("POST", "/generate", body)[0] == 400


def test_tensor_parallel_ranks_decide_alike(start: Start) -> None:
    engine = start("--tp", "2", "--page-size", "16", "--enable-mixed-chunk", env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    ranks = {hello.rank: hello for hello in engine.hellos() if hello.role == "scheduler"}
    assert {number: hello.tp_rank for number, hello in ranks.items()} == {0: 0, 1: 1}
    assert all(hook["state"] == "in-force" for hello in ranks.values() for hook in hello.hooks.values())
    before = [mark(engine, rank) for rank in (0, 1)]
    all_at_once(engine, [prompt(length, 460 + salt) for salt, length in enumerate(MIXED)])
    with budget(engine, BUDGET // 4):
        generate(engine, prompt(3000, 470))
        first, second = (engine.steps_until(before[rank], sum(MIXED) + 3000, rank) for rank in (0, 1))
    assert [(step.chunks, step.budget) for step in first] == [(step.chunks, step.budget) for step in second]
    assert_under_the_line(first)
    assert {step.budget for step in first} == {BUDGET, BUDGET // 4}


def test_a_raising_function_leaves_the_tokens_and_the_least_chunk(start: Start, expected: list[list[int]]) -> None:
    engine = start("--disable-radix-cache", drill={"where": "PrefillAdder.add_chunked_req"})
    before = mark(engine)
    assert [generate(engine, prompt(length, salt)) for salt, length in enumerate(LENGTHS)] == expected
    steps = engine.steps_until(before, sum(LENGTHS))
    started = {i for i, step in enumerate(steps) if step.chunks[0][0]}
    assert started and all(steps[i].rows <= MINIMUM for i in started)
    scheduler = engine.hello("scheduler")
    assert scheduler.facts["fault_count"] == 3, "after three faults the hook answers its fallback only"
    assert all(fault["replicated"] and "drill" in fault["error"] for fault in scheduler.facts["faults"])
    assert {fault.where for fault in engine.faults()} == {"PrefillAdder.add_chunked_req"}
