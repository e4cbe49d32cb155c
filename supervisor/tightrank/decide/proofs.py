"""Rules for what proves a failure, and for what is missing where an engine says that it is healthy."""
from __future__ import annotations

from collections.abc import Sequence

from tightrank.decide.case import Case, Rule, fatal
from tightrank.hang import overdue
from tightrank.records import Decision, Diagnosis, Phase, RankReading

HELLO_GRACE_SECONDS = 2.0       # a healthy engine's ranks said hello long ago; this covers a slow disk
CPU_ONLY_FACTOR = 4             # a start with no sign but a busy processor (a compiler) gets this many stall limits
REPLICA_SECONDS = 1.0           # for all replicas to tell a fault that they had alike
_AS_ASKED = ("in-force", "observing")


def _guard_acted(case: Case) -> Decision | None:
    stops = case.snapshot.guard.get("stops")
    if stops is None or stops <= case.view.guard_stops_at_start:
        return None
    last = case.snapshot.guard.get("last", {})
    available, floor = last.get("available_bytes", 0), last.get("floor_bytes", case.policy.floor_bytes)
    hog = last.get("hog") or {}
    named = f"; growing most: {hog.get('name')} (pid {hog.get('pid')}, +{_mib(hog.get('growth_bytes') or 0)})" if hog else ""
    return case.stop(fatal(
        "guard-floor", f"available memory fell to {_mib(available)}, under the floor of {_mib(floor)}{named}",
        "give the engine less memory (its KV fraction or its chunk maximum), or move the other process away; "
        "guard.floor is the limit", numbers={"available_bytes": available, "floor_bytes": floor}))


def _replicated_fault(case: Case) -> Decision | None:
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
    return case.stop(fatal(
        "adapter-fault", f"hook {first['hook']} raised in {first['where']} on rank {number} and not alike on all of "
        f"{len(replicas)} ranks, which must decide alike: {first['error']}",
        f"report this fault; leave {first['hook']} out of `hooks` to run without it", (str(first["error"]),)))


def _proof(case: Case) -> Decision | None:
    return case.stop(case.view.proof) if case.view.proof else None


def _main_ended(case: Case) -> Decision | None:
    if case.view.exit_status is None:
        return None
    return case.stop(case.view.post_mortem or fatal(
        "engine-exited", f"the engine's main process ended unasked ({_exit_words(case.view.exit_status)})",
        "see the last lines of its log"))


def _rank_ended(case: Case) -> Decision | None:
    if not case.reading.dead_ranks:
        return None
    rank = case.reading.dead_ranks[0]
    diagnosis = case.view.post_mortem
    return case.stop(diagnosis or fatal(
        "rank-died", f"{_rank_words(rank)} ended; the rest of the worker cannot go on without it",
        "see the last lines of its log and the kernel's log for an OOM kill"))


def _hook_failed(case: Case) -> Decision | None:
    for rank in case.reading.ranks:
        for hook, state in rank.hooks.items():
            if hook in case.view.hooks and state.get("state") in ("failed", "skipped"):
                return case.stop(_not_in_force(
                    hook, f"{state['state']} on {_rank_words(rank)}: wanted {state.get('wanted') or hook}, "
                          f"found {state.get('found') or 'nothing'}"))
    return None


def _not_in_force(hook: str, found: str) -> Diagnosis:
    return fatal("adapter-not-in-force", f"hook {hook} is not in force: {found}",
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


def healthy_without_hooks(case: Case) -> Decision | None:
    """On a member nobody asks the engine how it is: it has no port, or one that says yes to everything."""
    since = case.view.healthy_since_monotonic
    if since is None or case.snapshot.monotonic - since < HELLO_GRACE_SECONDS:
        return None
    missing = missing_hooks(case.view.hook_roles, case.reading.ranks)
    return case.stop(_not_in_force(*missing[0])) if missing else None


def others(case: Case) -> Decision | None:
    """What the ranks on other hosts mean for ours: where one is gone, the next collective of all others hangs."""
    nodes = case.view.nodes
    return case.stop(nodes.trouble) if nodes is not None and nodes.trouble is not None else None


def hung(case: Case) -> Decision | None:
    stall = case.view.stall
    found = overdue(stall, case.policy.hang, case.view.phase is Phase.STARTING) if stall is not None else None
    if stall is None or found is None:
        return None
    return case.stop(fatal(
        "engine-hung", found.sentence, "see the stacks in the bundle; limits.hang, limits.hang_factor and "
        "limits.hang_busy are the limits", confidence="certain" if stall.stopped else "likely",
        numbers={"still_seconds": round(stall.still_seconds, 2), "limit_seconds": round(found.limit_seconds, 2),
                 "in_flight": stall.in_flight}))


def start_stalled(case: Case) -> Decision | None:
    view, idle = case.view, case.snapshot.monotonic - case.view.progress_monotonic
    if idle < view.start_stall_seconds:
        return None
    if _busy(case) and idle < view.start_stall_seconds * CPU_ONLY_FACTOR:
        return None
    refused = f"; its port said: {view.probe.why}" if view.probe and view.probe.why else ""
    cause = "canary-failed" if view.healthy_since_monotonic is not None else "start-stalled"
    return case.stop(fatal(cause, f"no progress for {idle:.0f} s while starting{refused}",
                            "look at the last lines of its log; limits.start_stall is the limit"))


def _busy(case: Case) -> bool:
    return any(process.state == "R" for process in case.reading.processes)


FAILURES: tuple[Rule, ...] = (_guard_acted, _replicated_fault, _proof, _main_ended, _rank_ended, _hook_failed)


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def _rank_words(rank: RankReading) -> str:
    number = "" if rank.rank is None else f" {rank.rank}"
    return f"{rank.role}{number} (pid {rank.id.pid})"


def _exit_words(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"
