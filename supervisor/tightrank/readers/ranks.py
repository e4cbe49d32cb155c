"""What the adapter left in a generation's run directory: hellos, beats and, through the socket, records."""
from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tightrank.adapter import pages, wire
from tightrank.records import ProcessId, RankReading

if TYPE_CHECKING:
    from tightrank_adapter import pages as pages_types
    from tightrank_adapter import wire as wire_types

_CREDENTIALS = struct.Struct("3i")             # struct ucred: pid, uid, gid
_RECEIVE_BYTES = 1 << 20
_MOST_RECORDS_A_PASS = 1000                    # so that a flood cannot hold the tick


@dataclass(slots=True)
class _Known:
    hello: wire_types.Hello
    stamp: tuple[int, int]
    beat: pages_types.BeatReader | None = None


@dataclass(slots=True)
class RankReader:
    """Reads one run directory. `alive` answers whether a process is still there; `available` the bytes a rank may take."""
    directory: Path
    worker: str
    generation: int
    _known: dict[str, _Known] = field(default_factory=dict)

    def read(self, alive: Callable[[ProcessId], bool],
             available: Callable[[str | None], tuple[int | None, str]]) -> tuple[list[RankReading], list[str]]:
        """(ranks, problems). A hello of another generation, schema or worker is a problem, not a rank."""
        problems = self._take_hellos()
        now = time.monotonic_ns()
        return [self._rank(known, alive, available, now) for known in self._known.values()], problems

    def _take_hellos(self) -> list[str]:
        problems = []
        try:
            names = sorted(name for name in os.listdir(self.directory) if name.startswith("hello-") and
                           name.endswith(".json"))
        except OSError as error:
            return [f"run directory {self.directory}: {error.strerror}"]
        for name in names:
            try:
                stat = os.stat(self.directory / name)
                stamp = (stat.st_mtime_ns, stat.st_ino)
                if name not in self._known or self._known[name].stamp != stamp:
                    self._take(name, stamp)
            except (OSError, wire.WireError) as error:
                problems.append(f"{name}: {error}")
        return problems

    def _take(self, name: str, stamp: tuple[int, int]) -> None:
        hello = wire.read_json(str(self.directory / name), wire.Hello)
        if (hello.worker, hello.generation) != (self.worker, self.generation):
            raise wire.WireError(f"is of {hello.worker} generation {hello.generation}, "
                                 f"wanted {self.worker} generation {self.generation}")
        previous = self._known.get(name)
        self._known[name] = _Known(hello, stamp, previous.beat if previous else None)

    def _rank(self, known: _Known, alive: Callable[[ProcessId], bool],
              available: Callable[[str | None], tuple[int | None, str]], now_ns: int) -> RankReading:
        hello, beat = known.hello, self._beat(known)
        room, why = available(hello.device)
        identity = ProcessId(hello.pid, hello.start_time)
        return RankReading(
            identity, hello.role, hello.rank, hello.tp_rank, hello.pp_rank, hello.dp_rank, hello.device,
            hello.engine_version, alive(identity), hello.hooks, hello.facts, room, why,
            (now_ns - beat.monotonic_ns) / 1e9 if beat else None,
            beat.loops if beat else 0, beat.steps if beat else 0, beat.prefill_tokens if beat else 0,
            beat.in_flight if beat else 0, beat.step_cost if beat else 0)

    def _beat(self, known: _Known) -> wire_types.Beat | None:
        try:
            if known.beat is None:
                known.beat = pages.BeatReader(str(self.directory), known.hello.pid)
            return known.beat.read()
        except (OSError, ValueError, wire.WireError):
            return None

    def close(self) -> None:
        for known in self._known.values():
            if known.beat is not None:
                known.beat.close()
        self._known.clear()


class RecordSocket:
    """The receiving end of a generation's records. A record counts only from a process of our own user and of the tree."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.socket.bind(wire.socket_address(str(directory), descriptor))
        finally:
            os.close(descriptor)
        os.chmod(directory / wire.RECORDS, 0o600)
        self.refused = 0

    def receive(self, generation: int, known_pids: set[int]) -> list[wire_types.Step | wire_types.Fault]:
        """The records that wait, oldest first; those of strangers or other generations are counted in `refused`."""
        records = []
        for _ in range(_MOST_RECORDS_A_PASS):
            try:
                datagram, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            sender = _credentials(ancillary)
            try:
                record = wire.decode(datagram)
            except wire.WireError:
                self.refused += 1
                continue
            if sender and sender[1] == os.geteuid() and sender[0] == record.pid and \
                    record.generation == generation and record.pid in known_pids:
                records.append(record)
            else:
                self.refused += 1
        return records

    def close(self) -> None:
        self.socket.close()


def _credentials(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int, int] | None:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            pid, uid, gid = _CREDENTIALS.unpack(data[:_CREDENTIALS.size])
            return pid, uid, gid
    return None
