"""Shared memory that outlives its processes: whose it is, whether anybody holds it, and its end.

A file of /dev/shm is a generation's when one of its processes was seen to map it. It goes only when no process holds it,
of this container or of another that shares /dev/shm: the kernel tells, since it grants a write lease on a file that nobody
else has open or mapped, and on no other.

What was made in the last moment before a SIGKILL was seen by nobody. So a file goes too that came in the generation's life,
is of our user, has a name that engines and their libraries give, and is held by nobody for some seconds: SGLang hands pictures
from one process to another in segments that neither holds on the way. Engines that were killed leave psm_*, sem.mp-* and
sglang_loads_* (SGLang, vLLM), sgl_shm_mq_* and vllm_dist_* (their CPU backends), nccl-* and torch_*.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from stat import S_ISREG

SHM = Path("/dev/shm")       # noqa: S108 - where the kernel and the C library put it
SYSV = Path("/proc/sysvipc/shm")
Pause = Callable[[float], bool]      # waits for so many seconds; True at once when there is no time for that
_AGAIN_SECONDS = 0.1
ORPHAN_SECONDS = 10.0        # a scheduler in a long prefill takes what it was handed this late
_ENGINES = re.compile(r"psm_[0-9a-f]{8}|sem\.mp-\w{8}|sglang_loads_.+|sgl_shm_mq_.+|vllm_dist_.+|"
                      r"vllm_(?:offload|ec)_.+\.mmap|torch_\d+_.+|nccl-.+")
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


def remove(segments: Mapping[str, int], since_ns: int, pause: Pause, alone: bool) -> tuple[dict[str, int], list[str]]:
    """Removes a generation's files. ({name: bytes} of what went, names of what others hold). May take ORPHAN_SECONDS twice.

    `alone`: no other generation of this deployment lives, whose files may lie about for a moment with nobody holding them.
    """
    gone = _remove_seen(segments, since_ns, pause)
    orphans = {} if not alone else {name: stat for name, stat in _of_our_user(since_ns)
               if segments.get(name) != stat.st_ino and _ENGINES.fullmatch(name) and free(SHM / name)}
    youngest = max((stat.st_ctime for stat in orphans.values()), default=0.0)
    age = time.time() - youngest                                # a clock may jump: never longer than the whole time
    if orphans and not (age < ORPHAN_SECONDS and pause(min(ORPHAN_SECONDS - age, ORPHAN_SECONDS))):
        gone |= _unlinked(orphans)
    return gone, list(_seen(segments, since_ns))


def _remove_seen(segments: Mapping[str, int], since_ns: int, pause: Pause) -> dict[str, int]:
    """A killed process with many threads is a zombie before it has let go of its memory, so this is tried for a while."""
    gone: dict[str, int] = {}
    deadline = time.monotonic() + ORPHAN_SECONDS
    while left := _seen(segments, since_ns):
        gone |= _unlinked(left)
        if gone.keys() >= left.keys() or time.monotonic() > deadline or pause(_AGAIN_SECONDS):
            break
    return gone


def _seen(segments: Mapping[str, int], since_ns: int) -> dict[str, os.stat_result]:
    return {name: stat for name, stat in _of_our_user(since_ns) if segments.get(name) == stat.st_ino}


def _unlinked(files: Mapping[str, os.stat_result]) -> dict[str, int]:
    return {name: size for name, stat in files.items() if (size := _unlink(name, stat)) is not None}


def _unlink(name: str, before: os.stat_result) -> int | None:
    """Its bytes; None where it was not removed: it is held, gone, another one by now."""
    now = _stat(SHM / name)
    if now is None or (now.st_ino, now.st_ctime_ns) != (before.st_ino, before.st_ctime_ns) or not free(SHM / name):
        return None
    try:
        os.unlink(SHM / name)
        return now.st_blocks * 512
    except OSError:
        return None


def _of_our_user(since_ns: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in sorted(_names()):
        stat = _stat(SHM / name)
        if stat is not None and S_ISREG(stat.st_mode) and stat.st_uid == os.geteuid() and stat.st_ctime_ns >= since_ns:
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
