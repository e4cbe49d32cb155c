"""Processes: one pass over /proc, and which of them belong to an engine. The root is a parameter for tests."""
from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from tightrank.records import ProcessId, ProcessReading

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/<pid>/stat."""
    id: ProcessId
    parent_pid: int
    session: int
    name: str
    state: str
    rss_bytes: int
    cpu_seconds: float


def parse_stat(pid: int, text: str) -> Process:
    """/proc/<pid>/stat; the name stands in the outermost parentheses and may hold any character. Raises ValueError."""
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 22 or "(" not in head:
        raise ValueError(f"/proc/{pid}/stat: {text[:80]!r}")
    return Process(ProcessId(pid, int(fields[19])), int(fields[1]), int(fields[3]), head.partition("(")[2], fields[0],
                   int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS)


class ProcessTable:
    """One pass over /proc."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self.by_pid = {process.id.pid: process for process in processes}
        self._children: dict[int, list[Process]] = {}
        for process in self.by_pid.values():
            self._children.setdefault(process.parent_pid, []).append(process)

    @classmethod
    def read(cls, proc: str = "/proc") -> ProcessTable:
        found = []
        for entry in os.listdir(proc):
            if entry.isdigit():
                process = read_process(int(entry), proc)
                if process is not None:
                    found.append(process)
        return cls(found)

    def alive(self, process_id: ProcessId) -> bool:
        """Still there and no zombie."""
        found = self.by_pid.get(process_id.pid)
        return found is not None and found.id == process_id and found.state not in "ZX"

    def tree(self, main: ProcessId, known: Iterable[ProcessId] = ()) -> list[Process]:
        """The engine's processes: descendants of `main`, its session (launch gives it one of its own; orphans keep it),
        and those of `known` that are still there."""
        wanted = {item.pid for item in known if item.pid in self.by_pid and self.by_pid[item.pid].id == item}
        top = self.by_pid.get(main.pid)
        if top is None or top.id == main:          # else its pid, and so its session's number, is another's by now
            wanted |= {p.id.pid for p in self.by_pid.values()
                       if p.session == main.pid and p.id.start_time >= main.start_time}
        waiting = [main.pid] if top is not None and top.id == main else []
        waiting += sorted(wanted)
        seen: set[int] = set()
        while waiting:
            pid = waiting.pop()
            if pid not in seen:
                seen.add(pid)
                waiting += [child.id.pid for child in self._children.get(pid, ())]
        return [self.by_pid[pid] for pid in sorted(seen) if pid in self.by_pid]


def read_process(pid: int, proc: str = "/proc") -> Process | None:
    """None when there is no such process (any more), or none that we may see. Raises OSError when it cannot be told: out
    of descriptors or memory we must take no process for dead."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            return parse_stat(pid, file.read().decode(errors="replace"))
    except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
        return None


def reading(process: Process, role: str | None) -> ProcessReading:
    return ProcessReading(process.id, process.parent_pid, process.name, process.state, process.rss_bytes,
                          process.cpu_seconds, role)


def marked(mark: str, proc: str = "/proc") -> list[ProcessId]:
    """Processes whose environment holds TIGHTRANK_RUN=`mark` (or a mark that begins with it): the tree of a supervisor
    that died whole. Reading another user's environment is not allowed and such processes are not ours."""
    found = []
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            with open(f"{proc}/{entry}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        if any(item.startswith(b"TIGHTRANK_RUN=" + mark.encode()) for item in environment):
            process = read_process(int(entry), proc)
            if process is not None:
                found.append(process.id)
    return found
