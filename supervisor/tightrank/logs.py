"""An engine's output: bytes from its pipes -> lines -> a bounded ring, a file, and our own stderr with a prefix.

Reading happens in the tick and never waits. Writing (a full disk, a stuck terminal) happens in threads that drop the
oldest lines rather than hold anybody up.
"""
from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from tightrank.records import Line

LONGEST_LINE_BYTES = 16 * 1024       # a longer one is cut and says so
RING_LINES = 4000                    # of one worker; a start of vLLM prints about 150, of SGLang 100
FILE_BYTES = 16 << 20                # then it becomes <worker>.log.1, the older one goes
_READ_BYTES = 1 << 16
_MOST_READS_A_PASS = 16              # 1 MiB; so that a flood cannot hold the tick
_BREAKS = re.compile(rb"[\r\n]+")    # progress bars rewrite their line with \r


class Lines:
    """Cuts one stream into lines. A line that never ends is cut at LONGEST_LINE_BYTES."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._rest = b""
        self._continued = False

    def feed(self, data: bytes) -> list[Line]:
        *whole, self._rest = _BREAKS.split(self._rest + data)
        found = []
        for part in whole:
            found += self._pieces(part)
            self._continued = False
        while len(self._rest) > LONGEST_LINE_BYTES:
            found += self._pieces(self._rest[:LONGEST_LINE_BYTES])
            self._rest, self._continued = self._rest[LONGEST_LINE_BYTES:], True
        return found

    def close(self) -> list[Line]:
        rest, self._rest = self._rest, b""
        return self._pieces(rest)

    def _pieces(self, data: bytes) -> list[Line]:
        """What continues a cut line is marked: it must not look like the beginning of an engine's message."""
        found = []
        for start in range(0, len(data), LONGEST_LINE_BYTES):
            text = data[start:start + LONGEST_LINE_BYTES].decode(errors="replace").rstrip()
            mark = "... " if start or self._continued else ""
            found.append(Line(time.monotonic(), time.time(), self._stream, mark + text))
        return found


class Pipe:
    """The reading end of an engine's stdout or stderr."""

    def __init__(self, descriptor: int, stream: str) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.open = True
        self._lines = Lines(stream)

    def read(self) -> list[Line]:
        """The lines that have come; `open` turns False at the end of the stream."""
        found: list[Line] = []
        for _ in range(_MOST_READS_A_PASS):
            try:
                data = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                data = b""
            if not data:
                self.open = False
                return found + self._lines.close()
            found += self._lines.feed(data)
        return found

    def close(self) -> None:
        self.open = False
        os.close(self.descriptor)


class _Writer:
    """A thread that writes what is put, in order. When it is held up the oldest go, and `lost` counts them."""

    def __init__(self, name: str, write: Callable[[str, Line], None], keep: int) -> None:
        self._write = write
        self._waiting: deque[tuple[str, Line]] = deque(maxlen=keep)
        self._wake = threading.Event()
        self._closing = False
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, worker: str, lines: Sequence[Line]) -> None:
        for line in lines:
            self.lost += len(self._waiting) == self._waiting.maxlen
            self._waiting.append((worker, line))
        if lines:
            self._wake.set()

    def close(self, deadline: float) -> None:
        """Writes what waits, until `deadline` (monotonic)."""
        self._closing = True
        self._wake.set()
        self._thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while not self._closing or self._waiting:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                self._write(*self._waiting.popleft())


class Sink:
    """Writes lines to <directory>/<worker>.log and, with a prefix, to the console; each has its thread, so that a terminal
    that is stuck costs no line of the file. `trouble` says why the file takes nothing, "" when it does."""

    def __init__(self, directory: Path, console: TextIO | None = sys.stderr, keep: int = 10_000) -> None:
        self._directory = directory
        self._console = console
        self._files: dict[str, int] = {}
        self._refused = 0
        self.trouble = ""
        self._to = (_Writer("log-files", self._to_file, keep), _Writer("log-console", self._to_console, keep))

    @property
    def lost(self) -> int:
        """Lines that were dropped or that the disk did not take."""
        return self._refused + sum(writer.lost for writer in self._to)

    def put(self, worker: str, lines: Sequence[Line]) -> None:
        for writer in self._to:
            writer.put(worker, lines)

    def say(self, text: str) -> None:
        """The supervisor's own words, for the console only."""
        self._to[1].put("tightrank", [Line(time.monotonic(), time.time(), "stderr", text)])

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Writes what waits, for at most `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        for writer in self._to:
            writer.close(deadline)

    def _to_file(self, worker: str, line: Line) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(line.unix))
        try:
            descriptor = self._file(worker)
            os.write(descriptor, f"{stamp}.{int(line.unix % 1 * 1000):03d}Z {line.text}\n".encode())
            self.trouble = ""
        except OSError as error:
            self._refused += 1
            self.trouble = f"{self._directory / worker}.log: {error.strerror}"

    def _file(self, worker: str) -> int:
        path = self._directory / f"{worker}.log"
        descriptor = self._files.get(worker)
        if descriptor is not None and os.fstat(descriptor).st_size > FILE_BYTES:
            os.close(self._files.pop(worker))
            os.replace(path, path.with_suffix(".log.1"))
            descriptor = None
        if descriptor is None:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files[worker] = descriptor
        return descriptor

    def _to_console(self, worker: str, line: Line) -> None:
        if self._console is None:
            return
        try:
            print(f"{worker} | {line.text}", file=self._console, flush=True)
        except (OSError, ValueError):
            self._console = None      # nobody reads it any more; the file goes on
