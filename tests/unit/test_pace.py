"""The model of time: what it recovers, from which samples, and when it says that it does not know."""
from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tightrank.plan import pace
from tightrank.plan.pace import CELL_SAMPLES, CELLS, FEWEST_SAMPLES, Pace, PaceMeter, PaceSample, fit, sample
from tightrank_adapter import wire

TRUE = Pace(4e-4, 1.2e-8, 0.02, 0)


def long_prompts(true: Pace, count: int, seed: int, noise: float = 0.0, outliers: float = 0.0, far: float = 10.0,
                 maximum: int = 2048) -> list[PaceSample]:
    """Chunks of prompts of many lengths: full ones, ends, and small prompts, with noise and with outliers both ways."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        prefix = rng.choice((0, 1, 2, 4, 8, 16, 32, 48)) * 2048
        new = maximum if rng.random() < 0.6 else rng.randint(1, maximum)
        seconds = true.chunk_seconds(new, prefix) * rng.lognormvariate(0, noise)
        if rng.random() < outliers:
            seconds *= far if rng.random() < 0.8 else 1 / far
        made.append(sample([[prefix, new]], seconds))
    return made


coefficients = st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-10, 1e-6), st.floats(1e-4, 0.2))


@given(coefficients, st.integers(0, 10**6))
def test_exact_samples_give_the_exact_terms(true: tuple[float, float, float], seed: int) -> None:
    found = fit(long_prompts(Pace(*true, 0), 64, seed))
    assert found is not None and found.samples == 64
    for tokens, prefix in ((2048, 0), (2048, 100_000), (64, 0), (64, 100_000)):
        assert found.chunk_seconds(tokens, prefix) == pytest.approx(Pace(*true, 0).chunk_seconds(tokens, prefix), rel=1e-3)


@given(coefficients, st.integers(0, 10**6), st.floats(0, 0.05), st.floats(3, 1000))
@settings(max_examples=60, deadline=None)
def test_noise_and_a_fifth_of_outliers_do_not_move_it(true: tuple[float, float, float], seed: int, noise: float,
                                                      far: float) -> None:
    made = long_prompts(Pace(*true, 0), 256, seed, noise, 0.2, far)
    found = fit(made)
    assert found is not None
    for tokens, prefix in ((2048, 0), (2048, 32_768), (2048, 98_304), (512, 98_304)):
        wanted = Pace(*true, 0).chunk_seconds(tokens, prefix)
        assert found.chunk_seconds(tokens, prefix) == pytest.approx(wanted, rel=0.06)


def test_least_squares_would_be_moved() -> None:
    """The same samples without the robust part: the test above is not won by easy samples."""
    made = long_prompts(TRUE, 256, 3, 0.03, 0.2, 20)
    rows: list[Any] = [(each.rows, each.pairs, 1.0, each.seconds) for each in made]
    plain = Pace(*pace._least(pace._gram(rows, [each.seconds ** -2 for each in made]), (0, 1, 2)), 0)
    assert abs(plain.chunk_seconds(2048, 0) / TRUE.chunk_seconds(2048, 0) - 1) > 0.2


@given(st.lists(st.tuples(st.integers(-5, 4096) | st.just(10**400), st.integers(-5, 10**6) | st.just(10**400),
                          st.floats(-1.0, 1e7) | st.sampled_from((float("inf"), float("nan")))), min_size=16, max_size=80))
@settings(deadline=None)
def test_whatever_comes_the_terms_are_finite_and_never_negative(made: list[tuple[int, int, float]]) -> None:
    found = fit([sample([[prefix, new]], seconds) for new, prefix, seconds in made])
    if found is not None:
        assert all(0 <= term < float("inf") for term in (found.row_seconds, found.pair_seconds, found.step_seconds))
        assert found.samples >= FEWEST_SAMPLES


@given(st.integers(1, 8192), st.integers(0, 10**6), st.integers(0, 200), st.integers(0, 10**6))
@settings(deadline=None)
def test_all_alike_tell_nothing_apart(new: int, prefix: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    assert fit([sample([[prefix, new]], TRUE.chunk_seconds(new, prefix) * rng.lognormvariate(0, 0.03))
                for _ in range(count)]) is None


@given(st.integers(64, 8192), st.integers(0, 10**6))
@settings(deadline=None)
def test_chunks_of_one_size_put_the_step_into_its_rows(new: int, seed: int) -> None:
    rng = random.Random(seed)
    made = [sample([[prefix * 1000, new]], TRUE.chunk_seconds(new, prefix * 1000) * rng.lognormvariate(0, 0.01))
            for prefix in range(200)]
    found = fit(made)
    assert found is not None and found.step_seconds == 0 and found.longest_tokens == 199_000 + new
    for prefix in (0, 60_000, 199_000):
        assert found.chunk_seconds(new, prefix) == pytest.approx(TRUE.chunk_seconds(new, prefix), rel=0.03)


def test_too_few_samples() -> None:
    made = long_prompts(TRUE, FEWEST_SAMPLES, 1)
    assert fit(made) is not None and fit(made[1:]) is None and fit([]) is None


def test_pairs_are_those_of_causal_rows() -> None:
    assert [pace.pairs(3, prefix) for prefix in (0, 10)] == [1 + 2 + 3, 11 + 12 + 13]
    assert sample([[10, 3], [0, 3], [7, 0]], 1.5) == PaceSample(6, 42, 13, 1.5)


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    given_pace = Pace(1e-3, 1e-6, 0.5, 20)
    assert given_pace.prompt_seconds(250, lambda prefix: 100) == pytest.approx(
        sum(given_pace.chunk_seconds(new, prefix) for new, prefix in ((100, 0), (100, 100), (50, 200))))
    assert given_pace.prompt_seconds(50, lambda prefix: {400: 30, 430: 20}[prefix], 400) == pytest.approx(
        given_pace.chunk_seconds(30, 400) + given_pace.chunk_seconds(20, 430))
    assert given_pace.prompt_seconds(0, lambda prefix: 0) == 0
    with pytest.raises(ValueError, match="prefix=100: no chunk is allowed there, so 300 tokens are never done"):
        given_pace.prompt_seconds(300, lambda prefix: 100 if prefix < 100 else 0)


# --- a worker's samples -----------------------------------------------------------------------------------------------

def step(sequence: int, prefix: int, new: int, end: float, seconds: float, pid: int = 7) -> wire.Step:
    return wire.Step(1, pid, sequence, 0, int(end * 1e9), new, prefix + new, 0, False, seconds * 1000, None, [[prefix, new]])


def prompt(meter: PaceMeter, true: Pace, tokens: int, launch: float | None = None, sequence: int = 1) -> int:
    """The records of one prompt. `launch`: its steps end, for the record, this long after their start."""
    now, at = 100.0, 0
    while at < tokens:
        new = min(2048, tokens - at)
        seconds = true.chunk_seconds(new, at)
        told = seconds if launch is None else launch
        meter.learn(step(sequence, at, new, now + told, told), launch is None)
        now, at, sequence = now + seconds, at + new, sequence + 1
    return sequence


def test_a_meter_finds_the_pace_of_its_records() -> None:
    meter = PaceMeter()
    assert meter.pace is None
    for tokens in (100_000, 700, 1500, 300, 64, 30_000, 900):
        prompt(meter, TRUE, tokens)
    found = meter.pace
    assert found is not None and found.longest_tokens == 100_000
    assert found.prompt_seconds(100_000, lambda prefix: 2048) == pytest.approx(
        TRUE.prompt_seconds(100_000, lambda prefix: 2048), rel=0.01)
    meter.forget()
    assert meter.pace is None


def test_a_record_that_ends_at_the_launch_counts_until_the_next_chunk_starts() -> None:
    meter, sequence = PaceMeter(), 1
    for tokens in (100_000, 20_000, 60_000):
        sequence = prompt(meter, TRUE, tokens, launch=0.002, sequence=sequence)
    found = meter.pace
    assert found is not None
    for prefix in (0, 50_000, 90_000):
        assert found.chunk_seconds(2048, prefix) == pytest.approx(TRUE.chunk_seconds(2048, prefix), rel=0.01)


def test_across_a_lost_record_another_prompt_or_process_nothing_is_counted() -> None:
    meter = PaceMeter()
    for number, (sequence, prefix, pid) in enumerate(((1, 0, 7), (3, 2048, 7), (4, 0, 7), (5, 0, 7), (6, 2048, 8))):
        meter.learn(step(sequence, prefix, 2048, 100.0 + number, 0.001, pid), whole=False)
    assert not meter._cells


def test_memory_is_bounded_and_a_long_prompt_is_not_driven_out() -> None:
    meter = PaceMeter()
    prompt(meter, TRUE, 100_000)
    for number in range(3000):
        prompt(meter, TRUE, 1 + number % 700)
    assert max(each.keys for cell in meter._cells.values() for each in cell) == 100_000
    for number in range(5000):
        new, prefix = 1 << number % 14, 1 << number % 23
        meter.learn(step(number, prefix, new, 100.0, 0.5), whole=True)
    assert len(meter._cells) <= CELLS and sum(map(len, meter._cells.values())) <= CELLS * CELL_SAMPLES


def test_garbage_in_a_record_is_left_out() -> None:
    meter = PaceMeter()
    for chunks in ([], [[0, 0]], [[5, -3]]):
        meter.learn(step(1, 0, 5, 100.0, 0.5)._replace(chunks=chunks), whole=True)
    for milliseconds in (-0.5, 0.0, float("nan"), float("inf")):
        meter.learn(step(1, 0, 5, 100.0, 0.5)._replace(milliseconds=milliseconds), whole=True)
        meter.learn(step(2, 5, 5, 100.0, 0.5)._replace(milliseconds=milliseconds), whole=False)
    meter.learn(step(1, 0, 5, 100.0, 0.5)._replace(chunks=[[10**400, 10**400]]), whole=True)
    assert not meter._cells and meter.pace is None
