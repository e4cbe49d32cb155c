"""What wakes the daemon's loop before its time: a signal, another thread, a descriptor of a worker."""
from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

COALESCE_SECONDS = 0.02                      # what comes together is read together


class Bell:
    """A pipe that any thread may ring. To be made and waited for in the main thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """Ends the wait; any thread may call it."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass                             # it is full: the loop will wake

    def ring_on_signals(self) -> None:
        """From now on each signal that has a handler of Python's rings."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def hush(self) -> None:
        """Before a look at what it may have been rung for."""
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def poll(self, descriptors: Iterable[int]) -> select.poll:
        """What `heard` waits for: the bell and `descriptors`."""
        found = select.poll()
        for descriptor in (self._read, *descriptors):
            found.register(descriptor, select.POLLIN)
        return found


def heard(poll: select.poll, seconds: float) -> bool:
    """Whether something comes within `seconds`; what comes with it has then come too."""
    if not poll.poll(seconds * 1000):
        return False
    time.sleep(COALESCE_SECONDS)
    return True
