"""Memory of this host: /proc/meminfo, pressure (PSI), what the memory cgroups (v1 or v2) leave, and the kernel's OOM kills.

available = min(MemAvailable, limit - (current - inactive_file)) over our own cgroup and its ancestors: page cache that is
not in use can be dropped and does not count as taken (the kubelet's working-set rule). The roots are parameters for tests.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tightrank.records import MemoryReading

_NO_LIMIT_BYTES = 1 << 60      # v1 writes 2**63 rounded down to a page for "no limit"


@dataclass(frozen=True, slots=True)
class _Cgroup:
    directory: str
    version: int

    def room(self) -> tuple[int, int] | None:
        """(limit, room) in bytes, or None where this group sets no limit. Raises OSError, ValueError, KeyError."""
        limit_file, current_file, cache_key = {
            2: ("memory.max", "memory.current", "inactive_file"),
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[self.version]
        text = _text(f"{self.directory}/{limit_file}").strip()
        if text == "max" or int(text) >= _NO_LIMIT_BYTES:
            return None
        current = int(_text(f"{self.directory}/{current_file}"))
        cache = _table(_text(f"{self.directory}/memory.stat"))[cache_key]
        return int(text), int(text) - max(current - cache, 0)

    def oom_kills(self) -> int:
        """Processes of this group that the kernel has killed. Raises OSError, ValueError, KeyError.

        v2 counts the groups below too (Documentation/admin-guide/cgroup-v2.rst, memory.events), v1 does not.
        """
        name = {2: "memory.events", 1: "memory.oom_control"}[self.version]
        return _table(_text(f"{self.directory}/{name}"))["oom_kill"]


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _table(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split()[:2] for line in text.splitlines() if line.strip())}


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes. Lines that are not `Name: N kB` are left out."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            found[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return found


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
        self._groups = tuple(_groups(proc, cgroups))

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
            values = meminfo(_text(f"{self._proc}/meminfo"))
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
            return _table(_text(f"{self._proc}/vmstat"))["oom_kill"]
        except (OSError, ValueError, KeyError):
            return None

    def _pressure(self) -> tuple[float | None, float | None]:
        try:
            found = pressure(_text(f"{self._proc}/pressure/memory"))
        except (OSError, ValueError):
            return None, None
        return found.get("some"), found.get("full")


def _groups(proc: Path, root: Path) -> Iterator[_Cgroup]:
    """Our own memory cgroup and its ancestors. The root of a hierarchy has no limit files (v2) or no limit (v1)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, version, limit = root, 2, "memory.max"
        elif "memory" in controllers.split(","):
            mount, version, limit = root / "memory", 1, "memory.limit_in_bytes"
        else:
            continue
        relative = Path(path.lstrip("/"))
        for part in (relative, *relative.parents):
            # in a container /proc/self/cgroup may name the host's path; then the mount itself is our group
            if (mount / part / limit).exists():
                yield _Cgroup(str(mount / part), version)
