"""The ladder of levels: fires in order and in time, goes back, and stays quiet over a day of noise."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from levels_traces import FLOOR, GIB, MIB, RULES, Trace, drive, fired, noisy, ramp
from tightrank.levels import ladder as levels
from tightrank.levels.ladder import GAP_SECONDS, LEVELS, STEPS, Ladder, Rules, Sample, advance

AMPLE = FLOOR + 8 * GIB


def run(samples: Sequence[tuple[float, int | None]], rules: Rules = RULES, ladder: Ladder | None = None) -> Ladder:
    ladder = ladder or Ladder()
    for second, available in samples:
        ladder = advance(ladder, rules, Sample(second, available))
    return ladder


def steady(available: int | None, seconds: float, begin: float = 0.0) -> list[tuple[float, int | None]]:
    return [(begin + index * 0.25, available) for index in range(int(seconds * 4) + 1)]


def depths(ladder: Ladder) -> list[int]:
    return [rung.depth for rung in ladder.rungs]


def test_a_level_fires_after_its_duration_and_not_before() -> None:
    under = FLOOR + 400 * MIB
    assert depths(run(steady(under, 0.75))) == [0, 0, 0]
    assert depths(run(steady(under, 1.0))) == [STEPS, 0, 0]
    assert depths(run(steady(under, 60.0))) == [STEPS, 0, 0], "only the marks that it is under"


def test_under_all_marks_they_fire_one_after_the_other() -> None:
    seen = [depths(run(steady(FLOOR + 10 * MIB, seconds))) for seconds in (0.75, 1.0, 2.0, 2.25)]
    assert seen == [[0, 0, 0], [STEPS, 0, 0], [STEPS, 1, 0], [STEPS, 1, 1]]


@pytest.mark.parametrize(("rate", "spare"), [(5, 20.0), (50, 3.0), (200, 1.0), (500, 1.0), (1000, 1.0), (2000, 0.5)])
def test_a_ramp_fires_all_in_order_with_time_to_spare(rate: int, spare: float) -> None:
    """From 8 GiB over the floor; at 2 GiB/s, what one core can fill, that is 4 s in all."""
    found = fired(ramp(AMPLE, rate * MIB, jitter=20 * MIB), 30.0 + 8 * GIB / (rate * MIB))
    floor_at = 30.0 + (AMPLE - FLOOR) / (rate * MIB)
    first = {name: next(act.second for act in found if act.name == name) for name in LEVELS}
    assert list(first) == sorted(first, key=lambda name: first[name])
    assert floor_at - first["abort"] >= spare, f"{first}, floor at {floor_at:.2f}"
    assert all(act.available_bytes > FLOOR for act in found if act.second <= first["abort"])


@pytest.mark.parametrize("rate", [50, 500])
def test_a_ramp_that_stops_between_two_marks_goes_no_further(rate: int) -> None:
    """Where the first level is enough the others need not act; the prediction is forgotten once memory falls no more."""
    stops = ramp(AMPLE, rate * MIB, until=FLOOR + 400 * MIB)
    ladder = [ladder for _, ladder in drive(stops, 400.0)][-1]
    assert ladder.depth("tighten") == STEPS and ladder.depth("shed") == ladder.depth("abort") == 0


def test_a_fast_ramp_that_stops_far_away_leaves_nothing_in_force() -> None:
    found = fired(ramp(AMPLE, 500 * MIB, until=FLOOR + 3 * GIB), 200.0)
    assert [act.name for act in found if act.name == "abort"] == []
    assert depths([ladder for _, ladder in drive(ramp(AMPLE, 500 * MIB, until=FLOOR + 3 * GIB), 200.0)][-1]) == [0, 0, 0]


def test_it_goes_back_last_level_first_and_tighten_by_one_step_a_pause() -> None:
    ladder = run(steady(FLOOR + 10 * MIB, 4.0))
    seen = [depths(ladder)]
    for second, available in steady(AMPLE, 100.0, begin=4.25):
        ladder = advance(ladder, RULES, Sample(second, available))
        if depths(ladder) != seen[-1]:
            seen.append(depths(ladder))
    assert seen == [[4, 1, 1], [4, 1, 0], [4, 0, 0], [3, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert not ladder.busy


def test_within_the_hysteresis_it_stays_and_neither_fires_again() -> None:
    ladder = run(steady(FLOOR + 400 * MIB, 2.0))
    ladder = run(steady(FLOOR + 700 * MIB, 120.0, begin=2.25), ladder=ladder)
    assert depths(ladder) == [STEPS, 0, 0] and ladder.rungs[0].acts == 1


def test_jitter_around_a_mark_does_not_make_it_flap() -> None:
    noise = noisy(3, FLOOR + 560 * MIB, spikes_an_hour=0.001)
    ladder = [ladder for _, ladder in drive(noise, 3600.0)][-1]
    assert ladder.rungs[0].acts <= 1


def test_halfway_back_it_fires_again_at_once() -> None:
    ladder = run(steady(FLOOR + 10 * MIB, 1.0))
    ladder = run(steady(AMPLE, 22.0, begin=1.25), ladder=ladder)
    assert 0 < ladder.depth("tighten") < STEPS
    ladder = run(steady(FLOOR + 10 * MIB, 1.0, begin=23.5), ladder=ladder)
    assert ladder.depth("tighten") == STEPS and ladder.rungs[0].acts == 2


def test_abort_acts_again_after_each_pause_while_memory_stays_under() -> None:
    assert run(steady(FLOOR + 10 * MIB, 2.25)).rungs[2].acts == 1
    assert run(steady(FLOOR + 10 * MIB, 7.0)).rungs[2].acts == 1
    assert run(steady(FLOOR + 10 * MIB, 7.25)).rungs[2].acts == 2
    ladder = run(steady(FLOOR + 10 * MIB, 7.0))
    assert run(steady(FLOOR + 160 * MIB, 60.0, begin=7.25), ladder=ladder).rungs[2].acts == 1, "within the hysteresis"


@pytest.mark.parametrize("seconds", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("base", [700, 1000, 1500, 3000])
def test_a_spike_shorter_than_the_duration_fires_nothing(seconds: float, base: int) -> None:
    def spike(second: float) -> int:
        return FLOOR + base * MIB - (GIB if 60.0 <= second < 60.0 + seconds else 0)

    assert fired(spike, 120.0) == []


@pytest.mark.parametrize(("name", "trace"), [
    ("spikes and jitter", noisy(1, FLOOR + 1700 * MIB)),
    ("many spikes, just over the marks", noisy(2, FLOOR + 900 * MIB, spikes_an_hour=60.0)),
    ("a leak that ends above", noisy(4, FLOOR + 4 * GIB, leak_an_hour=100 * MIB)),
    ("page cache", noisy(5, FLOOR + 3 * GIB, swing=2 * GIB))])
def test_a_day_of_noise_fires_nothing(name: str, trace: Trace) -> None:
    assert fired(trace, 86_400.0) == [], name


def test_a_slow_leak_is_met_level_by_level_with_minutes_to_spare() -> None:
    found = fired(noisy(6, FLOOR + GIB, jitter=50 * MIB, spikes_an_hour=0.001, leak_an_hour=512 * MIB), 7100.0)
    order = list(dict.fromkeys(act.name for act in found))
    assert order == list(LEVELS)
    assert 7200.0 - next(act.second for act in found if act.name == "abort") > 300


# --- what must not count ----------------------------------------------------------------------------------------------

def test_unknown_fires_nothing_and_keeps_nothing() -> None:
    assert not run(steady(None, 60.0)).busy
    ladder = run(steady(FLOOR + 10 * MIB, 3.0))
    assert depths(run(steady(None, 100.0, begin=3.25), ladder=ladder)) == [0, 0, 0]
    assert depths(run([(0.0, FLOOR), (0.25, None), (0.5, FLOOR), (1.25, FLOOR)])) == [0, 0, 0], "it begins anew"


def test_time_that_nobody_saw_counts_for_nothing() -> None:
    """The daemon was stopped, or the machine slept."""
    low = FLOOR + 10 * MIB
    assert not any(depths(run([(0.0, low), (600.0, low)])))
    ladder = run(steady(low, 3.0))
    assert depths(run([(3.0 + GAP_SECONDS + 60.0, AMPLE)], ladder=ladder)) == [STEPS, 1, 1]
    assert run([(0.0, AMPLE), (60.0, FLOOR + GIB), (60.25, FLOOR + GIB)]).fall == 0.0


def test_a_sample_that_is_no_newer_changes_nothing() -> None:
    ladder = run(steady(FLOOR + 10 * MIB, 0.5))
    assert advance(ladder, RULES, Sample(0.5, AMPLE)) is ladder and advance(ladder, RULES, Sample(0.1, AMPLE)) is ladder


def test_a_device_that_never_had_more_is_sized_so() -> None:
    resting = Ladder(armed=False)
    assert not run(steady(FLOOR + 100 * MIB, 600.0), ladder=resting).busy
    armed = run([*steady(FLOOR + 2 * GIB, 1.0), *steady(FLOOR + 100 * MIB, 3.0, begin=1.25)], ladder=resting)
    assert armed.depth("tighten") == STEPS


def test_pressure_tightens_and_does_no_more() -> None:
    ladder = Ladder()
    for index in range(80):
        ladder = advance(ladder, RULES, Sample(index * 0.25, AMPLE, 25.0))
    assert depths(ladder) == [STEPS, 0, 0]
    for index in range(80, 260):
        ladder = advance(ladder, RULES, Sample(index * 0.25, AMPLE, 0.0))
    assert depths(ladder) == [0, 0, 0]


def test_a_level_that_is_off_is_passed_over() -> None:
    off = replace(RULES, levels=(replace(RULES.levels[0], mode="off"), *RULES.levels[1:]))
    assert depths(run(steady(FLOOR + 10 * MIB, 3.0), off)) == [0, 1, 1]
    none = RULES.alone("tighten")
    assert depths(run(steady(FLOOR + 10 * MIB, 30.0), none)) == [STEPS, 0, 0]


def test_when_the_floor_comes() -> None:
    ladder = [ladder for second, ladder in drive(ramp(AMPLE, 500 * MIB), 44.0)][-1]
    left = levels.floor_in_seconds(ladder, RULES)
    assert left is not None and left == pytest.approx((AMPLE - 14 * 500 * MIB - FLOOR) / (500 * MIB), abs=0.6)
    assert levels.floor_in_seconds(run(steady(AMPLE, 5.0)), RULES) is None


@given(st.lists(st.tuples(st.floats(0.01, 8.0), st.one_of(st.none(), st.integers(0, 16 * GIB))), max_size=120))
def test_whatever_comes_no_level_is_in_force_before_the_one_in_front(steps: list[tuple[float, int | None]]) -> None:
    ladder, now = Ladder(), 0.0
    for seconds, available in steps:
        now += seconds
        before = depths(ladder)
        ladder = advance(ladder, RULES, Sample(now, available))
        after = depths(ladder)
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= 2
        for (first, later), earlier in zip(((0, 1), (1, 2)), before, strict=False):
            assert not after[later] or after[first] or earlier, f"{before} -> {after}"
