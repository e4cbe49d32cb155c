"""One pass over the readers -> one immutable Snapshot. Unknown is never 0 and every value knows when it was read."""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tightrank.readers.guard import GuardReader
from tightrank.readers.memory import MemoryReader
from tightrank.readers.nvidia import NvidiaReader
from tightrank.readers.process import Process, ProcessTable, read_process, reading
from tightrank.readers.ranks import RankReader
from tightrank.records import MemoryReading, ProcessId, RankReading, Snapshot, WorkerReading


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker as `watch` needs it. `main` and `ranks` are None while no generation runs."""
    name: str
    generation: int
    main: ProcessId | None = None
    ranks: RankReader | None = None
    known: frozenset[ProcessId] = frozenset()


class Watch:
    """Reads everything once. The walk over /proc costs about 3 ms, so its result serves for `table_seconds`; whether a
    rank lives is asked each time."""

    def __init__(self, memory: MemoryReader, guard: GuardReader, devices: NvidiaReader) -> None:
        self._memory, self._guard, self._devices = memory, guard, devices
        self.table = ProcessTable(())
        self._table_monotonic = float("-inf")

    def read(self, watched: Sequence[Watched], table_seconds: float) -> Snapshot:
        now = time.monotonic()
        if now - self._table_monotonic >= table_seconds:
            self.table, self._table_monotonic = ProcessTable.read(), now
        memory = self._memory.read(now)
        workers = {item.name: self._worker(item, memory) for item in watched}
        return Snapshot(now, time.time(), memory, workers, self._guard.read())

    def _worker(self, item: Watched, memory: MemoryReading) -> WorkerReading:
        if item.main is None or item.ranks is None:
            return WorkerReading(item.name, item.generation, None, (), (), (), ())
        seen: dict[ProcessId, Process] = {}
        found, problems = item.ranks.read(partial(_alive, seen=seen), lambda device: self._available(device, memory))
        ranks = [replace(rank, state=seen[rank.id].state, cpu_seconds=seen[rank.id].cpu_seconds) if rank.id in seen else rank
                 for rank in found]
        roles = {rank.id: rank.role for rank in ranks}
        tree = tuple(reading(process, roles.get(process.id)) for process in self.table.tree(item.main, item.known))
        return WorkerReading(item.name, item.generation, item.main, tree,
                             tuple(rank for rank in ranks if rank.alive),
                             tuple(rank for rank in ranks if not rank.alive), tuple(problems))

    def _available(self, device: str | None, memory: MemoryReading) -> tuple[int | None, str]:
        """min(host, cgroup, the device's own free memory); unknown when a part that counts is unknown."""
        if memory.available_bytes is None or device is None:
            return memory.available_bytes, memory.why
        free, why = self._devices.free_bytes(device)
        if why:
            return None, why
        return memory.available_bytes if free is None else min(memory.available_bytes, free), ""


def _alive(process: ProcessId, seen: dict[ProcessId, Process] | None = None) -> bool:
    """`seen` keeps what was read of it."""
    try:
        found = read_process(process.pid)
    except OSError:
        return True                # it cannot be told now; the next pass may
    if found is None or found.id != process or found.state in "ZX":
        return False
    if seen is not None:
        seen[process] = found
    return True


def tightest(workers: Mapping[str, WorkerReading]) -> Mapping[str, Any] | None:
    """The rank with the least available memory: {"worker", "rank", "role", "pid", "available_bytes"}, or None."""
    found: list[tuple[int, str, RankReading]] = [
        (rank.available_bytes, name, rank)
        for name, worker in workers.items() for rank in worker.ranks if rank.available_bytes is not None]
    if not found:
        return None
    available, name, rank = min(found, key=lambda item: item[0])
    return {"worker": name, "rank": rank.rank, "role": rank.role, "pid": rank.id.pid, "available_bytes": available}
