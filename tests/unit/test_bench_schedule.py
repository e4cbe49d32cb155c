"""scripts/bench/schedule: what was measured is what it says, and `auto` keeps what it promises."""
from __future__ import annotations

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import pytest
from helpers import SUPERVISOR, run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from tightrank.plan import pace

BENCH = SUPERVISOR.parent / "scripts" / "bench" / "schedule"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    loader = SourceFileLoader("bench_schedule", str(BENCH))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    __import__("sys").modules[loader.name] = module      # dataclasses look their module up
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(bench: ModuleType) -> dict[tuple[str, int], Any]:
    """(schedule, prompt in units of 1024 tokens) -> its run with the defaults; JSON as it is printed."""
    answer = run_command([BENCH, "--json", "--lengths", "98304,131072,204800,262144,512000"])
    assert answer.returncode == 0, answer.stderr
    return {(each["name"], one["tokens"] >> 10): one for each in json.loads(answer.stdout)["schedules"]
            for one in each["prompts"]}


@pytest.mark.parametrize(("schedule", "prompt", "fits"), [
    ("static 2048", 96, True),        # 2.05e8: ok
    ("static 2048", 128, False),      # 2.7e8: the guard fired (boot 11)
    ("static 1024", 200, True),       # 2.13e8: ok
    ("static 1024", 256, False),      # 2.6e8: the guard fired, by 20 MB (boot 12)
    ("published", 500, True), ("span", 500, True), ("auto", 500, True)])
def test_what_fitted_fits_and_where_the_guard_fired_it_fires(runs: dict[tuple[str, int], Any], schedule: str, prompt: int,
                                                             fits: bool) -> None:
    assert runs[schedule, prompt]["fits"] is fits


def test_the_guard_fires_by_as_much_as_it_did(runs: dict[tuple[str, int], Any]) -> None:
    assert runs["static 1024", 256]["lowest_available_bytes"] == pytest.approx(1.5e9 - 20e6, abs=5e6)


def test_the_published_estimate_of_the_longest_prompt(runs: dict[tuple[str, int], Any]) -> None:
    assert runs["published", 500]["seconds"] == pytest.approx(7 * 60, rel=0.05)


@pytest.mark.parametrize(("chunk", "first", "last", "slowest", "fastest"), [
    (2048, 0, 98_000, 2000, 2200), (1024, 98_000, 195_000, 1500, 1700), (512, 195_000, 390_000, 1100, 1300),
    (256, 390_000, 780_000, 750, 850)])
def test_the_pace_is_that_of_the_published_bands(bench: ModuleType, chunk: int, first: int, last: int, slowest: int,
                                                 fastest: int) -> None:
    seconds = bench.PACE.prompt_seconds(last - first, lambda prefix: chunk, first)
    assert slowest <= (last - first) / seconds <= fastest


def test_chunks_of_1024_are_15_percent_slower(bench: ModuleType) -> None:
    one, two = (bench.PACE.prompt_seconds(98_304, lambda prefix, size=size: size) for size in (2048, 1024))
    assert two / one == pytest.approx(1.15, abs=0.01)


def test_longer_chunks_are_faster_and_auto_is_never_slower_than_the_same_line_lower(runs: dict[tuple[str, int], Any]) -> None:
    for prompt in (128, 200, 256, 500):
        assert runs["auto", prompt]["seconds"] <= runs["span", prompt]["seconds"] < runs["published", prompt]["seconds"]


@given(st.integers(3 * 10**9, 10**12), st.floats(0.5, 50), st.floats(0, 50_000), st.floats(0, 2000), st.integers(1, 600_000),
       st.sampled_from((64, 128, 256)))
@settings(deadline=None, max_examples=50)
def test_auto_leaves_guard_and_margin(bench: ModuleType, available: int, pair_bytes: float, row_bytes: float, kv_bytes: float,
                                      tokens: int, granule: int) -> None:
    memory = bench.Memory(available, 10**9, 5 * 10**8, pair_bytes, row_bytes, kv_bytes)
    budget = memory.budget(2048, tokens)
    if budget < 256 * 256:
        with pytest.raises(ValueError, match="does not hold one chunk"):
            bench.schedules(memory, 2048, tokens, granule)
        return
    auto = bench.schedules(memory, 2048, tokens, granule)[-1]
    run = bench.run(auto, tokens, memory, bench.PACE)
    assert run.seconds is None or (run.fits and run.lowest_available_bytes >= 1.5e9 - 1)
    assert run.steps == 0 or sum(new for _, new in pace.chunks(tokens, auto.chunk)) == tokens


def test_the_table_and_the_mix(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--lengths", "65536,262144", "--mix", "65536:9,262144:1"]) == 0
    printed = capsys.readouterr().out
    assert len([text for text in printed.splitlines() if " published " in text]) == 3
    row, = (text for text in printed.splitlines() if "static 1024" in text and "%" in text)
    assert row.split()[-1] == "262144" and "69.2%" in row


def test_memory_that_holds_no_chunk_is_an_error(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--available", "2.0e9"])
    assert "auto: a budget of 0 token² does not hold one chunk of 256 tokens" in capsys.readouterr().err
