"""A worker's life: its phases, what is asked of it, what ended it, what is decided."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tightrank.records.reading import Line
from tightrank.records.spec import LineSpec

if TYPE_CHECKING:
    from tightrank.records.nodes import NodesView


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


class Request(StrEnum):
    """What a person (or the supervisor's own end) asks of a worker."""
    DRAIN = "drain"        # admit nothing more, finish what is in flight, stay there
    RESUME = "resume"      # admit again; a stopped or failed worker starts
    RESTART = "restart"    # end this generation, start the next
    STOP = "stop"          # drain, then end


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
class Failure:
    """One generation that failed, for the bundle."""
    worker: str
    generation: int
    unix: float
    diagnosis: Diagnosis
    engine_version: str | None
    lines: tuple[Line, ...]
    run_directory: str             # "": none was made
    stacks: str                    # what became of the stacks, in a sentence; "": they were not asked for


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the engine's own port said. `canary_ok`: a real request of ours was served in this generation."""
    monotonic: float
    health_ok: bool
    canary_ok: bool
    why: str = ""                          # the last refusal, "" when all is well


@dataclass(frozen=True, slots=True)
class Stall:
    """A process of a worker that does not move, and what was seen meanwhile. Seconds are those that we were there to see."""
    who: str                       # "scheduler 0 (pid 12)"
    stopped: bool                  # by a signal: state T
    in_flight: int                 # requests that it has
    still_seconds: float           # its loop has not turned (or it is stopped)
    quiet_seconds: float           # ... and nothing of the worker that computes has used its processor
    unhelped_seconds: float        # ... and no process that a rank started (a compiler) has
    longest_seconds: float | None  # of the steps before; None: there was none
    expected_seconds: float | None     # the same, scaled up to the step under way where that is a larger one


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
    stall: Stall | None = None             # the worst of its processes that do not move
    line: LineSpec | None = None
    budget: int | None = None              # token², as we last told the engine
    shed: Shed | None = None
    line_why: str = ""                     # auto: why `line.budget` is what it is
    context_tokens: int | None = None
    evidence: tuple[Any, ...] = ()         # auto: of each rank's steps, see auto/peaks.py
    prefill_width: int = 0                 # keys of its last prefill step: how long the prompt is by now
    nodes: NodesView | None = None         # what the other hosts mean for it; None: it runs on this one alone


@dataclass(frozen=True, slots=True)
class Shed:
    """Memory is short: a prompt with more than `new_tokens` that are not cached is refused for now. It may be tried again when
    the prefill under way has ended, as far as its time is known, and the level's pause is over."""
    new_tokens: int
    retry_after_seconds: int
    why: str


class ActionKind(StrEnum):
    """What can be decided."""
    TIGHTEN = "tighten"                    # `budget` from now on, lower or higher than before
    SHED = "shed"                          # refuse what `shed` says; None: nothing any more
    ABORT = "abort"                        # end its largest prefill in flight
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
    budget: int | None = None
    shed: Shed | None = None
