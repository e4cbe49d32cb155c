"""What is kept of the measured terms, for whom it counts, and what is said when they are not as expected."""
from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import rank
from tightrank import calibration
from tightrank.auto.peaks import Evidence, Fit
from tightrank.calibration import SAVE_SECONDS, WORKER, Account, compare, flat, measured, sentence
from tightrank.calibration.store import MOST_BYTES, MOST_ENTRIES, Calibration, Identity
from tightrank.plan.pace import Pace
from tightrank.records import Comparison, WorkerReading, WorkerSpec

ONE = Identity(("1024", "None", "release 0.32.0"), "vllm", "/m", "abc", 2, 1, "k1")
TERMS = {WORKER: {"kv_tokens": 65536.0}, "0": {"available_bytes": 8e9}, "1": {"available_bytes": 9e9}}
PACE = Pace(4e-4, 1e-9, 0.02, 200, 100_000)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, told: list[str]) -> Callable[[], Calibration]:
    """Called again, it is the next daemon's."""
    return lambda: Calibration(tmp_path / "calibration.json", ("1024", "release 0.32.0"), told.append)


def test_terms_outlive_the_daemon_and_come_together(make: Callable[[], Calibration], tmp_path: Path, told: list[str]) -> None:
    assert make().same(ONE) == {}
    make().keep(ONE, TERMS)
    make().keep(ONE, {WORKER: {"pair_bytes": 14.0}, "1": {"available_bytes": 7e9}})
    assert make().same(ONE) == {WORKER: {"kv_tokens": 65536.0, "pair_bytes": 14.0}, "0": {"available_bytes": 8e9},
                                "1": {"available_bytes": 7e9}}
    assert (tmp_path / "calibration.json").stat().st_mode & 0o777 == 0o600 and told == []
    assert os.listdir(tmp_path) == ["calibration.json"]


@pytest.mark.parametrize("change", [{"host": ("2048", "None", "release 0.32.0")}, {"host": ("1024", "None", "release 0.33.0")},
                                    {"engine": "sglang"}, {"model": "/n"}, {"config_sha256": "abd"}, {"tensor_parallel": 1},
                                    {"pipeline_parallel": 2}])
def test_of_another_host_engine_model_or_size_nothing_counts(make: Callable[[], Calibration], change: dict[str, Any]) -> None:
    make().keep(ONE, TERMS)
    other = replace(ONE, **change)
    assert make().same(other) == make().nearest(other) == {}


def test_another_configuration_is_near_and_not_the_same(make: Callable[[], Calibration]) -> None:
    two = replace(ONE, configuration="k2")
    make().keep(ONE, TERMS)
    assert make().same(two) == {} and make().nearest(two) == TERMS
    make().keep(two, {WORKER: {"kv_tokens": 1.0}})
    assert make().nearest(two) == {WORKER: {"kv_tokens": 1.0}} and make().same(ONE) == TERMS
    assert make().nearest(replace(ONE, configuration="k3")) == {WORKER: {"kv_tokens": 1.0}}, "the last one"


def test_a_model_is_known_by_its_directory_and_config(make: Callable[[], Calibration], tmp_path: Path) -> None:
    spec = WorkerSpec(
        name="w", engine="vllm", role="both", argv=(), env={}, host="127.0.0.1", port=1, model=str(tmp_path),
        served_model="m", tensor_parallel=1, pipeline_parallel=1, devices=(), hooks={}, line=None, context_tokens=None,
        schedule=(), drain_seconds=1, start_stall_seconds=1)
    missing = make().identity(spec, "k")
    (tmp_path / "config.json").write_text("{}")
    there = make().identity(spec, "k")
    (tmp_path / "config.json").write_text("{} ")
    assert missing.config_sha256 == "" and len({each.key for each in (missing, there, make().identity(spec, "k"))}) == 3


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "7", "{}", '{"schema": 1}', '{"schema": 2, "entries": {}}', '{"schema": 1, "entries": {"k": {}}}',
    '{"schema": 1, "entries": {"k": {"identity": {}, "terms": {}}}}', "\0" * 4096, "[" * 10**5, " " * (MOST_BYTES + 1),
    '{"schema": "' + "x" * 10**5 + '", "entries": {}}'])
def test_a_broken_or_foreign_file_is_said_once_and_set_aside(make: Callable[[], Calibration], tmp_path: Path, told: list[str],
                                                             text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    found = make()
    assert found.same(ONE) == {} and path.read_text() == text, "who only reads changes nothing"
    found.keep(ONE, TERMS)
    assert len(told) == 1 and "calibration.json: not readable" in told[0] and len(told[0]) < 600
    assert make().same(ONE) == TERMS and len(told) == 1
    assert (tmp_path / "calibration.json.broken").read_text() == text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "true", "null", '"7"', "1" + "0" * 400, "[1]"])
def test_a_number_that_is_none_breaks_the_file(make: Callable[[], Calibration], tmp_path: Path, told: list[str],
                                               value: str) -> None:
    make().keep(ONE, {WORKER: {"kv_tokens": 777.0}})
    path = tmp_path / "calibration.json"
    path.write_text(path.read_text().replace("777.0", value))
    assert make().same(ONE) == {} and len(told) == 1


def test_it_stays_small(make: Callable[[], Calibration], tmp_path: Path) -> None:
    store = make()
    for number in range(MOST_ENTRIES + 5):
        store.keep(replace(ONE, configuration=str(number)), TERMS)
    store.keep(replace(ONE, configuration="5"), TERMS)
    store.keep(ONE, TERMS)
    assert make().same(replace(ONE, configuration="5")) == TERMS, "it was written again, so it is not the oldest"
    assert make().same(replace(ONE, configuration="6")) == {}
    many = {str(number): {f"term_{each}_bytes": 1e9 for each in range(10)} for number in range(2000)}
    store.keep(replace(ONE, configuration="a"), many)
    store.keep(replace(ONE, configuration="b"), many)
    assert make().same(replace(ONE, configuration="b")) == many and make().same(replace(ONE, configuration="a")) == {}
    assert (tmp_path / "calibration.json").stat().st_size <= MOST_BYTES


def test_two_daemons_keep_what_the_other_wrote(make: Callable[[], Calibration]) -> None:
    one, two, other = make(), make(), replace(ONE, configuration="k2")
    one.keep(ONE, TERMS)
    two.keep(other, TERMS)
    one.keep(ONE, {WORKER: {"pair_bytes": 3.0}})
    assert make().same(other) == TERMS and make().same(ONE)[WORKER] == {"kv_tokens": 65536.0, "pair_bytes": 3.0}


def test_a_file_that_a_person_removed_is_forgotten(make: Callable[[], Calibration], tmp_path: Path) -> None:
    store = make()
    store.keep(ONE, TERMS)
    (tmp_path / "calibration.json").unlink()
    store.keep(replace(ONE, configuration="k2"), TERMS)
    assert make().same(ONE) == {}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_no_more_is_said_once_and_memory_goes_on(
        make: Callable[[], Calibration], monkeypatch: pytest.MonkeyPatch, told: list[str], error: int) -> None:
    store, other = make(), replace(ONE, configuration="k2")

    def refuse(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        store.keep(ONE, TERMS)
        store.keep(other, TERMS)
        assert store.same(ONE) == store.same(other) == TERMS
    assert len(told) == 1 and f"not written ({os.strerror(error)})" in told[0]
    store.keep(replace(ONE, configuration="k3"), TERMS)
    assert make().same(ONE) == make().same(other) == TERMS, "written with what comes next"


def test_killed_while_it_writes_the_old_file_stays(make: Callable[[], Calibration], monkeypatch: pytest.MonkeyPatch) -> None:
    make().keep(ONE, TERMS)

    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(Killed):
            make().keep(ONE, {WORKER: {"kv_tokens": 1.0}})
    assert make().same(ONE) == TERMS


def test_a_directory_in_its_place_stops_nothing(make: Callable[[], Calibration], tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "calibration.json").mkdir()
    make().keep(ONE, TERMS)
    assert make().same(ONE) == TERMS and len(told) == 1 and "IsADirectoryError" in told[0]


# --- measured and expected -------------------------------------------------------------------------------------------

@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e15)), st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e15)))
def test_rows_are_of_what_both_have_and_agree_within_a_tenth(predicted: dict[str, float], found: dict[str, float]) -> None:
    made = compare(predicted, found)
    assert [row.term for row in made] == [term for term in predicted if term in found]
    for row in made:
        close = row.difference is not None and abs(abs(row.difference) - 0.1) < 1e-9         # rounding decides
        assert close or row.agrees == (abs(row.measured - row.predicted) <= 0.1 * row.predicted)


def test_the_sentence_has_both_numbers() -> None:
    row, none = compare({"kv_tokens": 65536, "pair_bytes": 0}, {"kv_tokens": 49152, "pair_bytes": 13.5})
    assert sentence(row) == "kv_tokens: 65,536 expected (as the plan computes it), 49,152 measured (-25.0%)" and not row.agrees
    assert sentence(none) == "pair_bytes: 0 expected (as the plan computes it), 13.5 measured (none was expected)"


def reading(tokens: Any, available: int = 8 << 30) -> WorkerReading:
    ranks = (rank(role="engine-core", rank=None, facts={"kv_tokens": tokens}), rank(rank=0, available_bytes=available),
             rank(rank=1, available_bytes=None))
    return WorkerReading("w", 1, None, (), ranks, (), ())


def test_what_the_daemon_knows() -> None:
    found = measured(reading(4096), PACE, at_rest=True)
    assert found == {WORKER: {"kv_tokens": 4096, "row_seconds": 4e-4, "pair_seconds": 1e-9, "step_seconds": 0.02,
                              "pace_samples": 200, "pace_tokens": 100_000}, "0": {"available_bytes": 8 << 30}}
    assert calibration.pace_of(found[WORKER]) == PACE and calibration.pace_of({}) is None
    for garbage in (0, -1, 10**400, True, "7", 4096.5):
        assert measured(reading(garbage), None, at_rest=False) == {WORKER: {}}
    assert flat({"0": {"available_bytes": 2.0, "weights_bytes": 5.0}, "1": {"available_bytes": 3.0, "weights_bytes": 6.0}}) == \
        {"available_bytes": 2.0, "weights_bytes": 6.0}


def test_weights_are_those_that_a_rank_saw_on_its_device() -> None:
    facts = [{"weights_bytes": 3 << 30}, {"weights_bytes": "3"}, {}]
    ranks = tuple(rank(rank=number, facts=each, available_bytes=None) for number, each in enumerate(facts))
    assert measured(WorkerReading("w", 1, None, (), ranks, (), ()), None, at_rest=False) == {
        WORKER: {}, "0": {"weights_bytes": 3 << 30}}


def peaks(pair: float, row: float, proven: int) -> tuple[Evidence, ...]:
    return (Evidence(0, Fit(pair, row, 0.0, 0.0, 20), proven, 1, None, None), Evidence(1, None, proven, 1, None, None))


def test_peaks_count_once_a_step_came_near_the_budget(make: Callable[[], Calibration]) -> None:
    def told(pair: float, row: float, proven: int) -> dict[str, dict[str, float]]:
        return measured(reading(1), None, False, peaks(pair, row, proven), budget=400)
    assert told(14.0, 2e4, 99) == {WORKER: {"kv_tokens": 1}}
    assert told(14.0, 2e4, 100)["0"] == {"pair_bytes": 14.0, "row_bytes": 2e4, "peak_pairs": 100}


def test_peaks_are_compared_by_what_they_say_of_a_chunk(make: Callable[[], Calibration]) -> None:
    def told(pair: float, row: float, proven: int) -> list[Comparison]:
        return account(make()).step(measured(reading(1), None, True, peaks(pair, row, proven)), 0.0)
    assert told(1.0, 20_000.0, 2048 * 100_000) == []
    assert told(1.02, 18_000.0, 2048 * 50_000) == [], "the terms trade with each other"
    wrong, = told(1.5, 20_000.0, 2048 * 50_000)
    assert wrong.term == "chunk_bytes" and wrong.measured == 2048 * (1.5 * 50_000 + 20_000)


def account(store: Calibration, **changes: Any) -> Account:
    return Account(store, replace(ONE, **changes.pop("identity", {})), **changes)


def test_a_start_under_the_same_configuration_should_measure_the_same(make: Callable[[], Calibration]) -> None:
    assert account(make()).step(measured(reading(65536), None, True), 0.0) == []
    assert account(make()).step(measured(reading(60000), None, True), 0.0) == []
    found = account(make())
    told = found.step(measured(reading(40000), None, True), 0.0)
    assert [(row.term, row.predicted, row.measured, row.source) for row in told] == [("kv_tokens", 60000, 40000, "before")]
    assert found.step(measured(reading(40000), None, False), 1.0) == [] and len(found.rows) == 1, "it is said once"
    assert account(make(), identity={"configuration": "k2"}).step(measured(reading(7), None, True), 0.0) == []


def test_what_is_free_at_rest_is_no_promise_but_a_plan_is(make: Callable[[], Calibration]) -> None:
    account(make()).step(measured(reading(65536), None, True), 0.0)
    assert account(make()).step(measured(reading(65536, 1 << 30), None, True), 0.0) == []
    told = account(make(), planned={"kv_tokens": 70000.0, "available_bytes": float(8 << 30), "weights_bytes": 1.0}).step(
        measured(reading(65536, 4 << 30), None, True), 0.0)
    assert [(row.term, row.source) for row in told] == [("available_bytes", "plan")]


def test_a_pace_is_compared_by_what_it_says_of_a_prompt(make: Callable[[], Calibration]) -> None:
    account(make()).step(measured(reading(1), PACE, True), 0.0)
    same = replace(PACE, row_seconds=PACE.row_seconds + 0.02 / 2048, step_seconds=0.0)       # other terms, like times
    assert account(make()).step(measured(reading(1), same, True), 0.0) == []
    slow = replace(PACE, row_seconds=6e-4, pair_seconds=2e-9, longest_tokens=50_000)
    found = account(make())
    assert found.step(measured(reading(1), replace(slow, samples=calibration.PACE_SAMPLES - 1), True), 0.0) == [], "too early"
    assert found.pace == same and account(make(), identity={"configuration": "k2"}).pace == replace(
        slow, samples=calibration.PACE_SAMPLES - 1), "what is nearest, until there is an own one"
    row, = found.step(measured(reading(1), slow, False), 1.0)
    assert row.term == "prompt_seconds" and row.measured == pytest.approx(slow.prompt_seconds(50_000, lambda _: 2048))


def test_a_pace_that_learns_is_written_once_a_minute(make: Callable[[], Calibration], monkeypatch: pytest.MonkeyPatch) -> None:
    store, kept = make(), list[Any]()
    monkeypatch.setattr(store, "keep", lambda identity, terms: kept.append(terms))
    found = account(store)
    found.step(measured(reading(1), None, True), 0.0)
    for second in range(5, 205, 5):
        grown = replace(PACE, samples=64 + second, longest_tokens=1000 + 100 * second)
        found.step(measured(reading(1), grown, found.fresh), float(second))
    assert len(kept) == 1 + 1 + 195 // SAVE_SECONDS, "at once when it is there, then seldom"
    assert kept[-1]["0"] == {"available_bytes": 8 << 30}
    for second in range(205, 1000, 5):
        found.step(measured(reading(1), grown, False), float(second))
    assert len(kept) <= 6, "nothing new, nothing to write"


def test_the_file_is_for_people_too(make: Callable[[], Calibration], tmp_path: Path) -> None:
    make().keep(ONE, TERMS)
    entry, = json.loads((tmp_path / "calibration.json").read_text())["entries"].values()
    assert entry["identity"]["model"] == "/m" and entry["terms"]["0"] == {"available_bytes": 8e9}
