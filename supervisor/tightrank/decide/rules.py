"""The order of the rules, what a person asks for, and what is waited for."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightrank.decide.case import Case, Policy, Rule
from tightrank.decide.proofs import FAILURES, healthy_without_hooks, hung, missing_hooks, others, start_stalled
from tightrank.records import ActionKind, Decision, Diagnosis, Phase, Request, Snapshot, WorkerView

STEADY_SECONDS = 60.0           # up for this long: earlier failures count no more
PEER_RESTART = "peer-restart"
RESTARTS = (Request.RESTART.value, PEER_RESTART)     # reasons of a stop after which the worker starts again
_PEER = {"prefill": "decode", "decode": "prefill"}
_SERVED = (Phase.UP, Phase.DRAINING)


def decide(snapshot: Snapshot, views: Sequence[WorkerView], policy: Policy) -> list[Decision]:
    """At most one decision for each worker."""
    decisions = []
    for view in views:
        case = Case(view, snapshot.workers[view.name], snapshot, policy)
        rules = _MEMBER if view.nodes is not None and not view.nodes.leads else _RULES
        found = next((decision for rule in rules[view.phase] if (decision := rule(case)) is not None), None)
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


# --- requests ---------------------------------------------------------------------------------------------------------

def _asked_to_end(case: Case) -> Decision | None:
    for request, sentence in ((Request.STOP, "asked to stop: draining"), (Request.RESTART, "asked to restart: draining")):
        if request in case.view.requests:
            return case.decision(ActionKind.STOP, sentence, reason=request.value)
    return None


def _asked(request: Request, kind: ActionKind, sentence: str) -> Rule:
    return lambda case: case.decision(kind, sentence) if request in case.view.requests else None


_asked_to_drain = _asked(Request.DRAIN, ActionKind.DRAIN, "asked to drain: admitting nothing more")
_asked_to_resume = _asked(Request.RESUME, ActionKind.ADMIT, "asked to resume: admitting again")
_asked_to_rest = _asked(Request.STOP, ActionKind.REST, "asked to stop")


def _asked_to_start(case: Case) -> Decision | None:
    if {Request.RESUME, Request.RESTART} & set(case.view.requests) and Request.STOP not in case.view.requests:
        return _start(case, "asked to start")
    return None


def _start(case: Case, sentence: str) -> Decision:
    """As soon as all hosts are ready for it."""
    if case.view.nodes is not None and case.view.nodes.blocked:
        return case.decision(ActionKind.BACK_OFF, f"{sentence}: when the other hosts are ready: {case.view.nodes.blocked}")
    return case.decision(ActionKind.START, sentence)


# --- what is waited for -----------------------------------------------------------------------------------------------

def _became_ready(case: Case) -> Decision | None:
    probe, nodes = case.view.probe, case.view.nodes
    if nodes is not None and not nodes.leads:
        return _became_ready_on_a_member(case, nodes.admitted)
    if nodes is not None and not nodes.whole:
        return None
    if probe is None or not probe.canary_ok or missing_hooks(case.view.hook_roles, case.reading.ranks):
        return None
    return case.decision(ActionKind.ADMIT, "a real request was served and every wanted hook is in force on every rank")


def _became_ready_on_a_member(case: Case, admitted: bool) -> Decision | None:
    if not admitted or missing_hooks(case.view.hook_roles, case.reading.ranks):
        return None
    return case.decision(ActionKind.ADMIT, "the leader is up and every wanted hook is in force on the ranks of this host")


def _tree_ended(case: Case) -> Decision | None:
    view = case.view
    if view.end_trouble is not None:
        known = view.diagnosis     # what no restart can fix must not be hidden by what is tried again
        fatal = known is not None and not known.restart_helps and view.end_trouble.restart_helps
        return _after_failure(case, known if known is not None and fatal else view.end_trouble)
    if not view.ended:
        return None
    if view.nodes is not None and not view.nodes.leads:
        return case.decision(ActionKind.REST, "the ranks of this host are gone: the leader decides what comes next")
    if view.diagnosis is not None and not (Request.STOP in view.requests and view.diagnosis.restart_helps):
        return _after_failure(case, view.diagnosis)
    if view.restart_wanted and Request.STOP not in view.requests:
        return _start(case, "the tree is gone, nothing is left: starting again")
    return case.decision(ActionKind.REST, "the tree is gone, nothing is left")


def _after_failure(case: Case, diagnosis: Diagnosis) -> Decision:
    view, policy = case.view, case.policy
    if not diagnosis.restart_helps:
        return case.decision(ActionKind.FAIL, f"no restart can fix this: {diagnosis.summary}", diagnosis)
    if view.failures_in_row > policy.restarts:
        return case.decision(ActionKind.FAIL, f"failed {view.failures_in_row} times in a row, giving up: "
                                              f"{diagnosis.summary}", diagnosis)
    return _pause(case, diagnosis)


def _pause(case: Case, diagnosis: Diagnosis | None) -> Decision:
    failures, policy = case.view.failures_in_row, case.policy
    base = policy.backoff_first_seconds * 2 ** min(max(failures - 1, 0), 64)     # a float has an end
    delay = min(base, policy.backoff_longest_seconds) * (1 + policy.jitter())
    return case.decision(ActionKind.BACK_OFF, f"starting again in {delay:.1f} s "
                         f"(failure {failures} of at most {policy.restarts} in a row)", diagnosis, delay)


def _ordered(case: Case) -> Decision | None:
    """On a member the leader alone decides what starts."""
    nodes = case.view.nodes
    if nodes is None or nodes.wanted is None or _short_of_memory(case):
        return None
    return case.decision(ActionKind.START, f"the leader starts generation {nodes.wanted}")


def _time_to_start(case: Case) -> Decision | None:
    due, nodes = case.view.next_start_monotonic, case.view.nodes
    if nodes is not None and nodes.blocked and case.snapshot.monotonic >= (due or 0.0):
        return None                       # the status says who is waited for
    if due is None:                       # a supervisor before this one has counted failures: they make a pause here too
        return _pause(case, None)
    if case.snapshot.monotonic < due:
        return None
    if _short_of_memory(case):
        return None                       # it would be ended at once; the status says what is waited for
    return case.decision(ActionKind.START, "starting the next generation")


def _short_of_memory(case: Case) -> bool:
    available = case.snapshot.memory.available_bytes
    return available is not None and available < case.policy.floor_bytes + case.policy.margin_bytes


_RULES: Mapping[Phase, tuple[Rule, ...]] = {
    Phase.STARTING: (_asked_to_end, *FAILURES, others, healthy_without_hooks, _became_ready, hung, start_stalled),
    Phase.UP: (_asked_to_end, _asked_to_drain, *FAILURES, others, hung),
    Phase.DRAINING: (_asked_to_end, _asked_to_resume, *FAILURES, others, hung),
    Phase.STOPPING: (_tree_ended,),
    Phase.BACKING_OFF: (_asked_to_rest, _asked_to_start, _time_to_start),
    Phase.FAILED: (_asked_to_start,),      # asked to stop it stays failed: that it had failed must not be lost
    Phase.STOPPED: (_asked_to_start,),
}
# On a member: its own faults, and the leader's word. When a start has stalled is seen at the leader, which has the API.
_MEMBER: Mapping[Phase, tuple[Rule, ...]] = {
    Phase.STARTING: (_asked_to_end, *FAILURES, others, _became_ready, hung),
    Phase.UP: (_asked_to_end, *FAILURES, others, hung),
    Phase.DRAINING: (_asked_to_end, *FAILURES, others, hung),
    Phase.STOPPING: (_tree_ended,),
    Phase.BACKING_OFF: (_asked_to_rest, _ordered),
    Phase.FAILED: (),
    Phase.STOPPED: (_ordered,),
}
