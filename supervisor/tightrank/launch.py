"""Starts one generation of a worker: its run directory, its environment, its processes' session. No policy."""
from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tightrank.adapter import INJECT, pages, wire
from tightrank.errors import CAUSES
from tightrank.logs import Pipe
from tightrank.readers.process import read_process
from tightrank.readers.ranks import RecordSocket
from tightrank.records import Diagnosis, ProcessId, WorkerSpec

OOM_SCORE_ADJ = 500          # the kernel's OOM killer takes an engine before the daemon, the guard or sshd
_CAUSES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("disk-full", "`df -h` and `df -i`: the disk of the state directory")),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), ("open-files-limit", "a higher limit: `ulimit -n 65536`, LimitNOFILE= of the "
                                                   "unit, docker --ulimit nofile=65536:65536")),
    errno.EAGAIN: ("process-limit", "a higher limit: `ulimit -u`, TasksMax= of the unit, docker --pids-limit")}
_EXEC = Path(__file__).with_name("exec_engine.py")


@dataclass(frozen=True, slots=True)
class Launched:
    """A started engine. `control` is None for engines that get a new budget by request."""
    main: ProcessId
    process: subprocess.Popen[bytes]
    descriptor: int                    # pidfd of the main process
    pipes: tuple[Pipe, ...]
    records: RecordSocket
    control: pages.ControlWriter | None


def engine_environment(spec: WorkerSpec, ours: Mapping[str, str]) -> dict[str, str]:
    """The engine's whole environment: `ours` less TIGHTRANK_* (no token of ours reaches remote code), then the spec's,
    with the adapter in front of PYTHONPATH."""
    environment = {key: value for key, value in ours.items() if not key.startswith("TIGHTRANK_")} | dict(spec.env)
    path = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(INJECT), path) if part)
    return environment


def prepare(spec: WorkerSpec) -> tuple[RecordSocket, pages.ControlWriter | None]:
    """Makes the generation's run directory (0700) and what the adapter looks for in it. Raises OSError."""
    directory = Path(spec.run_directory)
    shutil.rmtree(directory, ignore_errors=True)       # a generation number is used once: only a torn start leaves one
    directory.mkdir(mode=0o700, parents=True)
    hooks = {hook: dict(values) for hook, values in spec.hooks.items()}
    wire.write_settings(str(directory), wire.Settings(spec.name, spec.generation, spec.engine, hooks))
    control = None
    if spec.line:
        control = pages.ControlWriter(str(directory))
        control.publish(spec.line.budget)
    return RecordSocket(directory), control


def spawn(spec: WorkerSpec, environment: Mapping[str, str]) -> Launched:
    """Starts the engine. Must be called from the daemon's main thread (see exec_engine.py). Raises OSError."""
    records, control = prepare(spec)
    argv = [sys.executable, "-I", "-S", "-B", str(_EXEC), str(os.getpid()), str(OOM_SCORE_ADJ), "--", *spec.argv]
    process = None
    try:
        process = subprocess.Popen(argv, env=engine_environment(spec, environment), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        descriptor = os.pidfd_open(process.pid)
        found = read_process(process.pid)              # our child: it stays, if only as a zombie, until we wait
        if found is None:
            raise OSError(f"/proc/{process.pid}/stat cannot be read")
        return Launched(found.id, process, descriptor, _pipes(process), records, control)
    except (OSError, ValueError) as error:             # ValueError: a null byte in the command line or environment
        records.close()
        if process is not None:                        # nobody else would know of it
            process.kill()
            process.wait()
        raise error if isinstance(error, OSError) else OSError(str(error)) from None


def _pipes(process: subprocess.Popen[bytes]) -> tuple[Pipe, Pipe]:
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        return Pipe(os.dup(process.stdout.fileno()), "stdout"), Pipe(os.dup(process.stderr.fileno()), "stderr")


def forget_older(run_directory: Path, worker: str, generation: int, keep: int = 2) -> None:
    """Removes run directories of `worker` that are more than `keep` generations old."""
    for path in run_directory.glob(f"{worker}-*"):
        number = path.name.removeprefix(f"{worker}-")
        if number.isdigit() and int(number) < generation - keep:
            shutil.rmtree(path, ignore_errors=True)


def failed(error: OSError) -> Diagnosis:
    """Why `spawn` raised it."""
    cause, change = _CAUSES.get(error.errno or 0, ("spawn-failed", "look at the path, and at the limits of this user"))
    return Diagnosis(cause, f"the engine could not be started: {error}", (), change, CAUSES[cause].restart_helps)
