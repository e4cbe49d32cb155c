"""What a generation leaves behind when its processes are gone, and its end: nothing of it may be in the next one's way.

Each generation gets a temporary directory of its own (TMPDIR) and a file beside its run directory which says what is its
own: that directory, the shared memory that its processes were seen to hold, their pids. The file is there before the
engine is, and goes when all of that is gone: one that is found when a supervisor starts is of a generation that ended with
its supervisor. Removing twice does no harm.
"""
from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightrank.adapter import memory, wire
from tightrank.errors import CAUSES
from tightrank.hygiene import shared
from tightrank.hygiene.devices import Devices
from tightrank.readers.nvidia import NvidiaReader
from tightrank.records import Diagnosis, WorkerSpec

SUFFIX = ".traces.json"      # <state>/run/<worker>-<generation>.traces.json
LOOK_SECONDS = 1.0           # between two looks at the maps of the tree: 3 ms for each process of an engine
SOCKET_PATH_BYTES = 107      # the longest name of a Unix socket
_NAME_BYTES = 45             # what engines append to TMPDIR for one: "/" and a UUID, or pymp-xxxxxxxx/listener-xxxxxxxx
_HOST_TOLERANCE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rules:
    """Of the configuration's section `hygiene`."""
    limit_seconds: float = 30.0
    tolerance_bytes: int = 512 << 20
    drop_weights: bool = False
    reader: NvidiaReader = field(default_factory=NvidiaReader)


@dataclass(slots=True)
class _Record:
    """The file."""
    temporary: str                           # "": it has none of its own
    since_ns: int
    segments: dict[str, int] = field(default_factory=dict)      # name in /dev/shm -> inode
    pids: set[int] = field(default_factory=set)

    def remove(self, run: Path, pause: shared.Pause) -> tuple[str, list[str]]:
        """(what went, in words, or ""; names of what is still held). `run`: the generation's run directory, where each of its
        processes has left its pid: also one that came and went between two looks."""
        others = [path for path in run.parent.glob(f"*{SUFFIX}") if path.name != run.name + SUFFIX]
        gone, kept = shared.remove(self.segments, self.since_ns, pause, not others)
        sysv = shared.remove_sysv(self.pids | _said_hello(run), self.since_ns)
        files = _remove_tree(self.temporary) if self.temporary else 0
        parts = [f"{len(gone)} of shared memory ({sum(gone.values()) >> 20} MiB: {', '.join(list(gone)[:5])})" if gone else "",
                 f"{sysv} System V segments" if sysv else "", f"{files} temporary files" if files else ""]
        return ", ".join(part for part in parts if part), kept


class Traces:
    """One generation's traces, from before its start to after its end. `say` takes sentences for the journal.

    Called from the daemon's main thread. The removal has a thread: it waits, and a large segment takes the kernel seconds.
    """

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str], rules: Rules, say: Callable[[str], None]) -> None:
        self._rules, self._model, self._say = rules, spec.model, say
        self._path = Path(spec.run_directory + SUFFIX)
        self._record = _Record(_own_temporary(spec, environment), time.time_ns())
        self._devices = Devices(rules.reader, rules.tolerance_bytes)
        self._used: set[str] = set()
        self._available = _available()
        self._looked = float("-inf")
        self._stamp = -1
        self._began: float | None = None     # the end: when the tree was found gone
        self._removal = threading.Thread(target=self._remove, name="hygiene", daemon=True)
        self._hurry = threading.Event()
        self._sentences: list[str] = []
        self._missing = ""

    def open(self, spec: WorkerSpec, environment: Mapping[str, str]) -> WorkerSpec:
        """`spec` with the temporary directory, as it is to be started. Raises OSError."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write()
        if not self._record.temporary or not self._made():
            return spec
        ours = {"TMPDIR": self._record.temporary}
        return replace(spec, env={**spec.env, **_inherited({**environment, **spec.env}), **ours})

    def _made(self) -> bool:
        try:
            os.mkdir(self._record.temporary, 0o700)
            return True
        except OSError as error:             # the engine has the one it would have had
            self._say(f"{self._record.temporary}: cannot be made ({error.strerror}): what the engine leaves in TMPDIR stays")
            self._record.temporary = ""
            self._write()
            return False

    def look(self, pids: Collection[int], devices: Collection[str], now: float) -> None:
        """Notes what the tree holds, where that may have changed since the last look."""
        self._used |= set(devices)
        stamp = shared.changed()
        if now - self._looked < LOOK_SECONDS or (stamp == self._stamp and self._record.pids >= set(pids)):
            return
        self._stamp, self._looked = stamp, now
        self.note(pids)

    def note(self, pids: Collection[int]) -> None:
        """The same without the question whether: before the tree is ended."""
        segments, known = self._record.segments | shared.mapped(pids), self._record.pids | set(pids)
        if segments != self._record.segments or known != self._record.pids:
            self._record.segments, self._record.pids = segments, known
            with contextlib.suppress(OSError):     # a full disk: we know it all the same
                self._write()

    def step(self, now: float) -> bool:
        """When the tree is gone: removes what is left. True when all is as it was before the start."""
        if self._began is None:
            self._began = now
            self._removal.start()
        if self._removal.is_alive() and now - self._began < self._rules.limit_seconds:
            return False
        for sentence in self._sentences:
            self._say(sentence)
        self._sentences = []
        self._missing = self._devices.missing(self._used, self._record.pids)
        return not self._missing or self._hurry.is_set()

    def trouble(self, now: float) -> Diagnosis | None:
        """What is not as before although the tree is gone for the limit."""
        if self._began is None or not self._missing or now - self._began < self._rules.limit_seconds:
            return None
        cause = CAUSES["device-memory-not-released"]
        return Diagnosis(cause.id, f"{self._rules.limit_seconds:.0f} s after its tree was ended, {self._missing}", (),
                         "see who holds it (nvidia-smi); hygiene.tolerance is what may be missing, hygiene.limit the time",
                         cause.restart_helps)

    def hurry(self) -> None:
        """No more waiting: what may still be of use to somebody is left to the next supervisor."""
        self._hurry.set()

    def abandon(self) -> None:
        """No engine was started."""
        self._removal.start()

    def _remove(self) -> None:
        gone, kept = self._record.remove(Path(str(self._path).removesuffix(SUFFIX)), self._hurry.wait)
        self._sentences += _words("it", gone, kept)
        available = _available()
        less = self._available - available if available >= 0 else 0
        if less > _HOST_TOLERANCE_BYTES:
            self._sentences.append(f"host memory: {less >> 20} MiB less are available than before the start")
        if self._rules.drop_weights:
            _forget_pages(self._model)
        if not self._hurry.is_set():
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        record = self._record
        wire.write_json(str(self._path), {"temporary": record.temporary, "since_ns": record.since_ns,
                                          "segments": record.segments, "pids": sorted(record.pids)})


def sweep(run: Path, pause: shared.Pause) -> Iterator[str]:
    """Removes what generations have left whose supervisor died with them, after their processes were ended. Sentences."""
    refused: set[bool] = set()

    def asked(seconds: float) -> bool:
        refused.add(pause(seconds))
        return True in refused

    for path in sorted(run.glob(f"*{SUFFIX}")):
        try:
            gone, kept = _read(path).remove(Path(str(path).removesuffix(SUFFIX)), asked)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            yield f"{path}: not readable ({error}): what its generation left is not known"
            gone, kept = "", []
        yield from _words(path.name.removesuffix(SUFFIX), gone, kept)
        if True not in refused:              # no time: the next supervisor goes on
            path.unlink(missing_ok=True)


def _said_hello(run: Path) -> set[int]:
    names = (re.fullmatch(r"hello-(\d+)\.json", path.name) for path in run.glob("hello-*"))
    return {int(name[1]) for name in names if name}


def _words(who: str, gone: str, kept: Sequence[str]) -> list[str]:
    removed = [f"removed what {who} left: {gone}"] if gone else []
    return removed + ([f"left alone, since another process holds it: {', '.join(kept[:5])} in /dev/shm"] if kept else [])


def _read(path: Path) -> _Record:
    values: Any = json.loads(path.read_bytes())
    segments = {str(name): int(inode) for name, inode in values["segments"].items()}
    temporary = str(values["temporary"])
    if temporary and not Path(temporary).name.startswith("tightrank-"):
        raise ValueError(f"temporary={temporary!r} is none of ours")
    return _Record(temporary, int(values["since_ns"]), segments, set(map(int, values["pids"])))


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for what must not end with a generation although its usual place is TMPDIR: compiled kernels, and the file
    by which a Ray cluster of this host is found."""
    base = environment.get("TMPDIR") or "/tmp"       # noqa: S108 - the engines' own choice
    try:
        user = getpass.getuser()
    except (KeyError, OSError):                      # no name for this number
        user = str(os.getuid())
    usual = {"TORCHINDUCTOR_CACHE_DIR": f"{base}/torchinductor_{user}", "RAY_TMPDIR": base}
    return {name: path for name, path in usual.items() if name not in environment}


def _own_temporary(spec: WorkerSpec, environment: Mapping[str, str]) -> str:
    """"": its sockets would not fit under such a long TMPDIR; the engine keeps that one, and what it leaves there stays."""
    base = {**environment, **spec.env}.get("TMPDIR") or "/tmp"       # noqa: S108
    mark = spec.env.get(wire.ENV_RUN, spec.run_directory)      # of this generation of this state directory alone
    path = f"{base}/tightrank-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    return path if len(os.fsencode(path)) + _NAME_BYTES <= SOCKET_PATH_BYTES else ""


def _remove_tree(directory: str) -> int:
    """How many files there were."""
    count = sum(len(files) for _, _, files in os.walk(directory))
    shutil.rmtree(directory, ignore_errors=True)
    return count


def _available() -> int:
    """MemAvailable; -1 where it cannot be read."""
    try:
        return memory.meminfo(memory.read("/proc", "meminfo"))["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return -1


def _forget_pages(model: str) -> None:
    """Of these files alone, which needs no privilege; the kernel's drop_caches needs root and takes every process's."""
    for path in Path(model).glob("*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
