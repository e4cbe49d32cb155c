"""How much memory is available: to this host, to our memory cgroups, to a rank's device. Bytes throughout.

available = min(MemAvailable, limit - (current - inactive_file)) over our own cgroup and its ancestors: page cache that is
not in use can be dropped and does not count as taken (the kubelet's working-set rule). The supervisor loads this file by
path; torch is looked at only where an engine has imported it.
"""
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

_NO_LIMIT_BYTES = 1 << 60  # v1 writes 2**63 rounded down to a page for "no limit"
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_own_groups: Optional[Tuple["Cgroup", ...]] = None


class Cgroup(NamedTuple):
    """One memory cgroup, of version 1 or 2."""
    directory: str
    version: int

    def room(self) -> Optional[Tuple[int, int]]:
        """(limit, room) in bytes, or None where this group sets no limit. Raises OSError, ValueError, KeyError."""
        limit_file, current_file, cache_key = {
            2: ("memory.max", "memory.current", "inactive_file"),
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[self.version]
        text = read(self.directory, limit_file).strip()
        if text == "max" or int(text) >= _NO_LIMIT_BYTES:
            return None
        current = int(read(self.directory, current_file))
        cache = table(read(self.directory, "memory.stat"))[cache_key]
        return int(text), int(text) - max(current - cache, 0)

    def oom_kills(self) -> int:
        """Processes of this group that the kernel has killed. Raises OSError, ValueError, KeyError.

        v2 counts the groups below too (Documentation/admin-guide/cgroup-v2.rst, memory.events), v1 does not.
        """
        name = {2: "memory.events", 1: "memory.oom_control"}[self.version]
        return table(read(self.directory, name))["oom_kill"]


class Memory(NamedTuple):
    """What a rank may count on. `shared`: it is the host's memory (a CPU, a unified-memory device), not its device's own."""
    free_bytes: int
    total_bytes: int
    shared: bool


def read(directory: str, name: str) -> str:
    with open("%s/%s" % (directory, name)) as file:
        return file.read()


def table(text: str) -> Dict[str, int]:
    """The lines `name number ...` of a file of the kernel's."""
    return {key: int(value) for key, value in (line.split()[:2] for line in text.splitlines() if line.strip())}


def meminfo(text: str) -> Dict[str, int]:
    """/proc/meminfo in bytes. Lines that are not `Name: N kB` are left out."""
    found: Dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            found[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return found


def groups(proc: Path = _PROC, root: Path = _CGROUPS) -> Iterator[Cgroup]:
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
                yield Cgroup(str(mount / part), version)


def host() -> Memory:
    """Of this host and our cgroups. Raises OSError, ValueError or KeyError where the kernel does not say."""
    global _own_groups
    if _own_groups is None:  # which cgroups hold us is looked up once: a process is seldom moved
        _own_groups = tuple(groups())
    values = meminfo(read(str(_PROC), "meminfo"))
    try:
        limits = [found for found in (group.room() for group in _own_groups) if found is not None]
    except OSError:
        _own_groups = None  # we were moved, perhaps: the next call looks again
        raise
    return Memory(min([values["MemAvailable"], *(room for _, room in limits)]),
                  min([values["MemTotal"], *(limit for limit, _ in limits)]), True)


def device() -> Any:
    """torch.cuda (CUDA or ROCm) where this process computes with it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def integrated(cuda: Any) -> bool:
    """Whether the device computes in the host's memory."""
    return bool(getattr(cuda.get_device_properties(cuda.current_device()), "is_integrated", False))


def available() -> Memory:
    """Of this rank's device where that has memory of its own, else of the host. Raises as `host`, and what torch raises.

    Integrated devices use the host's memory, and what their driver calls free is MemFree: page cache is missing in it.
    """
    cuda = device()
    if cuda is None or integrated(cuda):
        return host()
    free_bytes, total_bytes = cuda.mem_get_info()
    return Memory(int(free_bytes), int(total_bytes), False)


def rank_memory(ranks_on_host: int) -> Memory:
    """`available`, with the host's memory divided among the `ranks_on_host` ranks of the worker that share it."""
    found = available()
    if not found.shared:
        return found
    return Memory(found.free_bytes // ranks_on_host, found.total_bytes // ranks_on_host, True)
