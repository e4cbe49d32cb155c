"""The last half hour or more of available memory: of the host, of each rank that has memory of its own, and the pressure."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tightrank.records import Snapshot

KEPT = 1800                  # about 300 KiB
LEAST_SECONDS = 1.0          # between two; ticks come at 20 ms when engines print


class Sample(NamedTuple):
    """`ranks`: ("w0 scheduler 0", available bytes) of those that have another number than the host."""
    monotonic: float
    unix: float
    available_bytes: int | None
    pressure_some_avg10: float | None
    pressure_full_avg10: float | None
    ranks: tuple[tuple[str, int | None], ...]


class Memory:
    """Filled by the tick, one sample a second at most."""

    def __init__(self) -> None:
        self._ring: deque[Sample] = deque(maxlen=KEPT)

    def add(self, snapshot: Snapshot) -> None:
        if self._ring and 0 <= snapshot.monotonic - self._ring[-1].monotonic < LEAST_SECONDS:
            return
        memory = snapshot.memory
        self._ring.append(Sample(snapshot.monotonic, snapshot.unix, memory.available_bytes, memory.pressure_some_avg10,
                                 memory.pressure_full_avg10, tuple(_others(snapshot))))

    def samples(self) -> Sequence[Sample]:
        return tuple(self._ring)


def _others(snapshot: Snapshot) -> Iterator[tuple[str, int | None]]:
    for name, worker in snapshot.workers.items():
        for rank in worker.ranks:
            if rank.rank is not None and rank.available_bytes != snapshot.memory.available_bytes:
                yield f"{name} {rank.role} {rank.rank}", rank.available_bytes
