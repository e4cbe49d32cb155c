"""This process: locked in memory, first to run, last to be killed by the kernel, parent of every orphan."""
from __future__ import annotations

import ctypes
import os
import resource

from common import say

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT, MLOCK_ONFAULT, CAP_IPC_LOCK = 1, 2, 4, 1, 14
libc = ctypes.CDLL(None, use_errno=True)


def lock_memory() -> bool:
    """Locks all of this process's memory; with a small RLIMIT_MEMLOCK what fits, code and writable memory first.

    Under a limit MCL_FUTURE is never used: it makes later allocations fail.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        hard = resource.RLIM_INFINITY
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with open("/proc/self/status", "rb") as file:
        capable = int(file.read().partition(b"CapEff:")[2].split()[0], 16) >> CAP_IPC_LOCK & 1
    if (capable or hard == resource.RLIM_INFINITY) and libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0:
        say("locked all memory, present and future")
        return True
    say(f"locked {lock_parts() // 1024} KiB of memory; RLIMIT_MEMLOCK is {hard // 1024} KiB (raise it to lock all)")
    return False


def lock_parts() -> int:
    """Bytes locked, mapping by mapping, until the limit refuses them."""
    with open("/proc/self/maps") as file:
        mappings = [line.split()[:2] for line in file if "[v" not in line]
    locked = 0
    for span, _ in sorted((each for each in mappings if set("wx") & set(each[1])), key=lambda each: "x" not in each[1]):
        start, end = (int(part, 16) for part in span.split("-"))
        if libc.mlock2(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MLOCK_ONFAULT) == 0:
            locked += end - start
    return locked


def raise_priority() -> str:
    """Real-time, or nice -20, or as it was; children start without it (SCHED_RESET_ON_FORK)."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        return "SCHED_FIFO 1"
    except OSError:
        pass
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        return "nice -20"
    except OSError:
        return "normal scheduling (CAP_SYS_NICE is missing)"


def set_oom_score_adj(value: int) -> str:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(value))
        return f"oom_score_adj {value}"
    except OSError:
        return "oom_score_adj unchanged (CAP_SYS_RESOURCE is missing)"
