"""Processes: who descends from the guard, killing exactly those, and who grew most on this host."""
from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from common import say

CENSUS_FAR_SECONDS, CENSUS_NEAR_SECONDS = 10.0, 1.0
CENSUS_SLICE = 64         # processes read in one turn of the loop, 10 us each: a census never delays a sample by 1 ms
KILL_ROUNDS = 10          # walks in one stop; what forks faster than that meets the next stop


class Process(NamedTuple):
    """A process as /proc/<pid>/stat told it; pid and start_time (clock ticks after boot) name it for good."""
    pid: int
    start_time: int
    name: str
    parent: int
    alive: bool
    rss_bytes: int

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_time

    def record(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time, "name": self.name, "rss_bytes": self.rss_bytes}


def parse_stat(raw: bytes) -> Process:
    """The name may hold anything, ") Z 1" too: it ends at the last parenthesis."""
    head, _, tail = raw.rpartition(b") ")
    pid, _, name = head.partition(b" (")
    fields = tail.split()
    alive = fields[0] not in b"ZX" or int(fields[17]) > 1  # a main thread may be gone and others still run
    return Process(int(pid), int(fields[19]), name.decode(errors="replace"), int(fields[1]), alive,
                   int(fields[21]) * mmap.PAGESIZE)


def process(pid: int) -> Process | None:
    """None when there is no such process (any more)."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return parse_stat(os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
    except OSError:
        return None


def walk() -> Iterator[Process]:
    """All processes that can be seen."""
    return filter(None, map(process, [int(name) for name in os.listdir("/proc") if name.isdigit()]))


def descendants(everyone: Iterable[Process], root: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for each in everyone:
        children.setdefault(each.parent, []).append(each)
    found = list(children.get(root, ()))
    for each in found:  # grows while it is read: breadth first
        found += children.get(each.pid, ())
    return found


def kill(target: Process) -> Process | None:
    """SIGKILL to exactly this process; as it was just before, or None when it is gone or its pid names another by now.

    The pidfd is opened first: if pid and start time still fit afterwards, it holds the process that was meant.
    """
    try:
        descriptor = os.pidfd_open(target.pid)
    except OSError:
        return None
    try:
        now = process(target.pid)
        if now is None or not now.alive or now.identity != target.identity:
            return None
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return now
    except OSError as error:
        say(f"cannot kill {target.name} ({target.pid}): {error}")
        return None
    finally:
        os.close(descriptor)


def fastest_growing(everyone: Iterable[Process], before: dict[tuple[int, int], int]) -> tuple[Process, int] | None:
    """What grew most since `before` (identity -> RSS in bytes; a new one grew by all it has), and by what."""
    growth = [(each.rss_bytes - before.get(each.identity, 0), each) for each in everyone]
    grown, hog = max(growth, default=(0, None))
    return (hog, grown) if hog and grown > 0 else None


class Tree:
    """Everything below `root`, the guard. `everyone` is the last walk of the whole host."""

    def __init__(self, root: int) -> None:
        self.root, self.last_kill_ns = root, 0
        self.everyone = list(walk())
        self._killed: set[tuple[int, int]] = set()
        self._known: list[Process] = []
        self._older = self._latest = {each.identity: each.rss_bytes for each in self.everyone}
        self._counted, self._near, self._census = time.monotonic(), False, self._take_census()

    def living(self) -> list[Process]:
        return [each for each in descendants(self.everyone, self.root) if each.alive]

    def kill(self, spared: int) -> list[Process]:
        """SIGKILL to every descendant but the pid `spared`; those that had not had it yet, as they were just before."""
        killed = self._kill(self._known, spared)  # of the last census: no walk of a big /proc before the first signal
        for _ in range(KILL_ROUNDS):
            self.everyone = list(walk())
            more = self._kill(descendants(self.everyone, self.root), spared)
            killed += more
            if not more:
                break
        return killed

    def _kill(self, targets: list[Process], spared: int) -> list[Process]:
        killed = []
        for target in sorted(targets, key=lambda each: -each.rss_bytes):
            if target.alive and target.pid != spared and target.identity not in self._killed:
                victim = kill(target)
                if victim:
                    self.last_kill_ns = time.monotonic_ns()
                    self._killed.add(victim.identity)
                    killed.append(victim)
        return killed

    def hog(self, killed: list[Process]) -> dict[str, Any] | None:
        """What grew most, as guard.jsonl has it; `killed` count with what they held before."""
        inside = {each.identity for each in (*killed, *descendants(self.everyone, self.root))}
        everyone = {each.identity: each for each in (*self.everyone, *killed)}
        young = time.monotonic() - self._counted < CENSUS_NEAR_SECONDS  # it may have counted the hog half grown
        found = fastest_growing(everyone.values(), self._older if young else self._latest)
        return found and {**found[0].record(), "growth_bytes": found[1], "inside": found[0].identity in inside}

    def count(self, near: bool) -> None:
        """One slice of the census, when one is due: who to kill first, and who has grown since. More often when near."""
        self._near = near
        next(self._census)

    def _take_census(self) -> Iterator[None]:
        while True:
            while time.monotonic() - self._counted < (CENSUS_NEAR_SECONDS if self._near else CENSUS_FAR_SECONDS):
                yield
            everyone = []
            for each in walk():
                everyone.append(each)
                if len(everyone) % CENSUS_SLICE == 0:
                    yield
            self._known = descendants(everyone, self.root)
            self._older, self._latest = self._latest, {each.identity: each.rss_bytes for each in everyone}
            self._killed &= self._latest.keys()
            self._counted = time.monotonic()
