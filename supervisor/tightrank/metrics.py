"""Prometheus text (0.0.4) from one Status. What is not known has no series: a missing value is never 0.

Series of ranks that are gone end with them. Counters of ranks (`prefill_*`) start again at 0 with each generation.
"""
from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tightrank import __version__
from tightrank.records import LevelStatus, NodeStatus, Phase, RankReading, Status, WorkerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """One row of the table: the name is without `tightrank_`."""
    name: str
    kind: str
    help: str


METRICS: tuple[Metric, ...] = (
    Metric("build_info", "gauge", "Always 1; the labels name the release."),
    Metric("up", "gauge", "1 when the whole deployment is ready."),
    Metric("draining", "gauge", "1 while the deployment drains."),
    Metric("uptime_seconds", "gauge", "Age of the supervisor's daemon."),
    Metric("tick_age_seconds", "gauge", "Time since the supervisor's loop last ended a pass."),
    Metric("process_resident_bytes", "gauge", "Resident memory of the supervisor's daemon."),
    Metric("journal_lost_events_total", "counter", "Events that could not be written to disk."),
    Metric("host_memory_total_bytes", "gauge", "Memory of the host."),
    Metric("host_available_bytes", "gauge", "MemAvailable of the host."),
    Metric("cgroup_limit_bytes", "gauge", "The smallest memory limit of the supervisor's cgroups."),
    Metric("available_bytes", "gauge", "The smaller of MemAvailable and the room left in the cgroup."),
    Metric("memory_pressure_percent", "gauge", "Share of the last 10 s in which tasks waited for memory (PSI)."),
    Metric("guard_floor_bytes", "gauge", "Available memory under which the guard ends all ranks."),
    Metric("guard_lowest_available_bytes", "gauge", "Lowest available memory that the guard has seen."),
    Metric("guard_sample_age_seconds", "gauge", "Time since the guard's last sample."),
    Metric("guard_samples_total", "counter", "Samples that the guard has taken."),
    Metric("guard_stops_total", "counter", "Times that the guard ended the ranks at the floor."),
    Metric("guard_level", "gauge", "1 while a level before the floor (action) is in force; reason: the place that is short."),
    Metric("guard_level_acts_total", "counter", "Times that a level has acted, or would have in a dry run."),
    Metric("guard_level_mark_bytes", "gauge", "Available memory under which a level fires."),
    Metric("guard_floor_in_seconds", "gauge", "Time until the floor is reached if memory falls on as it does now."),
    Metric("guard_daemon_starts_total", "counter", "Starts of the daemon by the guard."),
    Metric("worker_phase", "gauge", "1 for the phase that the worker is in, 0 for the others."),
    Metric("worker_ready", "gauge", "1 when the worker has served a real request in this generation and may be used."),
    Metric("worker_generation", "gauge", "The worker's present generation."),
    Metric("worker_restarts_total", "counter", "Starts after the first."),
    Metric("worker_failure", "gauge", "1 for the cause of the worker's last failure while it is not ready."),
    Metric("worker_context_tokens", "gauge", "Longest request (prompt and answer) that the engine takes."),
    Metric("worker_resident_bytes", "gauge", "Resident memory of the worker's process tree."),
    Metric("line_budget_tokens_squared", "gauge", "The line's budget now."),
    Metric("line_over_steps_total", "counter", "Prefill steps over the line."),
    Metric("line_binds", "gauge", "1: an auto line makes chunks smaller somewhere. Absent while that is not known."),
    Metric("line_room_bytes", "gauge", "What a rank's memory allows for the transients of a prefill step (auto)."),
    Metric("line_pair_bytes", "gauge", "Bytes that a prefill step holds for each (row, key) (auto)."),
    Metric("line_row_bytes", "gauge", "Bytes that a prefill step holds for each row (auto)."),
    Metric("line_proven_tokens_squared", "gauge", "The largest prefill step so far (auto)."),
    Metric("node_heard_seconds", "gauge", "Time since another host of the worker was heard of. Absent until it is."),
    Metric("node_available_bytes", "gauge", "Available memory of another host of the worker, while it is heard of."),
    Metric("node_floor_bytes", "gauge", "The floor of that host's guard."),
    Metric("node_line_budget_tokens_squared", "gauge", "The line's budget that that host allows."),
    Metric("rank_available_bytes", "gauge", "Memory available to the rank."),
    Metric("rank_beat_age_seconds", "gauge", "Time since the rank's own loop last turned."),
    Metric("rank_in_flight", "gauge", "Requests in the rank's scheduler."),
    Metric("prefill_steps_total", "counter", "Prefill steps of the rank in this generation."),
    Metric("prefill_tokens_total", "counter", "New tokens prefilled by the rank in this generation."),
)

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float | int | bool | None]


def render(status: Status | None, lost_events: int = 0) -> str:
    """The whole exposition. Before the first tick (`status` None) only what the process knows of itself."""
    values: dict[str, list[str]] = {}
    for name, labels, value in _samples(status, lost_events):
        if value is not None:
            values.setdefault(name, []).append(f"tightrank_{name}{_labels(labels)} {_number(value)}\n")
    return "".join(f"# HELP tightrank_{metric.name} {metric.help}\n# TYPE tightrank_{metric.name} {metric.kind}\n"
                   + "".join(values[metric.name]) for metric in METRICS if metric.name in values)


def _labels(labels: Labels) -> str:
    pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    value = value.encode(errors="replace").decode()      # an engine's text may hold lone surrogates
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(value)


def _samples(status: Status | None, lost_events: int) -> Iterator[Sample]:
    yield "build_info", {"version": __version__, "python": platform.python_version()}, 1
    yield "process_resident_bytes", {}, _resident_bytes()
    yield "journal_lost_events_total", {}, lost_events
    if status is None:
        return
    now = time.monotonic()
    yield "up", {}, status.ready
    yield "draining", {}, status.draining
    yield "uptime_seconds", {}, max(time.time() - status.started_unix, 0.0)
    yield "tick_age_seconds", {}, max(now - status.updated_monotonic, 0.0)
    yield from _memory(status)
    yield from _guard(status, now)
    for level in status.levels:
        yield from _level(level)
    for worker in status.workers:
        yield from _worker(worker)
    for node in status.nodes:
        yield from _node(node)


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _memory(status: Status) -> Iterator[Sample]:
    memory = status.memory
    yield "host_memory_total_bytes", {}, memory.mem_total_bytes
    yield "host_available_bytes", {}, memory.mem_available_bytes
    yield "cgroup_limit_bytes", {}, memory.cgroup_limit_bytes
    yield "available_bytes", {}, memory.available_bytes
    yield "memory_pressure_percent", {"reason": "some"}, memory.pressure_some_avg10
    yield "memory_pressure_percent", {"reason": "full"}, memory.pressure_full_avg10


def _guard(status: Status, now: float) -> Iterator[Sample]:
    page = status.guard
    yield "guard_floor_bytes", {}, page.get("floor_bytes") or status.floor_bytes
    yield "guard_lowest_available_bytes", {}, page.get("lowest_available_bytes")
    sampled: Any = page.get("monotonic_ns")
    yield "guard_sample_age_seconds", {}, max(now - sampled / 1e9, 0.0) if sampled else None
    yield "guard_samples_total", {}, page.get("samples")
    yield "guard_stops_total", {}, page.get("stops")
    yield "guard_daemon_starts_total", {}, page.get("daemon_starts")


def _level(level: LevelStatus) -> Iterator[Sample]:
    labels = {"action": level.level, "mode": level.mode, "reason": level.place}
    if level.level != "stop":                # the guard's own, which has its metrics
        yield "guard_level", labels, level.in_force
        yield "guard_level_acts_total", labels, level.acts
        yield "guard_level_mark_bytes", labels, level.mark_bytes
    else:
        yield "guard_floor_in_seconds", {}, level.floor_in_seconds


def _worker(worker: WorkerStatus) -> Iterator[Sample]:
    name = {"worker": worker.name, "role": worker.role}
    for phase in Phase:
        yield "worker_phase", {**name, "phase": phase.value}, worker.phase is phase
    yield "worker_ready", name, worker.ready
    yield "worker_generation", name, worker.generation
    yield "worker_restarts_total", name, worker.restarts
    if worker.diagnosis is not None and not worker.ready:
        yield "worker_failure", {**name, "reason": worker.diagnosis.cause}, 1
    yield "worker_context_tokens", name, worker.context_tokens
    if worker.processes:
        yield "worker_resident_bytes", name, sum(process.rss_bytes for process in worker.processes)
    yield "line_budget_tokens_squared", name, worker.line_budget
    yield "line_over_steps_total", name, worker.over_line_steps
    yield from _auto(worker, name)
    for rank in worker.ranks:
        if rank.alive:
            yield from _rank(worker, rank)


def _node(node: NodeStatus) -> Iterator[Sample]:
    labels = {"node": str(node.node)}
    yield "node_heard_seconds", labels, node.heard_seconds_ago
    if node.available_bytes is not None:
        yield "node_available_bytes", labels, node.available_bytes
        yield "node_floor_bytes", labels, node.floor_bytes
        yield "node_line_budget_tokens_squared", labels, node.budget


def _auto(worker: WorkerStatus, name: Mapping[str, str]) -> Iterator[Sample]:
    if worker.line_auto is None:
        return
    yield "line_binds", name, worker.line_auto["binds"]
    for rank in worker.line_auto["ranks"]:
        labels = {**name, "rank": str(rank["rank"])}
        yield "line_room_bytes", labels, rank["room_bytes"]
        yield "line_pair_bytes", labels, rank["pair_bytes"]
        yield "line_row_bytes", labels, rank["row_bytes"]
        yield "line_proven_tokens_squared", labels, rank["proven_pairs"]


def _rank(worker: WorkerStatus, rank: RankReading) -> Iterator[Sample]:
    labels = {"worker": worker.name, "rank": "" if rank.rank is None else str(rank.rank), "role": rank.role}
    yield "rank_available_bytes", labels, rank.available_bytes
    if rank.beat_age_seconds is None or rank.loops < 2:      # 1 is the hello's own: no loop of this process has turned
        return
    yield "rank_beat_age_seconds", labels, rank.beat_age_seconds
    yield "rank_in_flight", labels, rank.in_flight
    yield "prefill_steps_total", labels, rank.steps
    yield "prefill_tokens_total", labels, rank.prefill_tokens
