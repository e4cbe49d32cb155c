"""The peak of memory over one step of this process (what asking costs: scripts/bench/adapter).

`reset` must not run before an engine has sized its KV cache: engines size from the same counters.
"""
import os
from typing import Optional

from . import memory

_CLEAR_REFS = "/proc/self/clear_refs"
_RESET_PEAK = b"5"  # proc(5): no privilege needed
_known = False  # whether the kernel let us start a new peak (sandboxes such as gVisor do not)


def reset() -> None:
    """Starts a new peak: of CUDA's or ROCm's allocator where a device is in use, of resident memory otherwise."""
    global _known
    cuda = memory.device()
    if cuda is not None:
        cuda.reset_peak_memory_stats()
        return
    try:
        descriptor = os.open(_CLEAR_REFS, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _known = os.write(descriptor, _RESET_PEAK) > 0
        finally:
            os.close(descriptor)
    except OSError:
        _known = False


def read() -> Optional[int]:
    """Bytes at the peak since `reset`; None where the kernel does not say."""
    cuda = memory.device()
    if cuda is not None:
        return int(cuda.max_memory_allocated())
    if not _known:
        return None
    with open("/proc/self/status", "rb") as file:
        _, found, rest = file.read().partition(b"VmHWM:")
    return int(rest.split(None, 1)[0]) << 10 if found else None


def on_device() -> bool:
    """Whether this process computes on a GPU (CUDA or ROCm)."""
    return memory.device() is not None
