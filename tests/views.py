"""What the pure parts are given in tests: views of workers, readings, a snapshot."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from levels_traces import RULES
from tightrank.config import Guard
from tightrank.records import MemoryReading, Phase, ProcessId, RankReading, Snapshot, WorkerReading, WorkerView

GIB = 2**30


def view(name: str = "w0", phase: Phase = Phase.UP, **changes: Any) -> WorkerView:
    base = WorkerView(
        name=name, engine="vllm", role="both", phase=phase, generation=4, since_monotonic=0, started_monotonic=0,
        progress_monotonic=0, start_stall_seconds=30, hooks=(), hook_roles=(), exit_status=None, proof=None, post_mortem=None,
        fault_since_monotonic=None, probe=None, healthy_since_monotonic=None, guard_stops_at_start=0, ended=False,
        end_trouble=None, diagnosis=None, failures_in_row=0, next_start_monotonic=None, requests=(), restart_wanted=False)
    return replace(base, **changes)


def rank(number: int = 0, in_flight: int = 1, device: str | None = None, **facts: Any) -> RankReading:
    return RankReading(ProcessId(9 + number, 9), "worker", number, number, 0, None, device, "0", True, {}, facts, None, "", 0.1,
                       9, 1, 1, in_flight)


def reading(name: str, ranks: Sequence[RankReading]) -> WorkerReading:
    return WorkerReading(name, 4, None, (), tuple(ranks), (), ())


def snapshot(workers: Mapping[str, WorkerReading], available: int = 20 * GIB) -> Snapshot:
    return Snapshot(100.0, 0.0, MemoryReading(100.0, 64 * GIB, available, None, None, available, None, None), workers, {})


def guard(keep: int = 2 * GIB) -> Guard:
    """Floor and margin are `keep` together."""
    return Guard(keep * 3 // 4, keep // 4, 0, *RULES.levels, "act")
