"""The peak of memory over one step of this process (what asking costs: scripts/bench/adapter).

`reset` must not run before an engine has sized its KV cache: engines size from the same counters.
"""
import os
import resource
import time
from typing import Any, NamedTuple, Optional

from . import memory, pool

LOOK_SECONDS = 0.5  # between two looks at what is available: 0.1 to 0.3 ms each, with cold caches
_CLEAR_REFS = "/proc/self/clear_refs"
_RESET_PEAK = b"5"  # proc(5): no privilege needed
_known = False  # whether the kernel let us start a new peak (sandboxes such as gVisor do not)
_descriptor = -1  # of _CLEAR_REFS, kept open
# The most that this process held under another program, before exec: getrusage(2) never tells less. None: not looked at yet.
_inherited: Optional[int] = None


_looked = -LOOK_SECONDS


class Rest(NamedTuple):
    """Bytes as a step begins; None: not known, or not looked at this time."""
    held: Optional[int] = None  # what the peak rises from
    available: Optional[int] = None  # to this rank, with what its allocator only keeps
    untouched: Optional[int] = None  # of its KV cache


NO_REST = Rest()


def _forget() -> None:
    global _descriptor, _inherited
    _descriptor, _inherited = -1, None  # the file is the parent's, whose peak it is not ours to reset


os.register_at_fork(after_in_child=_forget)


def reset() -> None:
    """Starts a new peak: of CUDA's or ROCm's allocator where a device is in use, of resident memory otherwise."""
    global _known, _descriptor, _inherited
    cuda = memory.device()
    if cuda is not None:
        cuda.reset_peak_memory_stats()
        return
    try:
        if _descriptor < 0:
            _descriptor = os.open(_CLEAR_REFS, os.O_WRONLY | os.O_CLOEXEC)
        _known = os.write(_descriptor, _RESET_PEAK) > 0
    except OSError:
        _known = False
    if _known and _inherited is None:
        _inherited = max(_usage_bytes(), _status_bytes() or 0)


def rest() -> Rest:
    """To be asked right after `reset`."""
    global _looked
    cuda = memory.device()
    held = read() if cuda is None else int(cuda.memory_allocated())
    now = time.monotonic()
    if now - _looked < LOOK_SECONDS:
        return Rest(held)
    _looked = now
    return Rest(held, _available(cuda), pool.untouched_bytes())


def _available(cuda: Any) -> Optional[int]:
    """With what the allocator only keeps: the next step takes that first."""
    try:
        free = memory.available().free_bytes
    except (OSError, ValueError, KeyError):
        return None
    return free if cuda is None else free + int(cuda.memory_reserved()) - int(cuda.memory_allocated())


def read() -> Optional[int]:
    """Bytes at the peak since `reset`; None where the kernel does not say."""
    cuda = memory.device()
    if cuda is not None:
        return int(cuda.max_memory_allocated())
    if not _known:
        return None
    usage = _usage_bytes()
    return usage if _inherited is not None and usage > _inherited else _status_bytes()


def _usage_bytes() -> int:
    """2 us, where /proc/self/status takes 30, and 100 in an engine that has just been through a forward pass."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _status_bytes() -> Optional[int]:
    with open("/proc/self/status", "rb") as file:
        _, found, rest = file.read().partition(b"VmHWM:")
    return int(rest.split(None, 1)[0]) << 10 if found else None


def on_device() -> bool:
    """Whether this process computes on a GPU (CUDA or ROCm)."""
    return memory.device() is not None
