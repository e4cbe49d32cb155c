"""What the world sees."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightrank.records.life import Diagnosis, Phase, Shed, StartStep
from tightrank.records.nodes import NodeStatus
from tightrank.records.reading import MemoryReading, ProcessReading, RankReading
from tightrank.records.spec import LineSpec


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the journal."""
    unix: float
    kind: str                  # phase | decision | cause | hello | daemon | line | request | hygiene | level |
                               # dry-run | bundle | calibration
    worker: str | None
    generation: int | None
    sentence: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was expected of a term and what was measured (calibration.py). `difference`: measured over predicted, less 1."""
    term: str                  # its unit is in its name
    predicted: float
    measured: float
    source: str                # plan | before: the last start under this configuration
    difference: float | None   # None: nothing was expected
    agrees: bool


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
    line_auto: Mapping[str, Any] | None = None   # why the budget is what it is, rank by rank (auto.Aim); None: it is fixed
    served_model: str = ""
    address: str = ""                      # how other machines reach it; "": not known
    transfer_port: int | None = None       # where its peers ask for KV; None: nowhere
    longest_step_seconds: float | None = None   # of the prefill steps of this generation; None: there was none
    drains: bool = False                   # being ended on request: the requests that it has may still end well
    headroom: Mapping[str, Any] | None = None    # what bounds the KV cache, and on which rank; None: nobody has told
    shed: Shed | None = None               # what is refused while memory is short
    aborts: int = 0                        # how often, in this generation, its largest prefill was to be ended; the gateway
    abort_why: str = ""                    # does it when it sees the number grow, so that no event is obeyed twice
    bundle: str | None = None              # file name of the last bundle that was made for it
    pace: Mapping[str, Any] | None = None  # what prefill takes, as in plan/pace.py, of an earlier start until this one has
                                           # enough steps; None: there are too few
    comparisons: tuple[Comparison, ...] = ()     # of this generation's measured terms


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
class LevelStatus:
    """One guard level at one place. `in_force` in a dry run: it would be."""
    level: str                             # tighten | shed | abort | stop
    place: str                             # host, or the worker whose ranks have memory of their own
    mode: str                              # act | dry-run | off
    mark_bytes: int                        # it fires with less available memory
    in_force: bool
    acts: int                              # how often it has acted (or would have) since the daemon started
    floor_in_seconds: float | None         # when the floor is reached there if memory falls on as it does now
    sentence: str                          # what memory looks like there now


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
    levels: tuple[LevelStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()         # the worker's other hosts
