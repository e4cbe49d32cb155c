"""Whether a generation's device memory is free again: compared with what was free before its start."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tightrank.readers.nvidia import NvidiaReader

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Level:
    """A device at one moment: its free bytes, and what each process holds (pid -> bytes) as far as the driver tells."""
    free_bytes: int
    holders: dict[int, int]


class Devices:
    """`tolerance_bytes` may be missing. What cannot be read is not waited for: a start must not hang on a reader."""

    def __init__(self, reader: NvidiaReader, tolerance_bytes: int) -> None:
        self._reader, self._tolerance_bytes = reader, tolerance_bytes
        self._before = {device: level for device in reader.devices() if (level := self._level(device))}

    def missing(self, devices: Collection[str], ours: Collection[int]) -> str:
        """What is not free again of those devices, in words, or ""; what others took meanwhile is not missing."""
        for device in sorted(devices):
            before, now = self._before.get(device), self._level(device)
            if before is None or now is None:
                continue
            gone = before.free_bytes - now.free_bytes - max(_of_others(now, ours) - _of_others(before, ours), 0)
            if gone > self._tolerance_bytes:
                held = ", ".join(f"pid {pid} ({size // _MIB} MiB)" for pid, size in now.holders.items())
                return (f"device {device} has {now.free_bytes // _MIB} MiB free, {before.free_bytes // _MIB} before the start; "
                        f"held by {held or 'no process that is seen'}")
        return ""

    def _level(self, device: str) -> Level | None:
        free, _ = self._reader.free_bytes(device)
        return None if free is None else Level(free, self._reader.holders(device))


def _of_others(level: Level, ours: Collection[int]) -> int:
    return sum(size for pid, size in level.holders.items() if pid not in ours)
