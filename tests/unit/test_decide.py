"""Decisions as a table: a view, a reading and a snapshot in, at most one decision out."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tightrank.decide import RESTARTS, Policy, decide, missing_hooks
from tightrank.records import (
    ActionKind,
    Decision,
    Diagnosis,
    MemoryReading,
    Phase,
    ProbeResult,
    ProcessId,
    ProcessReading,
    RankReading,
    Request,
    Snapshot,
    WorkerReading,
    WorkerView,
)

GIB = 1 << 30
POLICY = Policy(floor_bytes=GIB, margin_bytes=GIB, restarts=3, backoff_first_seconds=1.0, backoff_longest_seconds=5.0,
                jitter=lambda: 0.0)
NOW = 1000.0
SIZING = Diagnosis("kv-pool-too-small", "no room", ("line",), "raise it", False)
CRASH = Diagnosis("rank-died", "it died", (), "look", True)


def view(phase: Phase, **changes: Any) -> WorkerView:
    base = WorkerView(
        name="w", engine="sglang", role="both", phase=phase, generation=4, since_monotonic=NOW - 10, started_monotonic=NOW - 10,
        progress_monotonic=NOW - 1, start_stall_seconds=30, hooks=("ranks", "line"),
        hook_roles=(("ranks", "scheduler", 2), ("line", "scheduler", 2)), exit_status=None, proof=None, post_mortem=None,
        fault_since_monotonic=None, probe=None, healthy_since_monotonic=None, guard_stops_at_start=1, ended=False,
        end_trouble=None, diagnosis=None, failures_in_row=0, next_start_monotonic=None, requests=(), restart_wanted=False)
    return replace(base, **changes)


def rank(number: int, state: str = "in-force", alive: bool = True) -> RankReading:
    hooks = {"ranks": {"state": "in-force"}, "line": {"state": state, "wanted": "A.b", "found": "nothing"}}
    return RankReading(ProcessId(100 + number, 7), "scheduler", number, number, 0, None, None, "0.5.23", alive, hooks, {},
                       8 * GIB, "", 0.1, 1, 1, 1, 0)


def case(seen: WorkerView, *, ranks: tuple[RankReading, ...] = (rank(0), rank(1)), dead: tuple[RankReading, ...] = (),
         available: int | None = 8 * GIB, state: str = "S", guard: dict[str, Any] | None = None) -> Decision | None:
    process = ProcessReading(ProcessId(99, 7), 1, "python", state, GIB, 1.0, None)
    memory = MemoryReading(NOW, 16 * GIB, available, None, None, available, None, None)
    reading = WorkerReading("w", 4, ProcessId(99, 7), (process,), ranks, dead, ())
    found = decide(Snapshot(NOW, 0.0, memory, {"w": reading}, guard or {"stops": 1}), [seen], POLICY)
    assert len(found) <= 1
    return found[0] if found else None


def faulty(number: int, replicated: bool = True) -> RankReading:
    fault = {"hook": "line", "where": "A.b", "error": "E", "replicated": replicated}
    return replace(rank(number), facts={"faults": [fault]})


FAULTY = view(Phase.UP, fault_since_monotonic=NOW - 2)
READY = ProbeResult(NOW, True, True)
STARTING = view(Phase.STARTING, healthy_since_monotonic=NOW - 5)


@pytest.mark.parametrize(("seen", "options", "kind", "cause"), [
    (STARTING, {}, None, None),
    (replace(STARTING, probe=READY), {}, ActionKind.ADMIT, None),
    (replace(STARTING, probe=READY, healthy_since_monotonic=NOW), {"ranks": (rank(0),)}, None, None),   # grace
    (replace(STARTING, probe=READY), {"ranks": (rank(0),)}, ActionKind.STOP, "adapter-not-in-force"),
    (replace(STARTING, probe=READY), {"ranks": ()}, ActionKind.STOP, "adapter-not-in-force"),
    (view(Phase.STARTING), {"ranks": (rank(0), rank(1, "failed"))}, ActionKind.STOP, "adapter-not-in-force"),
    (view(Phase.STARTING), {"ranks": (rank(0), rank(1, "wanted"))}, None, None),
    (view(Phase.STARTING, proof=SIZING), {}, ActionKind.STOP, "kv-pool-too-small"),
    (view(Phase.STARTING, exit_status=1, post_mortem=SIZING), {}, ActionKind.STOP, "kv-pool-too-small"),
    (view(Phase.STARTING, exit_status=0), {}, ActionKind.STOP, "engine-exited"),       # an exit code proves nothing
    (view(Phase.UP, exit_status=0), {}, ActionKind.STOP, "engine-exited"),
    (view(Phase.UP), {"ranks": (rank(0),), "dead": (rank(1, alive=False),)}, ActionKind.STOP, "rank-died"),
    (view(Phase.DRAINING), {"dead": (rank(1, alive=False),)}, ActionKind.STOP, "rank-died"),
    (view(Phase.STOPPING), {"dead": (rank(1, alive=False),)}, None, None),
    (view(Phase.UP), {}, None, None),
    (view(Phase.UP), {"guard": {"stops": 2, "last": {"available_bytes": 5, "floor_bytes": 9}}}, ActionKind.STOP, "guard-floor"),
    (view(Phase.UP), {"guard": {}}, None, None),                                       # an unreadable guard proves nothing
    (FAULTY, {"ranks": (rank(0), faulty(1))}, ActionKind.STOP, "adapter-fault"),
    (FAULTY, {"ranks": (faulty(0), faulty(1))}, None, None),                           # alike on all: they stay alike
    (FAULTY, {"ranks": (rank(0), faulty(1, replicated=False))}, None, None),
    (FAULTY, {"ranks": (faulty(0),)}, None, None),                                     # no replicas: the minimum is safe
    (replace(FAULTY, fault_since_monotonic=NOW - 0.5), {"ranks": (rank(0), faulty(1))}, None, None),      # may still come
    (replace(FAULTY, fault_since_monotonic=NOW, exit_status=-9), {"ranks": (rank(0), faulty(1))}, ActionKind.STOP,
     "adapter-fault"),
    (replace(FAULTY, fault_since_monotonic=NOW), {"ranks": (rank(0),), "dead": (faulty(1),)}, ActionKind.STOP, "adapter-fault"),
    (view(Phase.UP, requests=(Request.DRAIN,)), {}, ActionKind.DRAIN, None),
    (view(Phase.DRAINING, requests=(Request.RESUME,)), {}, ActionKind.ADMIT, None),
    (view(Phase.UP, requests=(Request.DRAIN, Request.STOP)), {}, ActionKind.STOP, None),
    (view(Phase.STARTING, progress_monotonic=NOW - 40), {}, ActionKind.STOP, "start-stalled"),
    (view(Phase.STARTING, progress_monotonic=NOW - 40), {"state": "R"}, None, None),      # a compiler at work
    (view(Phase.STARTING, progress_monotonic=NOW - 130), {"state": "R"}, ActionKind.STOP, "start-stalled"),
    (replace(STARTING, progress_monotonic=NOW - 40), {}, ActionKind.STOP, "canary-failed"),
    (view(Phase.STOPPING), {}, None, None),
    (view(Phase.STOPPING, ended=True), {}, ActionKind.REST, None),
    (view(Phase.STOPPING, ended=True, restart_wanted=True), {}, ActionKind.START, None),
    (view(Phase.STOPPING, ended=True, diagnosis=SIZING, failures_in_row=1), {}, ActionKind.FAIL, "kv-pool-too-small"),
    (view(Phase.STOPPING, ended=True, diagnosis=CRASH, failures_in_row=3), {}, ActionKind.BACK_OFF, "rank-died"),
    (view(Phase.STOPPING, ended=True, diagnosis=CRASH, failures_in_row=4), {}, ActionKind.FAIL, "rank-died"),
    (view(Phase.STOPPING, end_trouble=SIZING), {}, ActionKind.FAIL, "kv-pool-too-small"),
    (view(Phase.STOPPING, end_trouble=CRASH, failures_in_row=1), {}, ActionKind.BACK_OFF, "rank-died"),
    (view(Phase.STOPPING, end_trouble=CRASH, diagnosis=SIZING, failures_in_row=1), {}, ActionKind.FAIL, "kv-pool-too-small"),
    (view(Phase.BACKING_OFF, next_start_monotonic=NOW + 1), {}, None, None),
    (view(Phase.BACKING_OFF, next_start_monotonic=NOW), {}, ActionKind.START, None),
    (view(Phase.BACKING_OFF, failures_in_row=3), {}, ActionKind.BACK_OFF, None),                   # of an earlier supervisor
    (view(Phase.STOPPING, ended=True, diagnosis=CRASH, failures_in_row=9**9), {}, ActionKind.FAIL, "rank-died"),
    (view(Phase.BACKING_OFF, next_start_monotonic=NOW), {"available": 2 * GIB - 1}, None, None),   # floor + margin
    (view(Phase.BACKING_OFF, next_start_monotonic=NOW), {"available": None}, ActionKind.START, None),
    (view(Phase.BACKING_OFF, next_start_monotonic=NOW, requests=(Request.STOP,)), {}, ActionKind.REST, None),
    # a supervisor that is stopping starts nothing again, whatever else a worker is being ended for
    (view(Phase.STOPPING, ended=True, requests=(Request.STOP,), restart_wanted=True), {}, ActionKind.REST, None),
    (view(Phase.STOPPING, ended=True, requests=(Request.STOP,), diagnosis=CRASH, failures_in_row=1), {}, ActionKind.REST, None),
    (view(Phase.STOPPING, ended=True, requests=(Request.STOP,), diagnosis=SIZING), {}, ActionKind.FAIL, "kv-pool-too-small"),
    (view(Phase.STOPPED, requests=(Request.STOP, Request.RESUME)), {}, None, None),
    (view(Phase.FAILED, diagnosis=SIZING, requests=(Request.STOP,)), {}, None, None),
    (view(Phase.FAILED, diagnosis=SIZING), {}, None, None),
    (view(Phase.FAILED, requests=(Request.RESUME,)), {}, ActionKind.START, None),
    (view(Phase.STOPPED, requests=(Request.RESTART,)), {}, ActionKind.START, None),
])
def test_one_case_one_decision(seen: WorkerView, options: dict[str, Any], kind: ActionKind | None, cause: str | None) -> None:
    decision = case(seen, **options)
    assert (decision.kind if decision else None) == kind
    if decision is not None:
        assert decision.generation == 4 and decision.sentence
        assert (decision.diagnosis.cause if decision.diagnosis else None) == cause


@pytest.mark.parametrize(("failures", "delay"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_the_pause_doubles(failures: int, delay: float) -> None:
    decision = case(view(Phase.STOPPING, ended=True, diagnosis=CRASH, failures_in_row=failures))
    assert decision is not None and decision.delay_seconds == delay


def test_the_pause_has_an_end() -> None:
    seen = view(Phase.STOPPING, ended=True, diagnosis=CRASH, failures_in_row=40)
    decision = decide(Snapshot(NOW, 0.0, MemoryReading(NOW, 1, 1, None, None, 1, None, None),
                               {"w": WorkerReading("w", 4, None, (), (), (), ())}, {}), [seen], replace(POLICY, restarts=99))[0]
    assert decision.delay_seconds == 5.0


def test_what_is_missing_says_what_was_wanted_and_found() -> None:
    assert missing_hooks((("line", "scheduler", 2),), [rank(0), rank(1, "wanted")]) == [
        ("line", "wanted on 2 scheduler, found on 1 (2 said hello)")]
    assert missing_hooks((("line", "scheduler", 2),), [rank(0), rank(1, alive=False)])
    assert not missing_hooks((("line", "scheduler", 2),), [rank(0), rank(1)])


# --- pd.restart -------------------------------------------------------------------------------------------------------

def peers(*seen: WorkerView, dying: str = "", pair: bool = True) -> dict[str, Decision]:
    """The decisions by worker, where a rank of `dying` has died."""
    memory = MemoryReading(NOW, 16 * GIB, 8 * GIB, None, None, 8 * GIB, None, None)
    readings = {each.name: WorkerReading(each.name, 4, ProcessId(99, 7), (), (rank(0), rank(1)),
                                         (rank(2, alive=False),) if each.name == dying else (), ()) for each in seen}
    found = decide(Snapshot(NOW, 0.0, memory, readings, {"stops": 1}), seen, replace(POLICY, restart_pairs=pair))
    assert len({each.worker for each in found}) == len(found)
    return {each.worker: each for each in found}


PREFILL, PREFILL2 = (view(Phase.UP, name=name, role="prefill", generation=number) for name, number in (("p", 4), ("q", 5)))
DECODE, DECODE2 = (view(Phase.UP, name=name, role="decode", generation=number) for name, number in (("d", 6), ("e", 7)))


def test_the_peers_of_a_worker_that_died_are_drained_and_started_again() -> None:
    found = peers(PREFILL, PREFILL2, DECODE, DECODE2, view(Phase.UP, name="alone"), dying="p")
    assert set(found) == {"p", "d", "e"} and found["p"].reason == "rank-died"
    for name, generation in (("d", 6), ("e", 7)):
        restart = found[name]
        assert (restart.kind, restart.generation, restart.diagnosis) == (ActionKind.STOP, generation, None)
        assert restart.reason in RESTARTS
        assert restart.sentence == ("generation 4 of p, its peer, ends (pd.restart: pair): draining, then the next generation")


def test_one_leaves_the_peers() -> None:
    assert set(peers(PREFILL, DECODE, dying="p", pair=False)) == {"p"}


def test_a_restart_on_request_takes_the_peers_along_and_a_stop_does_not() -> None:
    assert set(peers(PREFILL, replace(DECODE, requests=(Request.RESTART,)))) == {"p", "d"}
    assert set(peers(PREFILL, replace(DECODE, requests=(Request.STOP,)))) == {"d"}


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.UP])
def test_only_a_peer_that_serves_is_restarted(phase: Phase) -> None:
    """One that starts has met nobody yet; what a person drained stays drained."""
    decode = replace(DECODE, phase=phase)
    assert peers(PREFILL, decode, dying="p").get("d") == peers(PREFILL, decode).get("d")


def test_a_start_that_fails_has_no_peers() -> None:
    """Else each of its attempts would end them again."""
    assert set(peers(replace(PREFILL, phase=Phase.STARTING), DECODE, dying="p")) == {"p"}


def test_a_peer_of_a_drained_worker_is_restarted() -> None:
    assert set(peers(replace(PREFILL, phase=Phase.DRAINING), DECODE, dying="p")) == {"p", "d"}


def test_what_was_asked_of_a_peer_goes_before() -> None:
    assert peers(PREFILL, replace(DECODE, requests=(Request.DRAIN,)), dying="p")["d"].kind is ActionKind.DRAIN
    assert peers(PREFILL, replace(DECODE, requests=(Request.STOP,)), dying="p")["d"].reason == Request.STOP.value


def test_a_peer_that_is_ended_for_its_peer_ends_nobody() -> None:
    assert peers(replace(PREFILL, phase=Phase.STOPPING), replace(DECODE, phase=Phase.STOPPING)) == {}
    assert set(peers(replace(PREFILL, phase=Phase.STOPPING), DECODE)) == set()
