"""guard.page and daemon.beat: 4096 bytes shared by mmap, each written by one process and read by another."""
from __future__ import annotations

import mmap
import os
import struct

SCHEMA = 3


class Page:
    """"<QQ" sequence (odd while it is written, 0 before), schema 3, then unsigned 64-bit values. As pages.Page.

    Its block is allocated at once: a full disk later must not become a SIGBUS.
    """

    def __init__(self, path: str, values: int) -> None:
        self._struct, self._sequence = struct.Struct(f"<{2 + values}Q"), 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self.clear()

    def clear(self) -> None:
        self._map[:] = bytes(mmap.PAGESIZE)

    def write(self, *values: int) -> None:
        self._sequence += 2
        whole = self._struct.pack(self._sequence, SCHEMA, *values)
        # A slice is one copy; pack_into clears its target first, and a reader could take the zeros as whole.
        self._map[:8] = (self._sequence - 1).to_bytes(8, "little")
        self._map[8:len(whole)] = whole[8:]
        self._map[:8] = whole[:8]

    def read(self) -> tuple[int, ...] | None:
        """None when nothing whole is there: not written yet, being written, or another schema."""
        before, whole, after = self._map[:8], self._map[:self._struct.size], self._map[:8]
        sequence, schema, *values = self._struct.unpack(whole)
        good = sequence and sequence % 2 == 0 and schema == SCHEMA and before == whole[:8] == after
        return tuple(values) if good else None
