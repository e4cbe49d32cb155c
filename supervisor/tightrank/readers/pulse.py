"""One look at a worker that needs no tick: from any thread, and while the daemon's loop hangs.

It opens the beat pages anew: those of `RankReader` are the loop's, which may close them at any time. Which processes
there are is taken from the last Status. About 30 us for each rank and 15 us for each process.
"""
from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tightrank.adapter import pages, wire
from tightrank.readers.process import Process, read_process
from tightrank.records import ProcessId, Pulse, RankPulse, RankReading, WorkerStatus

if TYPE_CHECKING:
    from tightrank_adapter import wire as wire_types


def pulse(worker: WorkerStatus, run_directory: Path) -> Pulse:
    """`run_directory` is that of the worker's generation. A page that is gone, torn or another process's is unknown."""
    ids = {*(process.id for process in worker.processes), *(rank.id for rank in worker.ranks)}
    there = [process for process in map(_process, sorted(ids, key=lambda item: item.pid)) if process is not None]
    stopped = tuple(process.id.pid for process in there if process.state in ("T", "t"))     # by a signal or a tracer
    return Pulse(worker.name, worker.generation, worker.phase, stopped,
                 sum(process.cpu_seconds for process in there), worker.longest_step_seconds,
                 tuple(_rank(rank, run_directory) for rank in worker.ranks))


def _process(process: ProcessId) -> Process | None:
    try:
        found = read_process(process.pid)
    except OSError:
        return None
    return found if found is not None and found.id == process else None


def _rank(rank: RankReading, directory: Path) -> RankPulse:
    beat = _beat(rank.id, directory)
    if beat is None:
        return RankPulse(rank.role, rank.rank, None, None, None, None, None)
    age = (time.monotonic_ns() - beat.monotonic_ns) / 1e9
    return RankPulse(rank.role, rank.rank, age, beat.loops, beat.steps, beat.prefill_tokens, beat.in_flight)


def _beat(process: ProcessId, directory: Path) -> wire_types.Beat | None:
    try:
        with closing(pages.BeatReader(str(directory), process.pid)) as page:
            beat: wire_types.Beat = page.read()
    except (OSError, ValueError, wire.WireError):
        return None
    return beat if (beat.pid, beat.start_time) == (process.pid, process.start_time) else None
