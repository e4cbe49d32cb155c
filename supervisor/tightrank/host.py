"""Facts of this host, read once. What cannot be read is None, never 0. Paths are parameters, for tests."""
from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A cgroup v1 limit that is "none": the largest multiple of a page below 2^63.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class HostFacts:
    """`cgroup_limit_bytes` and `memlock_limit_bytes`: None is no limit."""
    mem_total_bytes: int | None
    cgroup_limit_bytes: int | None
    page_bytes: int
    cores: int
    memlock_limit_bytes: int | None
    is_root: bool
    gpus: tuple[str, ...]              # PCI bus IDs
    gpus_why: str                      # why there are none, when there are none


def read(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostFacts:
    """One look at the host. Never raises for something that is missing."""
    gpus, why = _gpus()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(mem_total_bytes=_mem_total(proc), cgroup_limit_bytes=_cgroup_limit(proc, cgroup),
                     page_bytes=resource.getpagesize(), cores=len(os.sched_getaffinity(0)),
                     memlock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
                     is_root=os.geteuid() == 0, gpus=gpus, gpus_why=why)


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


def _gpus() -> tuple[tuple[str, ...], str]:
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return (), "pynvml is not installed (pip install 'tightrank[nvidia]')"
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = tuple(str(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    return found, "" if found else "NVML sees none"
