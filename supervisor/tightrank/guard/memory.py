"""Available memory: the least of what the host has and what our cgroups leave."""
from __future__ import annotations

import os

from common import SOFTWARE, UNKNOWN, refuse, say


def pick(text: bytes, key: bytes) -> int:
    """The number after `key` at a line's start. Raises ValueError."""
    _, found, rest = (b"\n" + text).partition(b"\n" + key)
    if not found:
        raise ValueError(f"no {key.decode()}")
    return int(rest.split(None, 1)[0])


def read_file(path: str) -> bytes:
    """b"" when there is none: a kernel without cgroups."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


class MemAvailable:
    """MemAvailable of the host in bytes."""

    def __init__(self, path: str = "/proc/meminfo") -> None:
        self.name, self._file = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, enough: int) -> int:
        return pick(os.pread(self._file, 4096, 0), b"MemAvailable:") * 1024


class Cgroup:
    """Room in one memory cgroup in bytes; `enough` when it has at least that, or no limit."""

    NO_LIMIT_BYTES = 2**62  # v2 says "max", v1 2**63 less a page
    V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file ")
    V2 = ("memory.max", "memory.current", b"inactive_file ")

    def __init__(self, directory: str, version: int) -> None:
        limit, usage, self._reclaimable = self.V1 if version == 1 else self.V2
        self.name, self._rest = directory, 0
        self._limit, self._usage, self._stat = (
            os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in (limit, usage, "memory.stat"))

    def read(self, enough: int) -> int:
        if self._rest:  # without a limit it is looked at again after 100 reads: each costs 10 us after a sleep
            self._rest -= 1
            return enough
        text = os.pread(self._limit, 64, 0)
        limit = UNKNOWN if text.startswith(b"max") else int(text)
        if limit >= self.NO_LIMIT_BYTES:
            self._rest = 100
            return enough
        room = limit - int(os.pread(self._usage, 64, 0))
        if room >= enough:  # memory.stat is the dear one, and can only add
            return enough
        return min(enough, room + pick(os.pread(self._stat, 16384, 0), self._reclaimable))


def memory_cgroups(membership: str, mounts: str) -> list[tuple[str, int]]:
    """(directory, version) of the memory cgroups that hold us, from /proc/self/cgroup and /proc/self/mountinfo.

    A cgroup outside of what is mounted here (a container without its own cgroup namespace) counts as the mount itself.
    """
    paths = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths[2 if not controllers else 1] = path
    found = []
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        root, mount = fields.split()[3:5]
        filesystem, *_, options = kind.split()
        version = 2 if filesystem == "cgroup2" else 1 if "memory" in options.split(",") else 0
        if version in paths:
            inside = (paths[version] + "/").startswith(root.rstrip("/") + "/")
            parts = paths[version][len(root.rstrip("/")):].split("/") if inside else []
            steps = [part for part in parts if part]
            found += [("/".join([mount, *steps[:depth]]), version) for depth in range(len(steps), -1, -1)]
    return found


class Available:
    """The least of all sources. One that cannot be read is said once and left out: unknown is not 0."""

    def __init__(self) -> None:
        try:
            self._sources: list[MemAvailable | Cgroup] = [MemAvailable()]
            self._sources[0].read(0)
        except (OSError, ValueError) as error:
            raise refuse(f"/proc/meminfo: cannot be read ({error}): no floor can be kept here", SOFTWARE) from None
        texts = [os.fsdecode(read_file(f"/proc/self/{name}")) for name in ("cgroup", "mountinfo")]
        for directory, version in memory_cgroups(*texts):
            try:
                self._sources.append(Cgroup(directory, version))
            except FileNotFoundError:
                continue  # a root cgroup, or a hierarchy without the memory controller: no limit there
            except OSError as error:
                say(f"{directory}: left out: {error}")

    def names(self) -> str:
        return ", ".join(source.name for source in self._sources)

    def read(self) -> int | None:
        least = UNKNOWN
        for source in tuple(self._sources):
            try:
                least = min(least, source.read(least))
            except (OSError, ValueError) as error:
                say(f"{source.name}: cannot be read any more, left out: {error}")
                self._sources.remove(source)
        return None if least == UNKNOWN else max(0, least)
