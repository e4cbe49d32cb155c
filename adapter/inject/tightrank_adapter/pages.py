"""Pages: small files that one process writes in place and others read, mapped into memory. What is in them: wire.py.

Standard library only; the supervisor loads this file by path, as wire.py.
"""
import mmap
import os
import struct
import time
from typing import Tuple

from .wire import CONTROL, SCHEMA, Beat, WireError, start_time


class Page:
    """A 4096-byte mmap that one process writes and others read: a sequence number (odd while being written), values."""

    def __init__(self, path: str, layout: str, create: bool) -> None:
        self._struct = struct.Struct("<QQ" + layout)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC if create else os.O_RDONLY | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:  # allocated, not only made long: on a full disk a write to a hole of a mapped file is a SIGBUS
                os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            access = mmap.ACCESS_WRITE if create else mmap.ACCESS_READ
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE, access=access)
        finally:
            os.close(descriptor)
        self._sequence = 0
        self._path = path

    def write(self, *values: int) -> None:
        self._sequence += 2
        whole = self._struct.pack(self._sequence, SCHEMA, *values)
        # A slice is one copy. pack_into clears its target first: readers saw zeros as whole (160,000 times in 8 s).
        self._map[:8] = (self._sequence - 1).to_bytes(8, "little")
        self._map[8:len(whole)] = whole[8:]
        self._map[:8] = whole[:8]

    def read(self) -> Tuple[int, ...]:
        """Raises WireError when nothing whole is there (not yet written, being written, or another schema)."""
        for _ in range(8):
            before, whole, after = self._map[:8], self._map[:self._struct.size], self._map[:8]
            sequence, schema, *values = self._struct.unpack(whole)
            if sequence and sequence % 2 == 0 and before == whole[:8] == after:
                if schema != SCHEMA:
                    raise WireError("%s: schema %d, wanted %d" % (self._path, schema, SCHEMA))
                return tuple(values)
        raise WireError("%s: not written yet" % self._path)

    def sequence(self) -> bytes:
        """Another one after each write."""
        return self._map[:8]

    def close(self) -> None:
        self._map.close()


class BeatWriter:
    """The beat page of this process. `beat` costs about a microsecond."""

    def __init__(self, directory: str) -> None:
        self._pid = os.getpid()
        self._start_time = start_time(self._pid)
        self._page = Page(os.path.join(directory, "beat-%d" % self._pid), "8Q", True)
        self.loops = self.steps = self.prefill_tokens = self.in_flight = self.step_cost = 0
        self.beat()

    def beat(self) -> None:
        self.loops += 1
        self._page.write(self._pid, self._start_time, time.monotonic_ns(), self.loops, self.steps,
                         self.prefill_tokens, self.in_flight, self.step_cost)


class BeatReader:
    def __init__(self, directory: str, pid: int) -> None:
        self._page = Page(os.path.join(directory, "beat-%d" % pid), "8Q", False)

    def read(self) -> Beat:
        return Beat(*self._page.read())

    def close(self) -> None:
        self._page.close()


class ControlWriter:
    """The control page: the budget (token²) that engines which read it must keep from their next step on."""

    def __init__(self, directory: str) -> None:
        self._page = Page(os.path.join(directory, CONTROL), "Q", True)

    def publish(self, budget: int) -> None:
        self._page.write(budget)

    def close(self) -> None:
        self._page.close()


class ControlReader:
    def __init__(self, directory: str) -> None:
        self._page = Page(os.path.join(directory, CONTROL), "Q", False)
        self._seen, self._budget = b"", 0

    def budget(self) -> int:
        """The budget as it is published now; a page that was not written since the last call is not read again."""
        sequence = self._page.sequence()
        if sequence != self._seen:
            self._budget, self._seen = self._page.read()[0], sequence
        return self._budget
