"""One snapshot and the workers' state -> the Status that the world sees."""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil

from tightrank import __version__, engines
from tightrank.adapter import line
from tightrank.auto import Aim
from tightrank.decide import Policy, missing_hooks
from tightrank.generation import Generation
from tightrank.plan.line import DEFAULT_MAXIMUM
from tightrank.plan.pace import Pace
from tightrank.records import LevelStatus, LineSpec, NodeStatus, Phase, Shed, Snapshot, Status, WorkerReading, WorkerStatus
from tightrank.watch import tightest
from tightrank.worker import Worker


def build(name: str, started_unix: float, snapshot: Snapshot, workers: Sequence[Worker], policy: Policy,
          draining: bool, levels: tuple[LevelStatus, ...] = (), aims: Mapping[str, Aim] | None = None,
          nodes: tuple[NodeStatus, ...] = ()) -> Status:
    """Ready means: every worker is up. The reason is that of the first worker that is not."""
    states = tuple(_worker(worker, snapshot, policy, (aims or {}).get(worker.template.name), nodes) for worker in workers)
    reasons = [f"{state.name}: {state.reason}" for state in states if not state.ready]
    if draining:
        reasons.insert(0, "the supervisor is stopping")
    return Status(
        name=name, version=__version__, started_unix=started_unix, updated_unix=time.time(),
        updated_monotonic=time.monotonic(), ready=not reasons, reason="; ".join(reasons), draining=draining,
        memory=snapshot.memory, guard=snapshot.guard, floor_bytes=policy.floor_bytes,
        tightest_rank=tightest(snapshot.workers), workers=states, levels=levels, nodes=nodes)


def _worker(worker: Worker, snapshot: Snapshot, policy: Policy, aim: Aim | None,
            nodes: tuple[NodeStatus, ...]) -> WorkerStatus:
    reading, spec, run = snapshot.workers[worker.template.name], worker.template, worker.run
    pace = worker.pace
    version = next((rank.engine_version for rank in reading.ranks if rank.engine_version), None)
    next_start = None if worker.next_start is None else \
        snapshot.unix + max(worker.next_start - snapshot.monotonic, 0.0)
    return WorkerStatus(
        name=spec.name, engine=spec.engine, engine_version=version, role=spec.role, phase=worker.phase,
        step=run.step if run and worker.phase is Phase.STARTING else None, generation=worker.generation,
        since_unix=worker.since_unix, ready=worker.phase is Phase.UP, reason=_reason(worker, reading, snapshot, policy, nodes),
        host=spec.host, port=spec.port, restarts=worker.restarts, next_start_unix=next_start,
        diagnosis=worker.diagnosis, line=_line(spec.line, reading),
        line_budget=min(_facts(reading, "line_budget"), default=spec.line.budget) if spec.line else None,
        over_line_steps=run.prefills.over_line_steps if run else 0, line_auto=asdict(aim) if aim else None,
        context_tokens=spec.context_tokens, ranks=reading.ranks,
        processes=reading.processes, hooks_wanted=tuple(spec.hooks), log_tail=worker.tail(),
        served_model=spec.served_model, address=spec.address, transfer_port=spec.transfer_port,
        longest_step_seconds=run.prefills.longest_seconds if run else None, drains=worker.drains,
        headroom=run.headroom if run else None, shed=_shed(run, pace, snapshot.monotonic) if run else None,
        aborts=run.steering.aborts_in_force[0] if run else 0, bundle=worker.bundle,
        abort_why=run.steering.aborts_in_force[1] if run else "",
        pace=asdict(pace) if pace else None, comparisons=worker.comparisons)


def _facts(reading: WorkerReading, name: str) -> list[int]:
    """What the ranks say of themselves."""
    facts = [rank.facts.get(name) for rank in reading.ranks]
    return [fact for fact in facts if type(fact) is int and fact > 0]


def _shed(run: Generation, pace: Pace | None, now: float) -> Shed | None:
    """What is refused now. Memory comes back when the prefill under way has ended, and the level goes back a pause later."""
    shed = run.steering.shed_in_force
    if shed is None or pace is None:
        return shed
    seconds = _under_way_seconds(run, pace, run.prefills.width_now(now))
    return replace(shed, retry_after_seconds=shed.retry_after_seconds + ceil(seconds))


def _under_way_seconds(run: Generation, pace: Pace, width: int) -> float:
    """How long the prefill under way may still take. Only its engine knows the prompt's length: one that has come to `width`
    keys may be as long again, and no longer than the context."""
    rest = width if run.spec.context_tokens is None else min(width, max(run.spec.context_tokens - width, 0))
    middle = width + rest // 2             # all its chunks count like this one: a look in every tick must not walk a prompt
    size = _chunk_tokens(run, middle)
    return rest / size * pace.chunk_seconds(size, middle)


def _chunk_tokens(run: Generation, prefix: int) -> int:
    """As an accepted prompt gets it; where there is no line, the engine's usual size."""
    spec = run.spec.line
    if spec is None:
        return DEFAULT_MAXIMUM
    return line.chunk_tokens(run.steering.budget_in_force or spec.budget, prefix, **spec.keywords()) or spec.minimum


def _line(planned: LineSpec | None, reading: WorkerReading) -> LineSpec | None:
    """The line with the granule and maximum that the ranks really keep: the plan could only assume them."""
    if planned is None:
        return None
    return replace(planned, granule=max(_facts(reading, "granule_tokens"), default=planned.granule),
                   maximum=min(_facts(reading, "maximum_tokens"), default=planned.maximum))


def _reason(worker: Worker, reading: WorkerReading, snapshot: Snapshot, policy: Policy, nodes: tuple[NodeStatus, ...]) -> str:
    blame = f"{worker.diagnosis.cause}: {worker.diagnosis.summary}" if worker.diagnosis else ""
    match worker.phase:
        case Phase.UP:
            return ""
        case Phase.STARTING:
            return _starting(worker, reading, nodes)
        case Phase.BACKING_OFF:
            return (_others(nodes) or _waiting(snapshot, policy)) + (f", after {blame}" if blame else "")
        case Phase.STOPPING:
            return f"being ended: {blame or 'on request'}"
        case Phase.DRAINING:
            return "draining: admitting nothing more"
        case Phase.STOPPED:
            return (_others(nodes) + (f", after {blame}" if blame else "")) if worker.template.node else "stopped on request"
    return blame


def _others(nodes: tuple[NodeStatus, ...]) -> str:
    """Which other host is waited for."""
    waited = [f"node {node.node} ({node.address}): {node.reason}" for node in nodes if node.reason]
    return f"waiting for other hosts: {'; '.join(waited)}" if waited else ""


def _waiting(snapshot: Snapshot, policy: Policy) -> str:
    available, wanted = snapshot.memory.available_bytes, policy.floor_bytes + policy.margin_bytes
    if available is not None and available < wanted:
        return f"waiting for memory: {available >> 20} MiB available, floor and margin are {wanted >> 20} MiB"
    return "waiting to start"


def _starting(worker: Worker, reading: WorkerReading, nodes: tuple[NodeStatus, ...]) -> str:
    run = worker.run
    if run is None:
        return "starting"
    parts = [f"starting ({run.step.value})"]
    if run.result is not None and run.result.why and run.healthy_since is not None:
        parts.append(run.result.why)
    if run.healthy_since is not None:
        parts += [f"hook {hook}: {found}" for hook, found in missing_hooks(engines.hook_roles(worker.template), reading.ranks)]
        if waited := _others(nodes):
            parts.append(waited)
    return "; ".join(parts)
