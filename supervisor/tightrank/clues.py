"""What the host did around a generation: the kernel's lines of its processes and devices, OOM kills, how low memory was. A
post-mortem asks for it when the engine itself says nothing."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tightrank.readers import kernel
from tightrank.records import Line, WorkerReading

OOM_SECONDS = 20.0                 # an engine may wait for a killed process of its own before it ends
MEMORY_SECONDS = 60.0              # how far back the lowest available memory is of interest when an engine dies


class Clues:
    """Of one generation, whose first process is `main`."""

    def __init__(self, main: int) -> None:
        self.pids = {main}                 # of its tree, ever: the kernel's log names them
        self._devices: set[str] = set()    # of its ranks, as the kernel's log names them
        self._oom_kills: int | None = None
        self._oom_monotonic: float | None = None             # of the last one in this generation's life
        self._hurt_monotonic: float | None = None
        self._available: deque[tuple[float, int]] = deque()  # (monotonic, bytes) of the last minute
        self._guard_lowest: int | None = None

    def observe(self, reading: WorkerReading, pids: Iterable[int], oom_kills: int | None, now: float) -> None:
        """Takes in one pass of `watch`; `oom_kills`: the kernel's, so far."""
        self.pids |= set(pids)
        self._devices |= {device for rank in reading.ranks if (device := kernel.device(f"PCI:{rank.device}")) is not None}
        if oom_kills is not None:
            if self._oom_kills is not None and oom_kills > self._oom_kills:
                self._oom_monotonic = now
            self._oom_kills = oom_kills

    def remember_memory(self, available: int | None, guard_lowest: int | None, now: float) -> None:
        """`guard_lowest`: the lowest that the guard has ever seen; it looks far more often than we do."""
        known = [available] if available is not None else []
        if guard_lowest is not None:
            known += [guard_lowest] if self._guard_lowest is not None and guard_lowest < self._guard_lowest else []
            self._guard_lowest = guard_lowest
        if known:
            self._available.append((now, min(known)))
        while self._available and now - self._available[0][0] > MEMORY_SECONDS:
            self._available.popleft()

    def ours(self, lines: Sequence[Line]) -> list[Line]:
        """Those that name a process of this tree or, without a process, a device of its ranks or none: what becomes of other
        people's is nobody's business here."""
        return [line for line in lines if self._is_ours(line.text)]

    def _is_ours(self, text: str) -> bool:
        if named := kernel.pids(text):
            return bool(named & self.pids)
        device = kernel.device(text)
        return device is None or device in self._devices

    def hurt(self, now: float) -> None:
        """A process that matters has ended; the first time counts."""
        if self._hurt_monotonic is None:
            self._hurt_monotonic = now

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel's OOM killer struck shortly before."""
        hurt, oom = self._hurt_monotonic, self._oom_monotonic
        return hurt is not None and oom is not None and hurt - oom < OOM_SECONDS

    @property
    def lowest_bytes(self) -> int | None:
        """The least that was available in the last MEMORY_SECONDS."""
        return min((available for _, available in self._available), default=None)
