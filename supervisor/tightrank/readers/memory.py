"""Memory of this host: /proc/meminfo, pressure (PSI), what the memory cgroups (v1 or v2) leave, and the kernel's OOM kills.

What `available` means: tightrank_adapter/memory.py. The roots are parameters for tests.
"""
from __future__ import annotations

from pathlib import Path

from tightrank.adapter import memory
from tightrank.records import MemoryReading


def pressure(text: str) -> dict[str, float]:
    """avg10 (percent) of "some" and "full" from a /proc/pressure file."""
    found = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        for item in fields:
            if item.startswith("avg10="):
                found[kind] = float(item[6:])
    return found


class MemoryReader:
    """Reads this host's memory. Which cgroups hold us is read once: a process is seldom moved."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = tuple(memory.groups(proc, cgroups))

    def read(self, monotonic: float) -> MemoryReading:
        """One reading; what cannot be read is None and `why` says so."""
        why: list[str] = []
        total, available = self._meminfo(why)
        limit, room = self._tightest_group(why)
        some, full = self._pressure()
        known = [value for value in (available, room) if value is not None]
        return MemoryReading(monotonic, total, available, limit, room,
                             min(known) if available is not None else None, some, full, "; ".join(why), self._oom_kills())

    def _meminfo(self, why: list[str]) -> tuple[int | None, int | None]:
        try:
            values = memory.meminfo(memory.read(str(self._proc), "meminfo"))
            return values["MemTotal"], values["MemAvailable"]
        except (OSError, KeyError) as error:
            why.append(f"meminfo: {error}")
            return None, None

    def _tightest_group(self, why: list[str]) -> tuple[int | None, int | None]:
        found = []
        for group in self._groups:
            try:
                limits = group.room()
            except (OSError, ValueError, KeyError) as error:
                why.append(f"cgroup {group.directory}: {error}")
                continue
            if limits is not None:
                found.append(limits)
        return min(found, key=lambda item: item[1]) if found else (None, None)

    def _oom_kills(self) -> int | None:
        try:
            if self._groups:
                return self._groups[0].oom_kills()
            return memory.table(memory.read(str(self._proc), "vmstat"))["oom_kill"]
        except (OSError, ValueError, KeyError):
            return None

    def _pressure(self) -> tuple[float | None, float | None]:
        try:
            found = pressure(memory.read(str(self._proc), "pressure/memory"))
        except (OSError, ValueError):
            return None, None
        return found.get("some"), found.get("full")
