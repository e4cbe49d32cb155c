"""What the world sees: the journal on disk, the current Status and its JSON forms."""
from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

from tightrank.admission import AdmissionRequest, largest_prompt_tokens
from tightrank.diagnose import without_secrets
from tightrank.errors import CAUSES
from tightrank.records import Diagnosis, Event, Status, WorkerStatus

ROTATE_BYTES = 8 << 20       # about 25,000 events
KEEP_FILES = 3               # journal.jsonl.1 (newest) to .3
RING_EVENTS = 2048           # about 1 MiB; what the API answers from
RING_STEPS = 4096            # prefill steps kept for each worker

Json = dict[str, Any]


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: records become objects in field order, NaN and infinity become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def read_events(path: Path) -> Iterator[Json]:
    """The events of one journal file, oldest first; torn or foreign lines are left out. Raises OSError."""
    with path.open("rb") as file:
        yield from _events(file)


def _events(lines: Iterable[bytes]) -> Iterator[Json]:
    for text in lines:
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(text)
            if isinstance(event, dict) and type(event.get("sequence")) is int:
                yield event


class Journal:
    """Events as JSON lines in `path` (0600), one write(2) each; any thread may append or read.

    A crash tears at most the last line: it is sealed when the journal is opened again and left out by readers. A disk
    that takes no more costs the copy on disk, never the caller: the event stays in memory and `lost` counts it.
    Raises OSError only when the file cannot be opened at first.
    """

    def __init__(self, path: Path, *, rotate_bytes: int = ROTATE_BYTES, ring_events: int = RING_EVENTS) -> None:
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._lock = threading.Lock()
        self._ring: deque[Json] = deque(maxlen=ring_events)
        self._listeners: tuple[Callable[[], None], ...] = ()
        self.lost = 0
        for old in (path.with_name(path.name + ".1"), path):
            with contextlib.suppress(FileNotFoundError):
                self._ring.extend(read_events(old))
        self._sequence = max((event["sequence"] for event in self._ring), default=0)
        self._descriptor = _open(path)
        self._torn = self._ends_torn()

    def append(self, event: Event) -> int:
        """Writes one event and wakes the listeners. Returns its sequence number, which only grows."""
        with self._lock:
            self._sequence += 1
            entry = {"sequence": self._sequence, **plain(event)}
            self._write(json.dumps(entry).encode() + b"\n")
            self._ring.append(entry)
            listeners, sequence = self._listeners, self._sequence
        for wake in listeners:
            wake()
        return sequence

    def recent(self, count: int) -> list[Json]:
        """The newest `count` events, oldest first."""
        with self._lock:
            return list(self._ring)[-count:] if count > 0 else []

    def since(self, sequence: int, limit: int = RING_EVENTS) -> list[Json]:
        """The first `limit` kept events after `sequence`, oldest first."""
        with self._lock:
            return [event for event in self._ring if event["sequence"] > sequence][:limit]

    @property
    def sequence(self) -> int:
        return self._sequence

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` (from the appending thread; it must not block) after each event. Returns what ends it."""
        with self._lock:
            self._listeners += (wake,)
        return lambda: self._forget(wake)

    def close(self) -> None:
        with self._lock:
            os.close(self._descriptor)

    def _forget(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not wake)

    def _ends_torn(self) -> bool:
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def _write(self, data: bytes) -> None:
        try:
            self._rotate(len(data))
            data = b"\n" + data if self._torn else data
            written = os.write(self._descriptor, data)
            self._torn = written < len(data)
            self.lost += self._torn
        except OSError:
            self.lost += 1

    def _rotate(self, coming: int) -> None:
        if os.fstat(self._descriptor).st_size + coming <= self._rotate_bytes:
            return
        coming_path = self._path.with_name(self._path.name + ".new")
        fresh = _open(coming_path)           # first: where none can be made, the older files must stay where they are
        names = [coming_path, self._path,
                 *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, KEEP_FILES + 1))]
        try:
            for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(older)
        except OSError:
            os.close(fresh)
            raise
        os.close(self._descriptor)
        self._descriptor, self._torn = fresh, False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class Board:
    """The current Status, swapped whole, and the latest prefill steps. The tick writes; any thread reads."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._steps: dict[str, tuple[int, tuple[Any, ...]]] = {}     # (number of all so far, the latest)
        self._were_ready: frozenset[str] = frozenset()
        self.started = False               # every worker has been ready once, at whatever time

    def publish(self, status: Status) -> None:
        self._status = status
        self._were_ready |= {worker.name for worker in status.workers if worker.ready}
        self.started = self.started or all(worker.name in self._were_ready for worker in status.workers)

    @property
    def status(self) -> Status | None:
        """None until the first tick has ended."""
        return self._status

    def fresh(self, seconds: float) -> bool:
        """Whether the last tick ended less than `seconds` ago."""
        return self._status is not None and time.monotonic() - self._status.updated_monotonic < seconds

    def add_steps(self, worker: str, steps: Iterable[Any]) -> None:
        """Adds prefill steps (`wire.Step`) of one worker."""
        count, kept = self._steps.get(worker, (0, ()))
        new = tuple(steps)
        if new:
            self._steps[worker] = count + len(new), (kept + new)[-RING_STEPS:]

    def steps(self, worker: str, since: int = 0) -> list[Json]:
        """The kept steps of `worker` whose `id` (1: the first in this daemon) is over `since`, oldest first."""
        count, kept = self._steps.get(worker, (0, ()))
        first = count - len(kept) + 1
        return [{"id": number, **plain(step)} for number, step in enumerate(kept, first) if number > since]


def status_json(status: Status, now_monotonic: float | None = None) -> Json:
    """`status` as plain JSON in a stable order; times of CLOCK_MONOTONIC become ages in seconds. Anyone may read it."""
    now = time.monotonic() if now_monotonic is None else now_monotonic
    body: Json = plain(status)
    body["updated_age_seconds"] = round(now - body.pop("updated_monotonic"), 3)
    body["memory"]["age_seconds"] = round(now - body["memory"].pop("monotonic"), 3)
    body["workers"] = [{**entry, "diagnosis": diagnosis_json(worker.diagnosis),
                        "longest_prompt_tokens": largest_prompt_tokens(worker, AdmissionRequest(prompt_tokens=1)),
                        "log_tail": [without_secrets(line) for line in worker.log_tail]}
                       for entry, worker in zip(body["workers"], status.workers, strict=True)]
    return body


def diagnosis_json(diagnosis: Diagnosis | None) -> Json | None:
    """A diagnosis with what its cause means and where it is written what to do."""
    if diagnosis is None:
        return None
    cause = CAUSES[diagnosis.cause]
    return {**plain(diagnosis), "meaning": cause.meaning, "runbook": cause.runbook}


def ready_json(status: Status) -> Json:
    """The body of `/readyz`: what is ready and, for what is not, why and what to change."""
    return {"ready": status.ready, "reason": status.reason,
            "workers": {worker.name: _worker_ready(worker) for worker in status.workers}}


def _worker_ready(worker: WorkerStatus) -> Json:
    found = worker.diagnosis
    return {"ready": worker.ready, "phase": worker.phase.value, "step": worker.step.value if worker.step else None,
            "reason": worker.reason, "cause": found.cause if found else None, "change": found.change if found else None,
            "runbook": CAUSES[found.cause].runbook if found else None,
            "evidence": list(found.evidence) if found else [], "numbers": plain(found.numbers) if found else {},
            "generation": worker.generation}
