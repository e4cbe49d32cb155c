"""Facts of this host, read once. What cannot be read is None, never 0. Paths are parameters, for tests."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A cgroup v1 limit that is "none": the largest multiple of a page below 2^63.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class HostFacts:
    """`cgroup_limit_bytes`: None is no limit. `devices`: the PCI addresses of its accelerators."""
    mem_total_bytes: int | None
    cgroup_limit_bytes: int | None
    devices: tuple[str, ...] = ()


def read(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), sys: Path = Path("/sys")) -> HostFacts:
    """One look at the host. Never raises for something that is missing."""
    return HostFacts(mem_total_bytes=_mem_total(proc), cgroup_limit_bytes=_cgroup_limit(proc, cgroup),
                     devices=_devices(proc / "driver/nvidia/gpus", sys / "bus/pci/drivers/amdgpu"))


def _devices(*drivers: Path) -> tuple[str, ...]:
    """What the drivers hold. Their directories name devices by PCI address, among other things: 0000:01:00.0."""
    return tuple(sorted(path.name for driver in drivers if driver.is_dir() for path in driver.iterdir() if ":" in path.name))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _mem_total(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_limit(proc: Path, root: Path) -> int | None:
    """The tightest memory limit from this process's cgroup up to the root, v2 or v1."""
    limits = [int(text) for path in _limit_files(proc, root) if (text := _text(path).strip()).isdigit()]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def _limit_files(proc: Path, root: Path) -> Iterator[Path]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        place = base / group.lstrip("/")
        while place.is_relative_to(base):
            yield place / name
            place = place.parent
