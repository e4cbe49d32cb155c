"""The hook `empty-cache`: after a prefill chunk, gives memory that only an allocator keeps back to the device or the host.

The peak of a chunk lies inside one layer's forward, so this cannot lower it: it keeps one chunk's leftovers from adding to
the next one's. Called where a chunk's launch has returned. By then its transients are back in the allocator's cache, and
releasing that waits for the device to be done with the chunk (cudaFree), so the next chunk, which is not launched yet, starts
without them. Overlap scheduling changes nothing in that, and without pressure there is no wait.
"""
import ctypes
import os
import time
from typing import Any

from . import memory, rank, wire

HOOK = "empty-cache"
WORTH_BYTES = 64 << 20  # less than this in the allocator's cache is not worth the wait
CALM_SECONDS = 0.05     # between two looks at what is available, while there is enough: a look takes 0.1 ms (cgroups v1)
LONGEST_CALM_SECONDS = 1.0
FILL_BYTES_PER_SECOND = 2150 * 2**20 * (os.cpu_count() or 1)    # a host's memory fills no faster (MAP_POPULATE on each core)
_releases = 0
_calm_until = 0.0
_kept_bytes = 0  # in the allocator's cache after the last release: parts of blocks in use, pools of graphs


def begin() -> bool:
    """Whether chunks are to be looked at; tells the supervisor that the hook is in force. Raises KeyError for bad settings."""
    values = rank.settings().hooks[HOOK]
    int(values["mark_bytes"])
    wanted = {"never": False, "pressure": True, "every-chunk": True}[values["when"]]
    rank.hook(HOOK, wire.IN_FORCE)
    return wanted


def chunk_ended() -> None:
    """To be called by the engine's thread that runs chunks, when one was launched whole."""
    global _releases
    cuda = memory.device()
    if cuda is not None and _idle_bytes(cuda) - _kept_bytes < WORTH_BYTES:
        return
    values = rank.settings().hooks[HOOK]
    if values["when"] == "pressure" and not _pressed(values["mark_bytes"]):
        return
    if not rank.settings().observes(HOOK):
        _release(cuda)
    _releases += 1
    rank.count("cache_releases", _releases)


def _pressed(mark_bytes: int) -> bool:
    """Chunks that come faster than CALM_SECONDS are small: not each of them is worth a look."""
    global _calm_until
    now = time.monotonic()
    if now < _calm_until:
        return False
    found = memory.available()
    pressed = found.free_bytes < mark_bytes
    _calm_until = 0.0 if pressed else now + _calm_seconds(found, mark_bytes)
    return pressed


def _calm_seconds(found: memory.Memory, mark_bytes: int) -> float:
    """A host is not looked at before half of what it has above the mark can be filled; a device fills at once."""
    fill_seconds = (found.free_bytes - mark_bytes) / FILL_BYTES_PER_SECOND / 2 if found.shared else 0.0
    return min(max(CALM_SECONDS, fill_seconds), LONGEST_CALM_SECONDS)


def _idle_bytes(cuda: Any) -> int:
    return int(cuda.memory_reserved() - cuda.memory_allocated())


def _release(cuda: Any) -> None:
    """On a CPU the cache is glibc's heap: it keeps what was allocated in pieces under its mmap threshold."""
    global _kept_bytes
    if cuda is not None:
        cuda.empty_cache()
        _kept_bytes = _idle_bytes(cuda)
    else:
        getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: 0)(0)  # musl has none
