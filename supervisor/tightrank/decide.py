"""Pure: one snapshot and the workers' views -> decisions, each with its sentence. It neither logs nor acts.

For each worker the first rule that speaks decides. The rules stand in the order in which they may overrule each other:
what a person asked for, then what proves a failure, then what is waited for.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tightrank.config import Config
from tightrank.errors import CAUSES
from tightrank.hang import HangLimits, limits_of, overdue
from tightrank.records import (
    ActionKind,
    Decision,
    Diagnosis,
    Phase,
    RankReading,
    Request,
    Snapshot,
    WorkerReading,
    WorkerView,
)

HELLO_GRACE_SECONDS = 2.0       # a healthy engine's ranks said hello long ago; this covers a slow disk
CPU_ONLY_FACTOR = 4             # a start with no sign but a busy processor (a compiler) gets this many stall limits
REPLICA_SECONDS = 1.0           # for all replicas to tell a fault that they had alike
STEADY_SECONDS = 60.0           # up for this long: earlier failures count no more
PEER_RESTART = "peer-restart"
RESTARTS = (Request.RESTART.value, PEER_RESTART)     # reasons of a stop after which the worker starts again
_PEER = {"prefill": "decode", "decode": "prefill"}
_AS_ASKED = ("in-force", "observing")
_SERVED = (Phase.UP, Phase.DRAINING)
_HANG = HangLimits()


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of the configuration that decisions need. `jitter` is added to a back-off, as a share of it."""
    floor_bytes: int
    margin_bytes: int
    restarts: int
    backoff_first_seconds: float
    backoff_longest_seconds: float
    restart_pairs: bool = False                 # pd.restart: pair
    hang: HangLimits = _HANG
    jitter: Callable[[], float] = lambda: random.uniform(0.0, 0.2)  # noqa: S311 - spreads restarts, keeps no secret

    @classmethod
    def of(cls, config: Config) -> Policy:
        guard, limits = config.guard, config.limits
        return cls(guard.floor_bytes, guard.margin_bytes, limits.restarts, limits.backoff_first_seconds,
                   limits.backoff_longest_seconds, config.pd.restart == "pair", limits_of(limits))


@dataclass(frozen=True, slots=True)
class _Case:
    """All that a rule may look at."""
    view: WorkerView
    reading: WorkerReading
    snapshot: Snapshot
    policy: Policy

    def decision(self, kind: ActionKind, sentence: str, diagnosis: Diagnosis | None = None,
                 delay_seconds: float = 0.0, reason: str = "") -> Decision:
        return Decision(kind, self.view.name, self.view.generation, sentence, diagnosis, delay_seconds,
                        reason or (diagnosis.cause if diagnosis else kind.value))

    def stop(self, diagnosis: Diagnosis) -> Decision:
        return self.decision(ActionKind.STOP, f"ending generation {self.view.generation}: {diagnosis.summary}",
                             diagnosis)


Rule = Callable[[_Case], Decision | None]


def decide(snapshot: Snapshot, views: Sequence[WorkerView], policy: Policy) -> list[Decision]:
    """At most one decision for each worker."""
    decisions = []
    for view in views:
        case = _Case(view, snapshot.workers[view.name], snapshot, policy)
        found = next((decision for rule in _RULES[view.phase] if (decision := rule(case)) is not None), None)
        if found is not None:
            decisions.append(found)
    return decisions + (_restart_peers(decisions, views) if policy.restart_pairs else [])


def _restart_peers(decisions: Sequence[Decision], views: Sequence[WorkerView]) -> list[Decision]:
    """Where a prefill or decode worker that served is ended, but for good or with a peer, the other role's are restarted
    too: they hold connections to a process that is gone. Each once: what is ended for its peer ends nobody else."""
    by_name = {view.name: view for view in views}
    ended = [by_name[each.worker] for each in decisions if each.kind is ActionKind.STOP and each.reason != Request.STOP.value]
    gone = {_PEER[view.role]: view for view in ended if view.role in _PEER and view.phase in _SERVED}
    busy = {each.worker for each in decisions}
    return [Decision(ActionKind.STOP, view.name, view.generation, f"generation {gone[view.role].generation} of "
                     f"{gone[view.role].name}, its peer, ends (pd.restart: pair): draining, then the next generation",
                     reason=PEER_RESTART)
            for view in views if view.role in gone and view.phase is Phase.UP and view.name not in busy]


def _fatal(cause: str, summary: str, change: str, evidence: tuple[str, ...] = (), confidence: str = "certain",
           numbers: Mapping[str, float] | None = None) -> Diagnosis:
    return Diagnosis(cause, summary, evidence, change, CAUSES[cause].restart_helps, numbers or {}, confidence)


# --- requests ---------------------------------------------------------------------------------------------------------

def _asked_to_end(case: _Case) -> Decision | None:
    for request, sentence in ((Request.STOP, "asked to stop: draining"), (Request.RESTART, "asked to restart: draining")):
        if request in case.view.requests:
            return case.decision(ActionKind.STOP, sentence, reason=request.value)
    return None


def _asked(request: Request, kind: ActionKind, sentence: str) -> Rule:
    return lambda case: case.decision(kind, sentence) if request in case.view.requests else None


_asked_to_drain = _asked(Request.DRAIN, ActionKind.DRAIN, "asked to drain: admitting nothing more")
_asked_to_resume = _asked(Request.RESUME, ActionKind.ADMIT, "asked to resume: admitting again")
_asked_to_rest = _asked(Request.STOP, ActionKind.REST, "asked to stop")


def _asked_to_start(case: _Case) -> Decision | None:
    if {Request.RESUME, Request.RESTART} & set(case.view.requests) and Request.STOP not in case.view.requests:
        return case.decision(ActionKind.START, "asked to start")
    return None


# --- proofs of failure ------------------------------------------------------------------------------------------------

def _guard_acted(case: _Case) -> Decision | None:
    stops = case.snapshot.guard.get("stops")
    if stops is None or stops <= case.view.guard_stops_at_start:
        return None
    last = case.snapshot.guard.get("last", {})
    available, floor = last.get("available_bytes", 0), last.get("floor_bytes", case.policy.floor_bytes)
    hog = last.get("hog") or {}
    named = f"; growing most: {hog.get('name')} (pid {hog.get('pid')}, +{_mib(hog.get('growth_bytes') or 0)})" if hog else ""
    return case.stop(_fatal(
        "guard-floor", f"available memory fell to {_mib(available)}, under the floor of {_mib(floor)}{named}",
        "give the engine less memory (its KV fraction or its chunk maximum), or move the other process away; "
        "guard.floor is the limit", numbers={"available_bytes": available, "floor_bytes": floor}))


def _replicated_fault(case: _Case) -> Decision | None:
    """Schedulers are replicas: when one decides by its fallback and another does not, the next collective hangs. Faults
    that all of them had alike leave them alike."""
    roles = {role for hook, role, _ in case.view.hook_roles if hook == "line"}
    replicas = [rank for rank in (*case.reading.ranks, *case.reading.dead_ranks) if rank.role in roles]
    faults = {rank.rank: [fault for fault in rank.facts.get("faults", ()) if fault["replicated"]] for rank in replicas}
    alike = len({len(found) for found in faults.values()}) < 2
    since = case.view.fault_since_monotonic
    settled = case.view.exit_status is not None or bool(case.reading.dead_ranks) or (
        since is not None and case.snapshot.monotonic - since > REPLICA_SECONDS)
    if alike or not settled:
        return None
    number, first = next((number, found[0]) for number, found in faults.items() if found)
    return case.stop(_fatal(
        "adapter-fault", f"hook {first['hook']} raised in {first['where']} on rank {number} and not alike on all of "
        f"{len(replicas)} ranks, which must decide alike: {first['error']}",
        f"report this fault; leave {first['hook']} out of `hooks` to run without it", (str(first["error"]),)))


def _proof(case: _Case) -> Decision | None:
    return case.stop(case.view.proof) if case.view.proof else None


def _main_ended(case: _Case) -> Decision | None:
    if case.view.exit_status is None:
        return None
    return case.stop(case.view.post_mortem or _fatal(
        "engine-exited", f"the engine's main process ended unasked ({_exit_words(case.view.exit_status)})",
        "see the last lines of its log"))


def _rank_ended(case: _Case) -> Decision | None:
    if not case.reading.dead_ranks:
        return None
    rank = case.reading.dead_ranks[0]
    diagnosis = case.view.post_mortem
    return case.stop(diagnosis or _fatal(
        "rank-died", f"{_rank_words(rank)} ended; the rest of the worker cannot go on without it",
        "see the last lines of its log and the kernel's log for an OOM kill"))


def _hook_failed(case: _Case) -> Decision | None:
    for rank in case.reading.ranks:
        for hook, state in rank.hooks.items():
            if hook in case.view.hooks and state.get("state") in ("failed", "skipped"):
                return case.stop(_not_in_force(
                    hook, f"{state['state']} on {_rank_words(rank)}: wanted {state.get('wanted') or hook}, "
                          f"found {state.get('found') or 'nothing'}"))
    return None


def _not_in_force(hook: str, found: str) -> Diagnosis:
    return _fatal("adapter-not-in-force", f"hook {hook} is not in force: {found}",
                  f"start the engine without -I, -E or -S, with a release that has the hook, or leave {hook} out of `hooks`")


def missing_hooks(hook_roles: Sequence[tuple[str, str, int]], ranks: Sequence[RankReading]) -> list[tuple[str, str]]:
    """(hook, what was wanted and found) for every wanted hook that is not in force on every rank."""
    missing = []
    for hook, role, count in hook_roles:
        holders = [rank for rank in ranks if rank.role == role and rank.alive]
        in_force = sum(rank.hooks.get(hook, {}).get("state") in _AS_ASKED for rank in holders)
        if in_force < count:
            missing.append((hook, f"wanted on {count} {role}, found on {in_force} ({len(holders)} said hello)"))
    return missing


def _healthy_without_hooks(case: _Case) -> Decision | None:
    since = case.view.healthy_since_monotonic
    if since is None or case.snapshot.monotonic - since < HELLO_GRACE_SECONDS:
        return None
    missing = missing_hooks(case.view.hook_roles, case.reading.ranks)
    return case.stop(_not_in_force(*missing[0])) if missing else None


def _hung(case: _Case) -> Decision | None:
    stall = case.view.stall
    found = overdue(stall, case.policy.hang, case.view.phase is Phase.STARTING) if stall is not None else None
    if stall is None or found is None:
        return None
    return case.stop(_fatal(
        "engine-hung", found.sentence, "see the stacks in the bundle; limits.hang, limits.hang_factor and "
        "limits.hang_busy are the limits", confidence="certain" if stall.stopped else "likely",
        numbers={"still_seconds": round(stall.still_seconds, 2), "limit_seconds": round(found.limit_seconds, 2),
                 "in_flight": stall.in_flight}))


def _start_stalled(case: _Case) -> Decision | None:
    view, idle = case.view, case.snapshot.monotonic - case.view.progress_monotonic
    if idle < view.start_stall_seconds:
        return None
    if _busy(case) and idle < view.start_stall_seconds * CPU_ONLY_FACTOR:
        return None
    refused = f"; its port said: {view.probe.why}" if view.probe and view.probe.why else ""
    cause = "canary-failed" if view.healthy_since_monotonic is not None else "start-stalled"
    return case.stop(_fatal(cause, f"no progress for {idle:.0f} s while starting{refused}",
                            "look at the last lines of its log; limits.start_stall is the limit"))


def _busy(case: _Case) -> bool:
    return any(process.state == "R" for process in case.reading.processes)


# --- what is waited for -----------------------------------------------------------------------------------------------

def _became_ready(case: _Case) -> Decision | None:
    probe = case.view.probe
    if probe is None or not probe.canary_ok or missing_hooks(case.view.hook_roles, case.reading.ranks):
        return None
    return case.decision(ActionKind.ADMIT, "a real request was served and every wanted hook is in force on every rank")


def _tree_ended(case: _Case) -> Decision | None:
    view = case.view
    if view.end_trouble is not None:
        known = view.diagnosis     # what no restart can fix must not be hidden by what is tried again
        fatal = known is not None and not known.restart_helps and view.end_trouble.restart_helps
        return _after_failure(case, known if known is not None and fatal else view.end_trouble)
    if not view.ended:
        return None
    if view.diagnosis is not None and not (Request.STOP in view.requests and view.diagnosis.restart_helps):
        return _after_failure(case, view.diagnosis)
    again = view.restart_wanted and Request.STOP not in view.requests
    return case.decision(ActionKind.START if again else ActionKind.REST,
                         "the tree is gone, nothing is left" + (": starting again" if again else ""))


def _after_failure(case: _Case, diagnosis: Diagnosis) -> Decision:
    view, policy = case.view, case.policy
    if not diagnosis.restart_helps:
        return case.decision(ActionKind.FAIL, f"no restart can fix this: {diagnosis.summary}", diagnosis)
    if view.failures_in_row > policy.restarts:
        return case.decision(ActionKind.FAIL, f"failed {view.failures_in_row} times in a row, giving up: "
                                              f"{diagnosis.summary}", diagnosis)
    return _pause(case, diagnosis)


def _pause(case: _Case, diagnosis: Diagnosis | None) -> Decision:
    failures, policy = case.view.failures_in_row, case.policy
    base = policy.backoff_first_seconds * 2 ** min(max(failures - 1, 0), 64)     # a float has an end
    delay = min(base, policy.backoff_longest_seconds) * (1 + policy.jitter())
    return case.decision(ActionKind.BACK_OFF, f"starting again in {delay:.1f} s "
                         f"(failure {failures} of at most {policy.restarts} in a row)", diagnosis, delay)


def _time_to_start(case: _Case) -> Decision | None:
    due = case.view.next_start_monotonic
    if due is None:                       # a supervisor before this one has counted failures: they make a pause here too
        return _pause(case, None)
    if case.snapshot.monotonic < due:
        return None
    available, wanted = case.snapshot.memory.available_bytes, case.policy.floor_bytes + case.policy.margin_bytes
    if available is not None and available < wanted:
        return None                       # it would be ended at once; the status says what is waited for
    return case.decision(ActionKind.START, "starting the next generation")


_FAILURES: tuple[Rule, ...] = (_guard_acted, _replicated_fault, _proof, _main_ended, _rank_ended, _hook_failed)
_RULES: Mapping[Phase, tuple[Rule, ...]] = {
    Phase.STARTING: (_asked_to_end, *_FAILURES, _healthy_without_hooks, _became_ready, _hung,
                     _start_stalled),
    Phase.UP: (_asked_to_end, _asked_to_drain, *_FAILURES, _hung),
    Phase.DRAINING: (_asked_to_end, _asked_to_resume, *_FAILURES, _hung),
    Phase.STOPPING: (_tree_ended,),
    Phase.BACKING_OFF: (_asked_to_rest, _asked_to_start, _time_to_start),
    Phase.FAILED: (_asked_to_start,),      # asked to stop it stays failed: that it had failed must not be lost
    Phase.STOPPED: (_asked_to_start,),
}


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def _rank_words(rank: RankReading) -> str:
    number = "" if rank.rank is None else f" {rank.rank}"
    return f"{rank.role}{number} (pid {rank.id.pid})"


def _exit_words(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"
