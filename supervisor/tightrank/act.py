"""Steps what was decided, a little in each tick, and never waits. Looks again at who a process is before any signal."""
from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from tightrank.errors import CAUSES
from tightrank.hygiene import Traces
from tightrank.readers.process import Process, ProcessTable, read_process
from tightrank.records import Diagnosis, ProcessId

END_SECONDS = 10.0           # from the first SIGKILL until nothing may be left
EVIDENCE_SECONDS = 0.5       # an engine that printed its reason gets this long to print the rest


def send(process: ProcessId, number: int) -> bool:
    """Sends a signal through a pidfd after a start-time check; False when it is gone or could not be signalled."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        found = read_process(process.pid)
        if found is None or found.id != process:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def port_free(host: str, port: int) -> bool:
    """Whether the engine could listen there again."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


@dataclass(slots=True)
class Ending:
    """Ends one generation: SIGTERM to the engine's main process only (a signal to the group breaks its drain), after
    `patience_seconds` SIGKILL to every process of the tree, then wait until no process, no port and no trace is left."""
    main: ProcessId
    listens: tuple[tuple[str, int], ...]     # (host, port)
    began_monotonic: float
    patience_seconds: float
    ask: bool                            # SIGTERM first; otherwise the tree is killed after the patience
    traces: Traces
    killed_monotonic: float | None = None
    forced: bool = False                 # the drain did not end in time
    _asked: bool = False
    _left: list[Process] = field(default_factory=list)

    def hurry(self) -> None:
        """Now: no more patience."""
        self.patience_seconds = 0.0
        self.traces.hurry()

    @property
    def drains(self) -> bool:
        """Whether the engine may still end what it has."""
        return self.ask and self.killed_monotonic is None

    def step(self, now: float, table: ProcessTable, known: Sequence[ProcessId]) -> bool:
        """True when nothing is left."""
        self._left = [process for process in table.tree(self.main, known) if process.state not in "ZX"]
        if self.ask and not self._asked:
            self._asked = True
            send(self.main, signal.SIGTERM)
        if self.killed_monotonic is None and (self._main_gone() or now - self.began_monotonic >= self.patience_seconds):
            self.forced = self.ask and not self._main_gone()
            self.killed_monotonic = now
        if self.killed_monotonic is not None:
            for process in self._left:
                send(process.id, signal.SIGKILL)
            return not self._left and not self._held() and self.traces.step(now)
        return False

    def _held(self) -> list[tuple[str, int]]:
        return [(host, port) for host, port in self.listens if not port_free(host, port)]

    def _main_gone(self) -> bool:
        return all(process.id != self.main for process in self._left)

    def trouble(self, now: float) -> Diagnosis | None:
        """What is still there although it was killed END_SECONDS ago, or not as before when its time is over."""
        if self.killed_monotonic is None or now - self.killed_monotonic < END_SECONDS:
            return None
        if self._left:
            names = ", ".join(f"{process.name} (pid {process.id.pid}, state {process.state})" for process in self._left[:5])
            return _diagnosis("process-unkillable", f"still there {END_SECONDS:.0f} s after SIGKILL: {names}",
                              "a process in state D waits in the kernel (a driver, a disk); the host may need a reboot")
        held = self._held()
        if not held:
            return self.traces.trouble(now)
        host, port = held[0]
        return _diagnosis("port-not-released", f"port {port} on {host} is held by a process that is not ours",
                          f"find it (ss -ltnp 'sport = :{port}') and end it")


def _diagnosis(cause: str, summary: str, change: str) -> Diagnosis:
    return Diagnosis(cause, summary, (), change, CAUSES[cause].restart_helps)
