"""Shared memory that outlives its processes: whose it is, whether anybody holds it, and its end.

A file of /dev/shm is a generation's when one of its processes was seen to map it, or when it came in its life, is of our
user and has a name that engines and their libraries give (what was made in the last moment before a SIGKILL was seen by
nobody). It goes only when no process holds it, of this container or of another that shares /dev/shm: the kernel tells,
since it grants a write lease on a file that nobody else has open or mapped, and on no other. Engines that were killed leave
psm_*, sem.mp-* and sglang_loads_* (SGLang, vLLM), sgl_shm_mq_* and vllm_dist_* (their CPU backends), nccl-* and torch_*.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from stat import S_ISREG

SHM = Path("/dev/shm")       # noqa: S108 - where the kernel and the C library put it
SYSV = Path("/proc/sysvipc/shm")
_ENGINES = re.compile(r"psm_[0-9a-f]{8}|sem\.mp-\w{8}|sglang_loads_.+|sgl_shm_.+|vllm_.+|torch_\d+_.+|nccl-.+")
_MAPPED = re.compile(rb" /dev/shm/(.+?)(?: \(deleted\))?$", re.MULTILINE)
_IPC_RMID = 0


def changed() -> int:
    """A number that is another one when a file has come or gone."""
    stat = _stat(SHM)
    return 0 if stat is None else stat.st_mtime_ns


def mapped(pids: Collection[int]) -> dict[str, int]:
    """{name: inode} of the files in /dev/shm that these processes map."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            found |= {os.fsdecode(match[1]) for match in _MAPPED.finditer(file.read())}
    return {name: stat.st_ino for name in found if (stat := _stat(SHM / name)) is not None}


def remove(segments: Mapping[str, int], since_ns: int) -> tuple[dict[str, int], list[str]]:
    """Removes a generation's files. ({name: bytes} of what went, names of what others hold)."""
    gone, kept = {}, []
    for name, stat in _ours(segments, since_ns):
        try:
            if free(SHM / name):
                os.unlink(SHM / name)
                gone[name] = stat.st_blocks * 512
                continue
        except OSError:                 # gone already, or not ours to remove
            pass
        if _stat(SHM / name) is not None:
            kept.append(name)
    return gone, kept


def _ours(segments: Mapping[str, int], since_ns: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in sorted(_names()):
        stat = _stat(SHM / name)
        if stat is None or not S_ISREG(stat.st_mode) or stat.st_uid != os.geteuid() or stat.st_ctime_ns < since_ns:
            continue
        if segments.get(name) == stat.st_ino or _ENGINES.fullmatch(name):
            yield name, stat


def _names() -> list[str]:
    try:
        return os.listdir(SHM)
    except OSError:                 # a container without it
        return []


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def free(path: Path) -> bool:
    """Whether no process at all has it open or mapped. What cannot be told is not free."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)   # who opens it meanwhile has SIGIO sent to us, which kills
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove_sysv(pids: Collection[int], since_ns: int) -> int:
    """Removes the System V segments that these processes made and nobody has attached; how many. (Semaphores and queues
    of that kind do not tell who made them: they stay.)"""
    libc = ctypes.CDLL(None)
    return sum(libc.shmctl(number, _IPC_RMID, None) == 0 for number in _sysv(pids, since_ns))


def _sysv(pids: Collection[int], since_ns: int) -> Iterator[int]:
    try:
        names, *lines = (line.split() for line in SYSV.read_text().splitlines())
        rows = [dict(zip(names, map(int, line), strict=True)) for line in lines]
    except (OSError, ValueError):       # a kernel without it
        return
    for row in rows:
        if row["cpid"] in pids and row["nattch"] == 0 and row["cuid"] == os.geteuid() and row["ctime"] >= since_ns // 10**9:
            yield row["shmid"]
