"""What a worker that does not move looks like, as a film of readings; and what is a hang, as a table."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import process, rank
from tightrank.hang import ENOUGH_STEPS, HangLimits, Turns, overdue
from tightrank.records import ProcessId, ProcessReading, RankReading, Stall, WorkerReading

LIMITS = HangLimits()
SLEEPS = Stall("scheduler 0 (pid 7)", False, 1, 3.0, 3.0, 3.0, 0.1, 0.1)
FIRST = replace(SLEEPS, longest_seconds=None, expected_seconds=None)
SPINS = replace(SLEEPS, still_seconds=61.0, quiet_seconds=0.0, unhelped_seconds=61.0)
COMPILES = replace(SPINS, still_seconds=90.0, unhelped_seconds=1.0)


@pytest.mark.parametrize(("stall", "starting", "limit"), [
    (SLEEPS, False, 2.0),
    (replace(SLEEPS, quiet_seconds=1.9), False, None),
    (replace(SLEEPS, longest_seconds=0.5, expected_seconds=0.5), False, 2.5),
    (replace(SLEEPS, longest_seconds=0.7, expected_seconds=0.7), False, None),                # a step may take 3.5 s
    (replace(SLEEPS, longest_seconds=0.1, expected_seconds=5.0), False, None),                # a larger one under way: 25 s
    (replace(SLEEPS, quiet_seconds=29.0, longest_seconds=0.1, expected_seconds=900.0), False, None),
    (replace(SLEEPS, quiet_seconds=31.0, longest_seconds=0.1, expected_seconds=900.0), False, 30.0),      # not for ever
    (replace(SLEEPS, quiet_seconds=31.0, longest_seconds=10.0, expected_seconds=900.0), False, None),     # its like took 10 s
    (FIRST, False, None),
    (replace(FIRST, quiet_seconds=31.0), False, 30.0),
    (replace(SPINS, still_seconds=59.0, unhelped_seconds=59.0), False, None),
    (SPINS, False, 60.0),
    (replace(SPINS, longest_seconds=8.0, expected_seconds=8.0), False, None),                 # 160 s
    (COMPILES, False, None),
    (replace(COMPILES, still_seconds=301.0), False, 300.0),
    (replace(SLEEPS, stopped=True, in_flight=0, quiet_seconds=0.0), False, 2.0),
    (replace(SLEEPS, stopped=True, still_seconds=1.9), False, None),
    (replace(SLEEPS, stopped=True), True, 2.0),
    (SLEEPS, True, None),
    (replace(SLEEPS, quiet_seconds=31.0), True, 30.0),
    (replace(SPINS, still_seconds=9000.0, unhelped_seconds=9000.0), True, None),              # limits.start_stall is there
])
def test_what_is_a_hang(stall: Stall, starting: bool, limit: float | None) -> None:
    found = overdue(stall, LIMITS, starting)
    assert (found.limit_seconds if found else None) == limit
    if found:
        assert stall.who in found.sentence and f"limit {limit:.1f} s" in found.sentence
        assert ("state T" in found.sentence) == stall.stopped


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5), st.one_of(st.none(), st.floats(0, 1e4)), st.floats(1, 1e6))
def test_never_before_the_floor_or_the_longest_step_and_never_when_off(
        still: float, quiet: float, unhelped: float, longest: float | None, scale: float) -> None:
    stall = replace(SLEEPS, still_seconds=still, quiet_seconds=min(quiet, still), unhelped_seconds=min(unhelped, still),
                    longest_seconds=longest, expected_seconds=None if longest is None else longest * scale)
    if (found := overdue(stall, LIMITS, False)) is not None:
        assert found.limit_seconds >= max(2.0, 5 * (longest or 0.0)) and still >= found.limit_seconds
    assert overdue(stall, HangLimits(floor_seconds=0), False) is None


# --- the film ---------------------------------------------------------------------------------------------------------

class Film:
    """A worker as `watch` sees it, one picture each half second."""

    def __init__(self, *ranks: RankReading, processes: tuple[ProcessReading, ...] = ()) -> None:
        self.turns, self.now, self.ranks, self.processes = Turns(), 100.0, list(ranks), list(processes)
        self.show()

    def show(self, seconds: float = 0.5) -> Stall | None:
        self.now += seconds
        self.turns.observe(WorkerReading("w", 1, None, tuple(self.processes), tuple(self.ranks), (), ()), self.now)
        return self.turns.stall

    def run(self, seconds: float, *, turn: bool = False, cpu: float = 0.0, helper_cpu: float = 0.0,
            state: str = "S") -> Stall | None:
        for _ in range(round(seconds / 0.5)):
            self.ranks = [replace(each, loops=each.loops + turn, state=state, cpu_seconds=(each.cpu_seconds or 0.0) + cpu * 0.5)
                          for each in self.ranks]
            self.processes = [replace(each, cpu_seconds=each.cpu_seconds + helper_cpu * 0.5) for each in self.processes]
            self.show()
        return self.turns.stall


SCHEDULER = rank(state="S", cpu_seconds=1.0, in_flight=2)
COMPILER = process(id=ProcessId(900, 9), parent_pid=101, name="ptxas")


def test_a_loop_that_turns_and_one_without_work_are_no_stall() -> None:
    film = Film(SCHEDULER)
    assert film.run(60, turn=True) is None and film.turns.working
    idle = Film(replace(SCHEDULER, in_flight=0))
    assert idle.run(600) is None and not idle.turns.working


def test_a_pause_without_work_is_not_learned_as_a_step() -> None:
    """vLLM's core stands still for the whole night; with that for a step no hang would ever be found again."""
    film = Film(replace(SCHEDULER, in_flight=0))
    film.run(600)
    film.ranks[0] = replace(film.ranks[0], in_flight=1, loops=film.ranks[0].loops + 1)      # the first request of the morning
    film.show()
    found = film.run(5)
    assert found is not None and found.longest_seconds is None


def test_a_loop_that_stands_still_is_timed_and_forgotten_when_it_turns() -> None:
    film = Film(SCHEDULER)
    found = film.run(5)
    assert found is not None and (found.who, found.still_seconds, found.quiet_seconds) == ("scheduler 0 (pid 101)", 5.0, 4.5)
    assert film.turns.suspect
    assert film.run(0.5, turn=True) is None and not film.turns.suspect


def test_what_we_did_not_see_does_not_count() -> None:
    """docker pause, a migrated machine: an hour passes between two looks. And what else runs is known from the second on."""
    film = Film(SCHEDULER)
    found = film.show(3600.0)
    assert found is not None and (found.still_seconds, found.quiet_seconds) == (1.0, 0.0)


@pytest.mark.parametrize(("state", "cpu"), [("S", 0.5), ("R", 0.0), ("D", 0.0)])
def test_who_computes_is_not_quiet(state: str, cpu: float) -> None:
    found = Film(SCHEDULER).run(10, cpu=cpu, state=state)
    assert found is not None and found.still_seconds == 10.0 and found.quiet_seconds == 0.0 and found.unhelped_seconds == 9.5


def test_a_compiler_that_a_rank_started_helps_and_a_server_does_not() -> None:
    found = Film(SCHEDULER, processes=(COMPILER,)).run(10, helper_cpu=1.0)
    assert found is not None and found.still_seconds == 10.0 and found.quiet_seconds == found.unhelped_seconds == 0.0
    deep = (replace(COMPILER, cpu_seconds=0.0), process(id=ProcessId(901, 9), parent_pid=900, name="cicc"))
    assert Film(SCHEDULER, processes=deep).run(10, helper_cpu=1.0).unhelped_seconds == 0.0  # type: ignore[union-attr]
    server = Film(SCHEDULER, processes=(replace(COMPILER, parent_pid=1, name="APIServer"),)).run(10, helper_cpu=1.0)
    assert server is not None and server.quiet_seconds == server.unhelped_seconds == 9.5


@pytest.mark.parametrize(("spins", "quiet"), [(2, 9.5), (20, 0.0)])
def test_an_engine_core_that_spins_for_a_second_is_no_sign_of_life_and_one_that_computes_is(spins: int, quiet: float) -> None:
    core = rank(id=ProcessId(50, 5), role="engine-core", rank=None, state="R", cpu_seconds=0.0, in_flight=3)
    worker = rank(id=ProcessId(51, 5), role="worker", state="S", cpu_seconds=4.0, in_flight=0)
    film = Film(core, worker)
    for number in range(20):
        film.ranks[0] = replace(film.ranks[0], cpu_seconds=(film.ranks[0].cpu_seconds or 0.0) + 0.5 * (number < spins))
        found = film.show()
    assert found is not None and found.who.startswith("engine-core") and found.quiet_seconds == quiet


def test_the_main_process_may_be_stopped_before_it_says_hello() -> None:
    main = process(id=ProcessId(50, 5), state="T", role=None)
    turns, helper = Turns(), process(id=ProcessId(51, 5), state="T", role=None)
    for number in range(6):
        turns.observe(WorkerReading("w", 1, main.id, (main, helper), (), (), ()), 100.0 + number / 2)
    assert turns.stall is not None and turns.stall.who == "main (pid 50)" and turns.suspect and turns.working
    found = overdue(turns.stall, LIMITS, True)
    assert found is not None and "state T" in found.sentence
    turns.observe(WorkerReading("w", 1, main.id, (replace(main, state="S"), helper), (), (), ()), 104.0)
    assert turns.stall is None


def test_a_stopped_process_is_the_first_to_be_named_and_counts_from_when_it_was_seen() -> None:
    film = Film(replace(SCHEDULER, in_flight=0), rank(id=ProcessId(102, 7), rank=1, state="S", cpu_seconds=1.0))
    film.run(20)
    film.ranks[0] = replace(film.ranks[0], state="T")
    assert film.show().who == "scheduler 1 (pid 102)" and film.turns.working  # type: ignore[union-attr]
    for _ in range(4):
        found = film.show()
    assert found is not None and (found.who, found.stopped, found.still_seconds) == ("scheduler 0 (pid 101)", True, 2.0)
    film.ranks[0] = replace(film.ranks[0], state="S")
    assert film.show().who == "scheduler 1 (pid 102)"  # type: ignore[union-attr]


def test_a_process_whose_page_cannot_be_read_is_not_judged() -> None:
    assert Film(replace(SCHEDULER, beat_age_seconds=None)).run(600) is None


def test_a_larger_step_may_take_longer_in_proportion() -> None:
    film = Film(replace(SCHEDULER, step_cost=4000))
    film.turns.learn(0.5, 1000)
    found = film.run(1)
    assert found is not None and (found.longest_seconds, found.expected_seconds) == (0.5, 2.0)
    film.turns.learn(0.6, 8000)
    found = film.run(1)
    assert found is not None and (found.longest_seconds, found.expected_seconds) == (0.6, 0.6)
    film.turns.forget_steps()
    found = film.run(1)
    assert found is not None and found.longest_seconds is None


def test_a_silence_that_ended_well_is_learned_and_one_of_a_stopped_process_is_not() -> None:
    film = Film(SCHEDULER)
    film.run(3)
    film.run(0.5, turn=True)
    assert (found := film.run(1)) is not None and found.longest_seconds == 3.0
    stopped = Film(SCHEDULER)
    stopped.run(5, state="T")
    stopped.run(0.5, turn=True)
    assert (found := stopped.run(1)) is not None and found.longest_seconds is None


def test_a_step_in_which_something_was_compiled_does_not_blind_us() -> None:
    film = Film(replace(SCHEDULER, step_cost=1000))
    for seconds in (20.0, *(0.02,) * ENOUGH_STEPS):
        film.turns.learn(seconds, 1000)
    found = film.run(1)
    assert found is not None and found.longest_seconds == 0.02
