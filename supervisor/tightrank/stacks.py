"""The stacks of a worker that hangs, before it is ended: asked for in one tick, looked for in the next ones, never waited for.

Each process writes its own (tightrank_adapter/stacks.py) on a signal. py-spy, where it is installed, looks at those that
could not: it reads a stopped process too. It is another user of the processor and of ptrace, so only for them.
"""
from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tightrank import act
from tightrank.adapter import wire
from tightrank.records import ProcessId, RankReading

WANTED = ("engine-hung", "start-stalled", "canary-failed")     # causes in which an engine stands somewhere
OWN_SECONDS = 1.5            # an idle server of SGLang writes within a tick; a host that swaps takes longer
ALL_SECONDS = 6.0            # py-spy too, which reads the symbols of large libraries first
MOST_SPIES = 8


@dataclass(slots=True)
class Dump:
    """The stacks of `ranks`, into `directory` as stacks-<pid> and pyspy-<pid>. `notes`: who gave none, and why."""
    directory: Path
    ranks: Sequence[RankReading]
    began_monotonic: float
    notes: list[str] = field(default_factory=list)
    _waiting: dict[ProcessId, tuple[int, int]] = field(default_factory=dict)     # bytes of its file: at first, at the last look
    _silent: dict[ProcessId, str] = field(default_factory=dict)      # who wrote nothing, and why
    _spies: dict[ProcessId, subprocess.Popen[bytes]] | None = None   # None: not yet looked for

    def __post_init__(self) -> None:
        for rank in self.ranks:
            why, size = _unable(rank), self._size(rank.id)
            if not why and not act.send(rank.id, wire.STACK_SIGNAL):
                why = "is gone"
            if why:
                self._silent[rank.id] = why
            else:
                self._waiting[rank.id] = (size, size)

    def step(self, now: float) -> bool:
        """True when there is nothing more to come; then `notes` are whole."""
        self._look()
        if self._waiting and now - self.began_monotonic < OWN_SECONDS:
            return False
        if self._spies is None:
            self._silent |= dict.fromkeys(self._waiting, "wrote nothing in time")
            self._waiting.clear()
            self._spies = self._spy()
        late = now - self.began_monotonic >= ALL_SECONDS
        if not late and any(spy.poll() is None for spy in self._spies.values()):
            return False
        self._end()
        return True

    def close(self) -> None:
        """The worker is gone before all was there."""
        for spy in (self._spies or {}).values():
            if spy.poll() is None:
                spy.kill()

    @property
    def sentence(self) -> str:
        gave = len(self.ranks) - len(self.notes)
        return f"stacks of {gave} of {len(self.ranks)} processes" + "".join(f"; {note}" for note in self.notes)

    def _look(self) -> None:
        """A file that has grown and does not any more is whole."""
        for process, (first, before) in list(self._waiting.items()):
            size = self._size(process)
            if size > first and size == before:
                del self._waiting[process]
            else:
                self._waiting[process] = (first, size)

    def _size(self, process: ProcessId) -> int:
        try:
            return os.stat(wire.stacks_path(str(self.directory), process.pid)).st_size
        except OSError:
            return 0

    def _spy(self) -> dict[ProcessId, subprocess.Popen[bytes]]:
        program, found = shutil.which("py-spy"), {}
        for process in list(self._silent)[:MOST_SPIES] if program else ():
            try:
                with open(self.directory / f"pyspy-{process.pid}", "xb", opener=_private) as file:
                    # --nonblocking: it does not stop the process, so a stopped one stays as it is and nobody waits for it
                    found[process] = subprocess.Popen([str(program), "dump", "--nonblocking", "--pid", str(process.pid)],
                                                      stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            except OSError as error:
                self._silent[process] += f", and py-spy cannot look ({error.strerror})"
        return found

    def _end(self) -> None:
        for process, spy in (self._spies or {}).items():
            if spy.poll() is None:
                spy.kill()                 # and not waited for: subprocess reaps it when the next process is started
                self._silent[process] += ", and py-spy took too long"
            elif spy.returncode == 0:
                self._silent.pop(process)
            else:
                self._silent[process] += f", and py-spy ended with {spy.returncode}"
        names = {rank.id: rank for rank in self.ranks}
        self.notes += [f"{names[process].role} (pid {process.pid}) {why}" for process, why in self._silent.items()]


def _unable(rank: RankReading) -> str:
    """Why a process will not answer the signal, "" when it may. Without a handler the signal would end it."""
    if rank.state == "T":
        return "is stopped (state T) and cannot write its stacks"
    try:
        status = Path(f"/proc/{rank.id.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)      # a mask: signal 1 is its lowest bit
    except (OSError, ValueError, IndexError):
        return "is gone"
    return "" if caught >> (wire.STACK_SIGNAL - 1) & 1 else "has no handler for it"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
