"""Post-mortem bundles: what a person wants to see of a failure, in one archive of the state directory.

`<state>/bundles/<time>-<worker>-<generation>.tar.gz`, made by a thread after each failure, or by `tightrank bundle`. What
goes in (parts.py) is bounded, how many are kept too. Secrets that are known (secrets.py) are taken out of every member.
"""
from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBER_BYTES = 1 << 20       # of each member; of a longer text the end, where the failure is
MEMBERS = 200                # ranks, streams: a worker of 64 ranks has about 140
KEEP_FILES, KEEP_BYTES = 20, 200 << 20
WAITING = 8                  # failures that wait to be written; a disk that hangs must not fill our memory
SUFFIX = ".tar.gz"

Part = tuple[str, str]       # name in the archive, text
Scrub = Callable[[str], str]


def folder(state_directory: Path) -> Path:
    return state_directory / "bundles"


def name_of(unix: float, what: str) -> str:
    """The name sorts by time. `what`: <worker>-<generation>."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(unix))}-{what}{SUFFIX}"


def found(directory: Path) -> list[Path]:
    """The bundles that are there, oldest first. Raises OSError for a directory that cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


def write(path: Path, parts: Iterable[Part], scrub: Scrub) -> None:
    """Makes the archive at `path`, 0600, whole or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
                _fill(archive, path.name.removesuffix(SUFFIX), parts, scrub)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _fill(archive: tarfile.TarFile, top: str, parts: Iterable[Part], scrub: Scrub) -> None:
    for count, (name, text) in enumerate(parts):
        if count == MEMBERS:
            name, text = "left-out.txt", f"there were more than {MEMBERS} members\n"
        data = scrub(text).encode(errors="replace")[-MEMBER_BYTES:]      # cut after it: half a secret would not be found
        member = tarfile.TarInfo(f"{top}/{name}")
        member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
        archive.addfile(member, io.BytesIO(data))
        if count == MEMBERS:
            return


def tidy(directory: Path, keep_files: int = KEEP_FILES, keep_bytes: int = KEEP_BYTES) -> None:
    """Deletes the oldest over the limits (never the newest), and what a process that died has left half done."""
    for torn in directory.glob(".*.tmp"):
        pid = torn.name.split(".")[-3]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            torn.unlink(missing_ok=True)
    size = 0
    for count, path in enumerate(reversed(found(directory))):
        size += path.stat().st_size
        if count and (count >= keep_files or size > keep_bytes):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One bundle to make: `parts` and `scrub` are called in the writer's thread."""
    worker: str
    generation: int
    name: str
    parts: Callable[[], Iterator[Part]]
    scrub: Scrub


@dataclass(frozen=True, slots=True)
class Done:
    """`trouble`: why there is no bundle, "" when there is."""
    worker: str
    generation: int
    name: str
    trouble: str


class Writer:
    """Makes bundles in a thread, one at a time; `put` and `take` never wait. `wake` is called when one is done."""

    def __init__(self, directory: Path, wake: Callable[[], None]) -> None:
        self._directory, self._wake = directory, wake
        self._waiting: deque[Job] = deque()
        self._done: deque[Done] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        with self._lock:
            if len(self._waiting) >= WAITING:
                self._done.append(Done(job.worker, job.generation, job.name, f"{WAITING} others wait to be written"))
                return
            self._waiting.append(job)
            if self._thread is None:       # it ends when nothing waits: a stack of its own for a failure a month is too much
                thread = threading.Thread(target=self._run, name="bundles", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:      # the limit of threads: the next failure may find one
                    self._waiting.pop()
                    self._done.append(Done(job.worker, job.generation, job.name, str(error)))
                else:
                    self._thread = thread

    def take(self) -> list[Done]:
        """What was done since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self, timeout_seconds: float) -> None:
        """Waits for what is being written."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._done.append(Done(job.worker, job.generation, job.name, self._make(job)))
                self._wake()
        finally:                           # a fault of ours in one bundle costs that one
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _next(self) -> Job | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None            # under the lock: what is put from here on starts the next thread
            return None

    def _make(self, job: Job) -> str:
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            write(self._directory / job.name, job.parts(), job.scrub)
            tidy(self._directory)
        except OSError as error:
            return f"{error.filename or self._directory}: {error.strerror}"
        return ""
