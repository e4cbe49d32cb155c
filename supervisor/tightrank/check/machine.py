"""This machine: /dev/shm, limits, disk, swap, page cache, other OOM daemons. Facts are read once; items are pure."""
from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightrank.adapter import memory
from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.config import Config
from tightrank.records import WorkerSpec

_MIB, _GIB = 2**20, 2**30
SHM = "/dev/shm"                           # noqa: S108
_NO_LIMIT = 2**62
_CAP_IPC_LOCK = 14                         # capabilities(7): the memlock limit does not count
SHM_BYTES = _GIB                           # Docker's 64 MiB are too few for NCCL (vllm-project/vllm#1710); it advises 1 GiB
SHM_RANK_BYTES = 33 * _MIB                 # one of NCCL's segments (llm-d/llm-d#352)
GUARD_BYTES = 16 * _MIB                    # of the guard, which locks itself in memory
OPEN_FILES, PROCESSES = 4096, 1024         # an engine of one rank holds 200 to 600 of each, measured on two cores
DISK_BYTES, DISK_WARN_BYTES, FILES = _MIB, _GIB, 100
OOM_DAEMONS = ("earlyoom", "systemd-oomd", "nohang", "oomd", "low-memory-mon")      # as /proc/PID/comm cuts names: 15


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Bytes; None: could not be read. `limits`: (soft, hard)."""
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock: tuple[int, int] | None = None
    open_files: tuple[int, int] | None = None
    processes_left: int | None = None      # of the pids cgroup and the user's limit, the tighter of both
    may_lock: bool = False                 # whatever the limit
    disk: str = ""                         # the directory that is, for the state directory
    disk_free_bytes: int | None = None
    disk_free_files: int | None = None
    meminfo: dict[str, int] | None = None
    min_free_bytes: int | None = None
    daemons: tuple[tuple[int, str], ...] | None = None       # (pid, name)


def read(state: Path, proc: Path = Path("/proc"), shm: Path = Path(SHM),
         cgroups: Path = Path("/sys/fs/cgroup")) -> MachineFacts:
    """One look. Never raises."""
    existing = next((path for path in (state, *state.parents) if os.path.exists(path)), Path("/"))
    shm_total, shm_free, _ = _space(shm)
    _, disk_free, files = _space(existing)
    return MachineFacts(shm_total, shm_free, _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE),
                        _processes_left(proc, cgroups), _may_lock(proc), str(existing), disk_free, files, _meminfo(proc),
                        _whole(proc / "sys" / "vm" / "min_free_kbytes", 1024), _daemons(proc))


def _space(path: Path) -> tuple[int | None, int | None, int | None]:
    """(bytes, free bytes, free files; None where the file system does not count them)."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _limit(name: int) -> tuple[int, int]:
    soft, hard = (_NO_LIMIT if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(name))
    return soft, hard


def _whole(path: Path, unit: int = 1) -> int | None:
    try:
        return int(path.read_text()) * unit
    except (OSError, ValueError):
        return None


def _processes_left(proc: Path, cgroups: Path) -> int | None:
    """Root is under no limit of its own."""
    found = [_limit(resource.RLIMIT_NPROC)[0]] if os.geteuid() else []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "pids" in controllers.split(","):
            group = (cgroups / "pids" if controllers else cgroups) / path.lstrip("/")
            most, now = _whole(group / "pids.max"), _whole(group / "pids.current")
            found += [most - now] if most is not None and now is not None else []
    return min(found, default=_NO_LIMIT)


def _may_lock(proc: Path) -> bool:
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
        return any(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1 for line in lines if line.startswith("CapEff:"))
    except (OSError, ValueError, IndexError):
        return False


def _meminfo(proc: Path) -> dict[str, int] | None:
    try:
        return memory.meminfo(memory.read(str(proc), "meminfo"))
    except OSError:
        return None


def _daemons(proc: Path) -> tuple[tuple[int, str], ...] | None:
    try:
        found = [(int(name), (proc / name / "comm")) for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return None
    return tuple(sorted((pid, name) for pid, path in found if (name := _text(path)) in OOM_DAEMONS))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --- items ------------------------------------------------------------------------------------------------------------


def items(facts: MachineFacts, config: Config, specs: Sequence[WorkerSpec], unified: bool | None) -> Iterator[Item]:
    """`unified`: whether devices share the host's memory; None: it cannot be told."""
    yield _shm(facts, specs)
    yield _memlock(facts, specs)
    yield _open_files(facts)
    yield _processes(facts)
    yield _disk(facts, config)
    yield _swap(facts, bool(unified))
    yield _min_free(facts, config)
    yield _page_cache(facts, unified)
    yield _other_daemons(facts)


def _shm(facts: MachineFacts, specs: Sequence[WorkerSpec]) -> Item:
    item, total, free = SHM, facts.shm_total_bytes, facts.shm_free_bytes
    if total is None or free is None:
        return unknown(item, f"{SHM} cannot be looked at")
    ranks = max((spec.tensor_parallel * spec.pipeline_parallel for spec in specs), default=1)
    shown = f"{free / _MIB:.0f} of {total / _MIB:.0f} MiB are free"
    larger = "give it more (docker: --shm-size 2g, compose: shm_size, Kubernetes: an emptyDir with medium Memory)"
    needed = ranks > 1 or any(spec.engine == "vllm" for spec in specs)      # vLLM's queues lie there for one rank too
    if free < _MIB and needed:
        return failed(item, "host-memory-too-small", f"it is full: {shown}", f"remove what is left over in it, or {larger}")
    if ranks > 1 and (total < SHM_BYTES or free < ranks * SHM_RANK_BYTES):
        return warned(item, f"{shown}, and the {ranks} ranks of a worker talk through it", larger)
    return passed(item, shown)


def _memlock(facts: MachineFacts, specs: Sequence[WorkerSpec]) -> Item:
    item = "memlock limit"
    if facts.memlock is None:
        return unknown(item, "the limit cannot be read")
    limit = facts.memlock[0]
    if facts.may_lock or limit >= _NO_LIMIT:
        return passed(item, "memory may be locked without limit")
    raise_it = "raise it (docker: --ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)"
    if any(spec.role != "both" for spec in specs):
        return warned(item, f"{limit / _MIB:.0f} MiB: what carries KV between workers may pin their KV pool", raise_it)
    if limit < GUARD_BYTES:
        return warned(item, f"{limit / _MIB:.0f} MiB: the guard locks only as much of itself and may be swapped out", raise_it)
    return passed(item, f"{limit / _MIB:.0f} MiB")


def _open_files(facts: MachineFacts) -> Item:
    item = "open files limit"
    if facts.open_files is None:
        return unknown(item, "the limit cannot be read")
    if facts.open_files[1] < OPEN_FILES:             # engines raise the soft one themselves
        return warned(item, f"{facts.open_files[1]} at the most, and each request is a connection",
                      f"raise it to {OPEN_FILES} or more (docker: --ulimit nofile=65535, systemd: LimitNOFILE=65535)")
    return passed(item, f"{facts.open_files[0]}, may be raised to {facts.open_files[1]}")


def _processes(facts: MachineFacts) -> Item:
    item = "process limit"
    if facts.processes_left is None:
        return unknown(item, "the limit cannot be read")
    if facts.processes_left < PROCESSES:
        return warned(item, f"{facts.processes_left} processes and threads are left", f"raise it to {PROCESSES} or more "
                      "(docker: --pids-limit, systemd: TasksMax, ulimit -u)")
    return passed(item, "no limit" if facts.processes_left >= _NO_LIMIT else f"{facts.processes_left} are left")


def _disk(facts: MachineFacts, config: Config) -> Item:
    item, free = "disk of the state directory", facts.disk_free_bytes
    if free is None:
        return unknown(item, f"the disk of {config.state_directory} cannot be looked at")
    files = facts.disk_free_files
    shown = f"{facts.disk}: {free / _GIB:.2f} GiB{f' and {files} files' if files is not None else ''} are free"
    change = "free some, or set state_directory to another disk"
    if free < DISK_BYTES or (files is not None and files < FILES):
        return failed(item, "state-directory-unusable", f"{shown}: journal and logs do not fit", change)
    return warned(item, shown, change) if free < DISK_WARN_BYTES else passed(item, shown)


def _swap(facts: MachineFacts, unified: bool) -> Item:
    item = "swap"
    if not facts.meminfo or "SwapTotal" not in facts.meminfo:
        return unknown(item, "/proc/meminfo does not say")
    total, used = facts.meminfo["SwapTotal"], facts.meminfo["SwapTotal"] - facts.meminfo.get("SwapFree", 0)
    shown = f"{used / _GIB:.2f} of {total / _GIB:.2f} GiB are used"
    if total and (unified or used > total / 2):
        why = "memory is shared with the device, and a host that swaps stands still long before it is full" if unified else \
            "an engine that is swapped out misses every time limit"
        return warned(item, f"{shown}: {why}", "swapoff -a, or watch it")
    return passed(item, shown if total else "none")


def _min_free(facts: MachineFacts, config: Config) -> Item:
    """The kernel's own reserve: MemAvailable leaves it out, and allocations stall where free memory is near it."""
    item, found, floor = "vm.min_free_kbytes", facts.min_free_bytes, config.guard.floor_bytes
    if found is None or not facts.meminfo or "MemTotal" not in facts.meminfo:
        return unknown(item, "/proc/sys/vm/min_free_kbytes or /proc/meminfo cannot be read")
    total = facts.meminfo["MemTotal"]
    if found > max(total // 20, floor):
        return warned(item, f"{found / _GIB:.2f} GiB of {total / _GIB:.2f} are the kernel's reserve, not available",
                      "lower it")
    return passed(item, f"{found / _MIB:.0f} MiB")


def _page_cache(facts: MachineFacts, unified: bool | None) -> Item:
    item = "page cache"
    if unified is None or not facts.meminfo or not {"Cached", "MemTotal"} <= facts.meminfo.keys():
        return unknown(item, "whether the device shares the host's memory cannot be told")
    cached, total = facts.meminfo["Cached"] - facts.meminfo.get("Shmem", 0), facts.meminfo["MemTotal"]
    if unified and cached > total // 10:               # vllm-project/vllm#48140
        return warned(item, f"{cached / _GIB:.2f} of {total / _GIB:.2f} GiB are page cache, which the device's "
                      "driver counts as taken",
                      "sync; echo 3 > /proc/sys/vm/drop_caches")
    return passed(item, f"{cached / _GIB:.2f} GiB" + ("" if unified else ", which goes when it is needed"))


def _other_daemons(facts: MachineFacts) -> Item:
    item = "other OOM daemons"
    if facts.daemons is None:
        return unknown(item, "/proc cannot be listed")
    if facts.daemons:
        names = ", ".join(f"{name} (pid {pid})" for pid, name in facts.daemons)
        return warned(item, f"{names} ends processes by rules of its own, and the engines are the largest",
                      "stop it, or set its limit under guard.floor")
    return passed(item, "none that can be seen")
