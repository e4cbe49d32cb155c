"""The nouns: frozen records that the stages hand to each other. Imports nothing of ours.

Units are in the names. A value that could not be read is None and says why where a person will look; it is never 0.
Times named `_monotonic` are seconds of CLOCK_MONOTONIC; `_unix` are seconds since the epoch, for people only.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where a worker is. Only `worker.Worker` writes it."""
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    STOPPING = "stopping"          # the tree is being ended; hygiene follows
    BACKING_OFF = "backing-off"    # waiting for the next generation
    FAILED = "failed"              # a cause that no restart fixes, or too many restarts
    STOPPED = "stopped"            # on request


class StartStep(StrEnum):
    """What a starting worker is doing, in order."""
    LOADING = "loading"
    SIZING = "sizing"
    CAPTURING = "capturing"
    WARMING = "warming"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: a pid is used again, a pid with its start time (clock ticks after boot) is not."""
    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class LineSpec:
    """The line of one worker: `budget` and `floor_budget` in token², the rest in tokens (see adapter line.py)."""
    budget: int
    floor_budget: int              # minimum x context: `tighten` never goes below it
    minimum: int
    maximum: int
    granule: int
    rule: str = "span"
    step: str = "granule"

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `line.chunk_tokens`."""
        return {"minimum": self.minimum, "maximum": self.maximum, "granule": self.granule,
                "rule": self.rule, "step": self.step}


@dataclass(frozen=True, slots=True)
class ChunkBand:
    """One row of the chunk schedule: prefixes in [from_tokens, to_tokens] take chunks of `chunk_tokens` (0: none fits)."""
    from_tokens: int
    to_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How one worker is started; pure output of the plan. `argv` and `env` are those of the engine, ours included.

    `env` holds only what we set or change; launch lays it over the supervisor's environment less TIGHTRANK_*. Values may
    hold secrets: they go to the engine and nowhere else. `generation` and `run_directory` are filled in for each start
    (`for_generation` in plan.py).
    """
    name: str
    engine: str                    # vllm | sglang
    role: str                      # both | prefill | decode
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str                      # where the engine listens
    port: int
    model: str                     # path of the model
    served_model: str              # the name a request must give
    tensor_parallel: int
    pipeline_parallel: int
    devices: tuple[str, ...]
    hooks: tuple[str, ...]         # wanted
    line: LineSpec | None
    context_tokens: int | None     # the engine's maximum length as we cap it; None: the engine's own choice
    schedule: tuple[ChunkBand, ...]
    drain_seconds: float
    start_stall_seconds: float     # a start without any progress for this long has stalled
    address: str = ""              # how other machines reach it; "": not known
    transfer_host: str = ""        # where it listens for its peers
    transfer_port: int | None = None    # None: nowhere
    api_key: str | None = None     # the engine's own, for our canary
    notes: tuple[str, ...] = ()    # sentences for `tightrank plan`: what we set and why
    generation: int = 0
    run_directory: str = ""

    def listens(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of all its listening sockets that we name."""
        transfer = () if self.transfer_port is None else ((self.transfer_host, self.transfer_port),)
        return ((self.host, self.port), *transfer)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an engine's output."""
    monotonic: float
    unix: float
    stream: str                    # stdout | stderr
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a worker failed. `cause` is an ID of errors.py; `change` names the flag and, where computed, its value."""
    cause: str
    summary: str                   # one sentence with the numbers in it
    evidence: tuple[str, ...]      # the deciding lines, the engine's own words
    change: str                    # what to do next
    restart_helps: bool
    numbers: Mapping[str, float] = field(default_factory=dict)
    confidence: str = "certain"    # certain | likely | guess


@dataclass(frozen=True, slots=True)
class Reading:
    """A value or the reason why there is none, and when it was taken."""
    value: float | None
    monotonic: float
    why: str = ""


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


class Request(StrEnum):
    """What a person (or the supervisor's own end) asks of a worker."""
    DRAIN = "drain"        # admit nothing more, finish what is in flight, stay there
    RESUME = "resume"      # admit again; a stopped or failed worker starts
    RESTART = "restart"    # end this generation, start the next
    STOP = "stop"          # drain, then end


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the engine's own port said. `canary_ok`: a real request of ours was served in this generation."""
    monotonic: float
    health_ok: bool
    canary_ok: bool
    why: str = ""                          # the last refusal, "" when all is well


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What `decide` may know of a worker beside its reading. Made by the worker, once a tick."""
    name: str
    engine: str
    role: str
    phase: Phase
    generation: int
    since_monotonic: float                 # of the phase
    started_monotonic: float               # of the generation
    progress_monotonic: float              # last sign of progress while starting
    start_stall_seconds: float
    hooks: tuple[str, ...]
    hook_roles: tuple[tuple[str, str, int], ...]   # (hook, role, processes) that must be in force
    exit_status: int | None                # of the main process, as Popen.returncode; None: it runs
    proof: Diagnosis | None                # a line that proves a failure although the engine still runs
    post_mortem: Diagnosis | None          # what all lines and the exit say
    fault_since_monotonic: float | None    # the first fault of the adapter in this generation
    probe: ProbeResult | None
    healthy_since_monotonic: float | None
    guard_stops_at_start: int
    ended: bool                            # STOPPING: no process, no port is left
    end_trouble: Diagnosis | None          # STOPPING: what is left after the limit
    diagnosis: Diagnosis | None            # why this generation is ended; None: on request
    failures_in_row: int
    next_start_monotonic: float | None
    requests: tuple[Request, ...]
    restart_wanted: bool                   # STOPPING on a request to restart


class ActionKind(StrEnum):
    """What can be decided. TIGHTEN, SHED and ABORT have their place here and are decided by a later issue."""
    TIGHTEN = "tighten"
    SHED = "shed"
    ABORT = "abort"
    STOP = "stop"                          # end the generation; with a diagnosis at once, without one by draining
    START = "start"                        # the next generation
    BACK_OFF = "back-off"                  # wait `delay_seconds`, then start
    FAIL = "fail"                          # stay down, serve the cause
    REST = "rest"                          # stay down, on request
    ADMIT = "admit"                        # the worker is up
    DRAIN = "drain"                        # admit nothing more


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with one worker and why, in a sentence. `generation` fences it: it is void for any other."""
    kind: ActionKind
    worker: str
    generation: int
    sentence: str
    diagnosis: Diagnosis | None = None
    delay_seconds: float = 0.0
    reason: str = ""                       # metric label


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the journal."""
    unix: float
    kind: str                              # phase | decision | cause | hello | guard | daemon | line | request
    worker: str | None
    generation: int | None
    sentence: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the world sees it."""
    name: str
    engine: str
    engine_version: str | None
    role: str
    phase: Phase
    step: StartStep | None
    generation: int
    since_unix: float
    ready: bool
    reason: str                            # why it is not ready, "" when it is
    host: str
    port: int
    restarts: int
    next_start_unix: float | None
    diagnosis: Diagnosis | None
    line: LineSpec | None
    line_budget: int | None                # token², as told to the ranks now
    over_line_steps: int
    context_tokens: int | None
    ranks: tuple[RankReading, ...]
    processes: tuple[ProcessReading, ...]
    hooks_wanted: tuple[str, ...]
    log_tail: tuple[str, ...]
    served_model: str = ""
    address: str = ""                      # how other machines reach it; "": not known
    transfer_port: int | None = None       # where its peers ask for KV; None: nowhere
    longest_step_seconds: float | None = None   # of the prefill steps of this generation; None: there was none


@dataclass(frozen=True, slots=True)
class RankPulse:
    """What a rank's beat page says at this moment; None throughout: nothing that can be read."""
    role: str
    rank: int | None
    beat_age_seconds: float | None
    loops: int | None
    steps: int | None
    prefill_tokens: int | None
    in_flight: int | None


@dataclass(frozen=True, slots=True)
class Pulse:
    """Whether a worker moves, read at this moment."""
    worker: str
    generation: int
    phase: Phase
    stopped: tuple[int, ...]               # pids of its tree in state T or t
    cpu_seconds: float                     # used so far by the processes that are there
    longest_step_seconds: float | None     # of the prefill steps of this generation; None: there was none
    ranks: tuple[RankPulse, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Published once a tick, swapped whole; whoever reads it changes nothing."""
    name: str
    version: str
    started_unix: float
    updated_unix: float
    updated_monotonic: float
    ready: bool
    reason: str
    draining: bool
    memory: MemoryReading
    guard: Mapping[str, Any]
    floor_bytes: int
    tightest_rank: Mapping[str, Any] | None    # {"worker", "rank", "available_bytes"}
    workers: tuple[WorkerStatus, ...]
