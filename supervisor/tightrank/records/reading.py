"""What one pass over the readers has seen. A value that could not be read is None, and says why."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: a pid is used again, a pid with its start time (clock ticks after boot) is not."""
    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an engine's output."""
    monotonic: float
    unix: float
    stream: str                    # stdout | stderr
    text: str


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of this host as one pass saw it, bytes. `available_bytes` = min(MemAvailable, cgroup room)."""
    monotonic: float
    mem_total_bytes: int | None
    mem_available_bytes: int | None
    cgroup_limit_bytes: int | None         # None: no limit, or not readable (see `why`)
    cgroup_room_bytes: int | None          # limit - (current - inactive_file)
    available_bytes: int | None
    pressure_some_avg10: float | None      # PSI, percent
    pressure_full_avg10: float | None
    why: str = ""
    oom_kills: int | None = None           # by the kernel in our cgroup (of the host, where there is none), since ever


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process of a worker's tree."""
    id: ProcessId
    parent_pid: int
    name: str                              # title or command name
    state: str                             # R S D Z T ...
    rss_bytes: int
    cpu_seconds: float
    role: str | None                       # from its hello; None: said none


@dataclass(frozen=True, slots=True)
class RankReading:
    """One engine process that said hello: its identity, hooks, heartbeat and the memory available to it."""
    id: ProcessId
    role: str
    rank: int | None
    tp_rank: int | None
    pp_rank: int | None
    dp_rank: int | None
    device: str | None
    engine_version: str
    alive: bool
    hooks: Mapping[str, Mapping[str, str]]
    facts: Mapping[str, Any]
    available_bytes: int | None
    available_why: str
    beat_age_seconds: float | None
    loops: int
    steps: int
    prefill_tokens: int
    in_flight: int
    step_cost: int = 0                     # of the prefill step that it started last (wire.step_cost)
    state: str = ""                        # of its main thread, as in ProcessReading; "": not read
    cpu_seconds: float | None = None       # used so far, by all its threads


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One pass over one worker: what its tree, ranks and engine look like."""
    name: str
    generation: int
    main: ProcessId | None
    processes: tuple[ProcessReading, ...]
    ranks: tuple[RankReading, ...]
    dead_ranks: tuple[RankReading, ...]    # said hello in this generation and are gone
    problems: tuple[str, ...]              # unreadable hellos, records of another schema, ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One pass over all readers, immutable."""
    monotonic: float
    unix: float
    memory: MemoryReading
    workers: Mapping[str, WorkerReading]
    guard: Mapping[str, Any]               # the guard's page: see guard/__main__.py; empty when unreadable
