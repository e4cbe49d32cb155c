"""The nouns: frozen records that the stages hand to each other. Import nothing of ours.

Units are in the names. A value that could not be read is None and says why where a person will look; it is never 0.
Times named `_monotonic` are seconds of CLOCK_MONOTONIC; `_unix` are seconds since the epoch, for people only.
"""
from tightrank.records.life import (
    ActionKind,
    Decision,
    Diagnosis,
    Failure,
    Phase,
    ProbeResult,
    Request,
    Shed,
    Stall,
    StartStep,
    WorkerView,
)
from tightrank.records.nodes import NodeOwn, NodeStatus, NodesView
from tightrank.records.reading import (
    Line,
    MemoryReading,
    ProcessId,
    ProcessReading,
    RankReading,
    Snapshot,
    WorkerReading,
)
from tightrank.records.spec import ChunkBand, LineSpec, WorkerSpec
from tightrank.records.status import Comparison, Event, LevelStatus, Pulse, RankPulse, Status, WorkerStatus

__all__ = [
    "ActionKind", "ChunkBand", "Comparison", "Decision", "Diagnosis", "Event", "Failure", "LevelStatus", "Line", "LineSpec",
    "MemoryReading", "NodeOwn", "NodeStatus", "NodesView", "Phase", "ProbeResult", "ProcessId", "ProcessReading", "Pulse",
    "RankPulse", "RankReading", "Request", "Shed", "Snapshot", "Stall", "StartStep", "Status", "WorkerReading", "WorkerSpec",
    "WorkerStatus", "WorkerView",
]
