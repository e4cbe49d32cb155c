"""What the failures of a worker forbid, kept on disk: whoever restarts the supervisor must not restart what cannot succeed.

One entry for each worker in `breaker.json`, under a key that stands for all that decides a start: configuration, engine,
model, adapter, host. Another key, another start: nothing of the entry counts. What stays failed:

- a cause of the configuration, until the key changes or a person asks; one of the host's boot, until the next boot too;
- what was given up after too many failures in a row, for an hour of this boot. Then it gets one start, not a new series:
  an outage that is over must not need a person, and one that is not must not be a loop.

The failures in a row count on, so that the pause before a start grows over restarts of the supervisor as well. Counts
and the boot's own clock are stored, no dates: a clock that jumps changes nothing. What is torn or of another form is said
and counts as nothing; a disk that takes no more is said, and memory goes on.
"""
from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tightrank import __version__
from tightrank.adapter import INJECT, wire
from tightrank.errors import CAUSES
from tightrank.host import HostFacts
from tightrank.records import Diagnosis, WorkerSpec

GIVEN_UP_SECONDS = 3600.0
_MEMORY_STEP = 26            # MemTotal differs by some KiB from boot to boot: in steps of 64 MiB it does not
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Variables that engines read. The others differ from one start to the next (HOSTNAME, INVOCATION_ID, a service's address).
_READ = re.compile(r"(VLLM|SGLANG|SGL|ATOM|AITER|CUDA|NVIDIA|NCCL|RCCL|HIP|ROCR|HSA|AMD|TORCH|PYTORCH|TRITON|OMP|MKL|MALLOC|HF|"
                   r"TRANSFORMERS|UCX|NIXL|MC|MOONCAKE|GLOO|PYTHON|LD|SPT)[A-Z0-9]*_.+|PATH|PYTHONPATH")


@dataclass(frozen=True, slots=True)
class Standing:
    """`failures` in a row so far. `diagnosis`: it stays failed with this; None: it may start."""
    failures: int = 0
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    failures: int
    diagnosis: Diagnosis | None
    boot: str
    uptime_seconds: float

    def stands(self) -> bool:
        """Whether the diagnosis still forbids a start."""
        if self.diagnosis is None:
            return False
        this_boot = self.boot == _boot()
        if self.diagnosis.restart_helps:          # given up
            return this_boot and _uptime() - self.uptime_seconds < GIVEN_UP_SECONDS
        lasts = CAUSES[self.diagnosis.cause].lasts
        return lasts == "configuration" or (lasts == "boot" and this_boot)


class Breaker:
    """The entries of one state directory. `facts` are those of the host and the engine, `environment` the supervisor's own;
    `say` takes a sentence for the journal."""

    def __init__(self, path: Path, facts: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._path, self._facts, self._say = path, facts, say
        self._environment = {name: text for name, text in environment.items() if _READ.fullmatch(name)}
        self._entries = self._read()

    def key(self, spec: WorkerSpec) -> str:
        """Stands for all that decides how `spec` starts. One way: no secret can be read from it."""
        decides = [spec.engine, spec.role, spec.argv, sorted({**self._environment, **spec.env}.items()), spec.host, spec.port,
                   sorted((hook, sorted(values.items())) for hook, values in spec.hooks.items()), self._facts,
                   _named(spec.argv), listing(Path(spec.model), "*"), listing(INJECT, "**/*.py"), __version__]
        return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()

    def standing(self, worker: str, key: str) -> Standing:
        """What counts of the past for a start under `key`."""
        entry = self._entries.get(worker)
        if entry is None or entry.key != key:
            return Standing()
        return Standing(entry.failures, entry.diagnosis if entry.stands() else None)

    def keep(self, worker: str, key: str, failures: int, diagnosis: Diagnosis | None = None) -> None:
        """`diagnosis`: it failed for good with this."""
        self._entries[worker] = _Entry(key, failures, diagnosis, _boot(), _uptime())
        self._write()

    def forget(self, worker: str) -> None:
        """It served well, or a person asked for a start."""
        if self._entries.pop(worker, None) is not None:
            self._write()

    def _write(self) -> None:
        try:
            wire.write_json(str(self._path), {worker: asdict(entry) for worker, entry in self._entries.items()})
        except OSError as error:
            self._say(f"{self._path}: not written ({error.strerror}): the next supervisor will not know of the last failure")

    def _read(self) -> dict[str, _Entry]:
        try:
            stored = json.loads(self._path.read_bytes())
            return {str(worker): _entry(values) for worker, values in stored.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            self._say(f"{self._path}: not readable ({type(error).__name__}: {error}): earlier failures count for nothing")
            return {}


def facts(host: HostFacts, release: str | None) -> tuple[str, ...]:
    """Of the host and the installed engine."""
    sizes = [None if size is None else size >> _MEMORY_STEP for size in (host.mem_total_bytes, host.cgroup_limit_bytes)]
    return (*map(str, sizes), *host.devices, f"release {release}")


def _named(argv: Sequence[str]) -> list[tuple[str, int, int]]:
    """The files that the command line names: a chat template that was mended is another one."""
    return [found for word in argv if word.startswith("/") for found in _files(Path(word).parent, Path(word).name)]


def listing(directory: Path, pattern: str) -> list[tuple[str, int, int]]:
    """(path, bytes, time of the last change) of the files there: a model that was fetched again is another model."""
    try:
        return sorted(_files(directory, pattern))
    except OSError as error:                     # a share that is gone: another key, and no fault of a tick
        return [(str(directory), -1, error.errno or 0)]


def _files(directory: Path, pattern: str) -> Iterable[tuple[str, int, int]]:
    for path in directory.glob(pattern):
        try:
            found = path.stat()
        except OSError:                           # a dangling link
            continue
        if not S_ISREG(found.st_mode):
            continue
        yield str(path), found.st_size, found.st_mtime_ns


def _entry(values: Mapping[str, Any]) -> _Entry:
    """Raises an error of values, types or names for what `asdict` of an entry does not give."""
    failures, uptime = values["failures"], values["uptime_seconds"]
    if type(failures) is not int or failures < 0 or type(uptime) is not float:
        raise ValueError("failures or uptime_seconds is no such number")
    found = values["diagnosis"]
    return _Entry(str(values["key"]), failures, None if found is None else _diagnosis(found), str(values["boot"]), uptime)


def _diagnosis(found: Mapping[str, Any]) -> Diagnosis:
    cause = CAUSES[found["cause"]]
    numbers = {str(name): float(number) for name, number in found["numbers"].items()}
    return Diagnosis(cause.id, str(found["summary"]), tuple(map(str, found["evidence"])), str(found["change"]),
                     cause.restart_helps, numbers, str(found["confidence"]))


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
