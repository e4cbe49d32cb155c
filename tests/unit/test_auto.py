"""`line.budget: auto`: what is fitted to the peaks of steps, and the budget that comes of it."""
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank import auto
from tightrank.adapter import wire
from tightrank.auto.peaks import LATEST, SAMPLES, Evidence, Fit, Peaks, Sample, fit
from tightrank.config import Guard
from tightrank.records import LineSpec, Phase, Snapshot
from views import guard, rank, reading, snapshot, view

KIB, MIB, GIB = 2**10, 2**20, 2**30
LINE = LineSpec(budget=200_000_000, floor_budget=256 * 65536, minimum=256, maximum=2048, granule=64, auto=True,
                assumed_pair_bytes=14)


def steps(pair: float, row: float, count: int = 64, short: float = 0.0, noise: int = 0, rows: int = 2048,
          budget: int = 10**15, seed: int = 1) -> list[Sample]:
    """One long prompt."""
    rng, prefix, found = random.Random(seed), 0, []
    for _ in range(count):
        taken = max(min(rows, budget // (prefix + rows)), 64)
        width = prefix + taken
        rise = taken * max(short, row + pair * width) + rng.randint(-noise, noise)
        found.append(Sample(taken, width, max(int(rise), 0)))
        prefix = width
    return found


# --- the fit ----------------------------------------------------------------------------------------------------------

@given(pair=st.floats(0.05, 20), row=st.integers(0, 200 * KIB), seed=st.integers(0, 99))
def test_terms_are_found_again(pair: float, row: int, seed: int) -> None:
    found = fit(steps(pair, row, noise=MIB, seed=seed))
    assert found is not None
    largest = steps(pair, row)[-1]
    assert found.pair_bytes == pytest.approx(pair, rel=0.05, abs=2 * MIB / largest.pairs * 4)


def test_another_phase_of_short_prompts_does_not_move_it() -> None:
    """As measured on a DeepSeek-V4: 48 KiB a row up to 26k keys, then 22 KiB and 1.00 byte a pair."""
    found = fit(steps(1.0, 22 * KIB, short=48 * KIB, noise=MIB))
    assert found is not None
    assert found.pair_bytes == pytest.approx(1.0, rel=0.03)
    assert found.row_bytes == pytest.approx(22 * KIB, rel=0.1) and found.short_row_bytes == pytest.approx(48 * KIB, rel=0.1)


@given(seed=st.integers(0, 99))
def test_every_fifth_step_may_be_nonsense(seed: int) -> None:
    rng = random.Random(seed)
    told = [replace(each, rise_bytes=each.rise_bytes + rng.randrange(8 * GIB)) if number % 5 == 4 else each
            for number, each in enumerate(steps(2.0, 30 * KIB, noise=MIB, seed=seed))]
    found = fit(told)
    assert found is not None and found.pair_bytes == pytest.approx(2.0, rel=0.1)


def test_a_buffer_over_the_largest_length_is_a_term_of_rows() -> None:
    """Ratio 128 of a DeepSeek-V4 adds half a byte for each row and token of the engine's largest length."""
    found = fit(steps(1.0, 22 * KIB + 0.51 * 131072))
    assert found is not None and found.pair_bytes == pytest.approx(1.0, rel=0.01)
    assert found.row_bytes == pytest.approx(22 * KIB + 0.51 * 131072, rel=0.01)


def test_memory_that_does_not_depend_on_the_keys_has_no_pair_bytes() -> None:
    found = fit(steps(0.0, 40 * KIB, noise=MIB))
    assert found is not None and found.pair_bytes < 0.02 and found.pairs(4 * GIB, 2048) > 10**9


@pytest.mark.parametrize("samples", [[], steps(1.0, 0, count=SAMPLES - 1), [Sample(64, 5000, MIB)] * 50])
def test_what_tells_nothing_is_no_fit(samples: list[Sample]) -> None:
    assert fit(samples) is None


def test_a_drift_raises_it_at_once_and_a_spike_does_not() -> None:
    told = steps(1.0, 20 * KIB)
    steady = fit(told, told[-LATEST:])
    spiked = fit(told, (*told[-LATEST:-1], replace(told[-1], rise_bytes=2 * told[-1].rise_bytes)))
    drifted = fit(told, [replace(each, rise_bytes=int(1.2 * each.rise_bytes)) for each in told[-LATEST:]])
    assert steady is not None and spiked is not None and drifted is not None
    assert spiked.pair_bytes == pytest.approx(steady.pair_bytes) == pytest.approx(1.0, rel=0.02)
    assert drifted.pair_bytes > 1.15


@given(st.lists(st.builds(Sample, st.integers(1, 4096), st.integers(1, 10**6), st.integers(0, 2**40)), max_size=60))
def test_no_samples_make_it_raise_or_a_term_negative(samples: Sequence[Sample]) -> None:
    found = fit(samples, samples[-LATEST:])
    if found is not None:
        assert min(found.pair_bytes, found.row_bytes, found.short_row_bytes, found.step_bytes) >= 0
        assert 0 <= found.pairs(GIB, 2048) <= 10**15


@given(st.floats(0.01, 20), st.integers(0, 10**5), st.integers(0, 2 * 10**5), st.integers(0, 10**9), st.integers(0, 10**11))
def test_a_step_within_the_answer_keeps_the_room(pair: float, row: int, short: int, step: int, room: int) -> None:
    found = Fit(pair, row, short, step, 20)
    pairs = found.pairs(room, 2048)
    for rows in (64, 512, 2048):
        if pairs // rows >= rows:
            assert found.rise_bytes(rows, pairs // rows) <= room + 1


def record(sample: Sample, number: int, rest: int | None = GIB, available: int | None = None,
           untouched: int | None = None) -> wire.Step:
    return wire.Step(1, 10, number, 0, number, sample.rows, sample.width, 10**9, False, 1.0,
                     None if rest is None else rest + sample.rise_bytes, [[sample.width - sample.rows, sample.rows]], rest,
                     available, untouched)


def test_samples_are_bounded_and_short_prompts_do_not_push_out_long_ones() -> None:
    peaks = Peaks(0)
    for number, each in enumerate(steps(1.0, 22 * KIB) + [Sample(64, 64, MIB)] * 5000):
        peaks.learn(record(each, number))
    found = peaks.evidence(1.0)
    assert found.fit is not None and found.fit.samples < 120 and found.proven_pairs == 2048 * 131072
    assert found.fit.pair_bytes == pytest.approx(1.0, rel=0.05)


def test_steps_without_a_rest_or_a_peak_teach_only_what_they_have() -> None:
    peaks = Peaks(0)
    peaks.learn(record(Sample(64, 64, MIB), 1, rest=None, available=5 * GIB, untouched=GIB))
    peaks.learn(record(Sample(64, 64, MIB), 2))
    found = peaks.evidence(1.0)
    assert (found.available_bytes, found.untouched_bytes, found.fit, found.proven_pairs) == (5 * GIB, GIB, None, 64 * 64)


# --- the budget -------------------------------------------------------------------------------------------------------

def evidence(pair: float | None = 1.0, proven: int = 10**8, available: int | None = 8 * GIB, untouched: int | None = GIB,
             number: int = 0, row: float = 0.0) -> Evidence:
    return Evidence(number, None if pair is None else Fit(pair, row, 0.0, 0.0, 30), proven, 0, available, untouched)


def one(*ranks: Evidence, line: LineSpec = LINE, **changes: Any) -> Any:
    known = {"context_tokens": 1_000_000, "hook_roles": (("ranks", "scheduler", len(ranks)),)}
    return view(line=line, evidence=ranks, budget=line.budget, **{**known, **changes})


def aim(*views: Any, before: dict[str, auto.Aim] | None = None, in_flight: int = 1, held: Guard | None = None,
        seen: Snapshot | None = None) -> dict[str, auto.Aim]:
    ranks = {each.name: reading(each.name, [rank(item.rank, in_flight) for item in each.evidence]) for each in views}
    return dict(auto.step(before or {}, held or guard(), seen or snapshot(ranks), views))


def test_it_is_what_is_left_over_bytes_for_each_pair() -> None:
    found = aim(one(evidence(pair=10.0, proven=10**12)))["w0"]
    assert found.budget == (8 - 1 - 2) * GIB // 10 and found.binds and found.tightest_rank == 0
    assert "10 bytes for each (row, key)" in found.sentence and "8.00 available, 1.00 of KV not yet written" in found.sentence


def test_rows_come_off_first() -> None:
    assert aim(one(evidence(pair=10.0, proven=10**12, row=2**20)))["w0"].budget == (5 * GIB - 2048 * 2**20) // 10


def test_it_is_raised_by_a_quarter_past_what_was_lived_through_and_lowered_at_once() -> None:
    found = aim(one(evidence(pair=1.0, proven=LINE.budget)))
    assert found["w0"].budget == LINE.budget * 5 // 4 and "a quarter more" in found["w0"].sentence
    found = aim(one(evidence(pair=1.0, proven=LINE.budget)), before=found)
    assert found["w0"].budget == LINE.budget * 5 // 4                              # nothing new was proven
    found = aim(one(evidence(pair=1.0, proven=LINE.budget * 5 // 4)), before=found)
    assert found["w0"].budget == LINE.budget * 25 // 16
    found = aim(one(evidence(pair=100.0, proven=LINE.budget * 5 // 4)), before=found)
    assert found["w0"].budget == int(5 * GIB // 100 / auto.SPARE)


def at(seconds: float) -> Snapshot:
    return replace(snapshot({"w0": reading("w0", [rank()])}), monotonic=seconds)


def test_memory_that_comes_and_goes_lowers_it_once_and_does_not_raise_it_each_time() -> None:
    scarce, plenty = one(evidence(pair=10.0, proven=10**12, available=6 * GIB)), one(evidence(pair=10.0, proven=10**12))
    found, budgets = aim(plenty, seen=at(100.0)), []
    for tick in range(90):
        found = aim(scarce if tick < 40 and tick % 4 == 3 else plenty, before=found, seen=at(100.25 + tick / 4))
        budgets.append(found["w0"].budget)
        assert ("6.00 available" in found["w0"].sentence) == (budgets[-1] < budgets[0])
    fall, rise = 3, 39 + round(4 * auto.STEADY_SECONDS)
    assert budgets[:fall] == [5 * GIB // 10] * fall
    assert budgets[fall:rise] == [int(3 * GIB // 10 / auto.SPARE)] * (rise - fall)
    assert budgets[rise:] == [5 * GIB // 10] * (len(budgets) - rise) and len(budgets) > rise


def test_on_the_way_to_an_unproven_size_small_raises_are_not_asked_for() -> None:
    found = aim(one(evidence(pair=0.0, proven=LINE.budget)))
    for share, raised in ((1.05, False), (1.09, False), (1.11, True)):
        proven = int(share * LINE.budget)
        now = aim(one(evidence(pair=0.0, proven=proven)), before=found)["w0"]
        assert now.budget == (int(proven * auto.RAISE) if raised else found["w0"].budget)
    assert "enough for any step; a quarter more" in now.sentence


def test_the_sentence_is_of_the_fit_from_its_first_tick_on_though_the_budget_stays() -> None:
    line = replace(LINE, assumed_pair_bytes=0)
    found = aim(one(replace(evidence(available=3 * GIB, pair=None, proven=LINE.budget), proven_bytes=GIB), line=line))
    assert "no fit yet; all that the largest step held" in found["w0"].sentence and found["w0"].budget == LINE.floor_budget
    fitted = aim(one(evidence(available=3 * GIB, pair=10.0, proven=LINE.budget), line=line), before=found)
    assert "10 bytes for each (row, key)" in fitted["w0"].sentence and fitted["w0"].budget == LINE.floor_budget
    again = aim(one(evidence(available=2 * GIB, pair=11.0, proven=LINE.budget), line=line), before=fitted)
    assert again["w0"].sentence == fitted["w0"].sentence, "it is not told anew for each number that moves"


def test_small_raises_are_not_told() -> None:
    assert aim(one(evidence(pair=5 * GIB / (1.01 * LINE.budget), proven=10**12)))["w0"].budget == LINE.budget


def test_small_moves_of_a_host_move_nothing() -> None:
    found = aim(one(evidence(pair=100.0)))
    for percent in (0.0, -1.5, 1.5, -0.5):
        now = aim(one(evidence(available=8 * GIB + int(percent / 100 * 5 * GIB), pair=100.0)), before=found)
        assert now["w0"].budget == found["w0"].budget
    assert aim(one(evidence(available=8 * GIB - GIB // 5, pair=100.0)), before=found)["w0"].budget < found["w0"].budget


def test_it_never_goes_under_the_floor_budget_and_says_so() -> None:
    found = aim(one(evidence(available=3 * GIB)))["w0"]
    assert found.budget == LINE.floor_budget and "under the floor budget" in found.sentence and "line.context" in found.sentence


def test_the_tightest_rank_decides() -> None:
    found = aim(one(evidence(pair=10.0, proven=10**12), evidence(pair=40.0, proven=10**12, number=1)))["w0"]
    assert found.tightest_rank == 1 and found.budget == int((8 - 2 - 2) * GIB // 2 // 40 / auto.SPARE)


def test_ranks_that_share_a_host_share_its_memory() -> None:
    """Two ranks take their transients at once, and neither's unwritten KV is free."""
    found = aim(one(evidence(pair=10.0, proven=10**12), evidence(pair=10.0, proven=10**12, number=1)))["w0"]
    assert found.budget == (8 - 2 * 1 - 2) * GIB // 2 // 10


@pytest.mark.parametrize(("shared", "keep"), [(True, 2 * GIB), (False, GIB // 2)])
def test_the_floor_counts_where_a_device_uses_the_hosts_memory(shared: bool, keep: int) -> None:
    seen = one(evidence(pair=10.0, proven=10**12))
    told = snapshot({"w0": reading("w0", [rank(0, 1, "0000:01:00.0", memory_shared=shared)])})
    assert aim(seen, seen=told)["w0"].budget == (7 * GIB - keep) // 10


def test_a_decode_worker_beside_it_takes_no_transients_but_its_cache() -> None:
    found = aim(one(evidence(pair=10.0, proven=10**12), name="w0"), one(evidence(pair=None), name="w1", role="decode"))
    assert found["w0"].budget == (8 - 2 * 1 - 2) * GIB // 10


def test_until_steps_have_told_published_bytes_are_assumed_unless_a_start_was_given() -> None:
    assert aim(one(evidence(pair=None)))["w0"].budget == 5 * GIB // 14
    assert aim(one(evidence(pair=None), line=replace(LINE, assumed_pair_bytes=0)))["w0"].budget == LINE.budget


def test_it_says_when_the_line_does_not_bind_and_keeps_the_full_chunk() -> None:
    found = aim(one(evidence(pair=0.0, proven=10**12), context_tokens=8192))["w0"]
    assert found.binds is False and "does not bind" in found.sentence and found.budget >= 2048 * 8192


@pytest.mark.parametrize("ranks", [(), (evidence(untouched=None),), (evidence(available=None),)])
def test_what_is_not_known_leaves_the_budget(ranks: tuple[Evidence, ...]) -> None:
    found = aim(one(*ranks, hook_roles=(("ranks", "scheduler", 1),)))["w0"]
    assert (found.budget, found.binds) == (LINE.budget, None) and "stays" in found.sentence


def test_a_rank_that_has_not_told_leaves_it_too() -> None:
    assert aim(one(evidence(), hook_roles=(("ranks", "scheduler", 2),)))["w0"].budget == LINE.budget


def test_while_nothing_is_in_flight_what_comes_and_goes_on_the_host_counts() -> None:
    found = aim(one(evidence(pair=10.0, proven=10**12)), in_flight=0)["w0"]
    assert found.ranks[0].available_bytes == snapshot({}).memory.available_bytes != 8 * GIB


def test_another_generation_starts_anew() -> None:
    found = aim(one(evidence(pair=100.0), generation=1))
    assert aim(one(evidence(pair=None), generation=2, line=replace(LINE, assumed_pair_bytes=0)), before=found)["w0"].budget == \
        LINE.budget


def test_a_fixed_line_and_a_worker_that_does_not_serve_have_no_aim() -> None:
    assert not aim(one(evidence(), line=replace(LINE, auto=False)))
    assert not aim(one(evidence(), phase=Phase.STARTING))


def test_views_carry_the_budget_to_the_levels() -> None:
    seen = one(evidence(pair=10.0, proven=10**12))
    [based] = auto.based([seen], aim(seen))
    assert based.line is not None and based.line.budget == 5 * GIB // 10 and based.line_why


def moves(ideals: Sequence[float]) -> Iterator[int]:
    aims: dict[str, auto.Aim] = {}
    proven = 10**7
    for pair in ideals:
        aims = aim(one(evidence(pair=pair, proven=proven)), before=aims)
        proven = max(proven, aims["w0"].budget)
        yield aims["w0"].budget


@given(st.lists(st.floats(0.5, 200), min_size=1, max_size=30))
def test_it_is_never_over_what_the_fit_allows_nor_a_large_step_over_what_is_proven(pairs: list[float]) -> None:
    before, proven = LINE.budget, LINE.budget
    for pair, budget in zip(pairs, moves(pairs), strict=True):
        assert budget <= max(5 * GIB / pair, LINE.floor_budget, 0) + 1
        assert budget <= max(before, 1.25 * proven) + 1
        before, proven = budget, max(proven, budget)
