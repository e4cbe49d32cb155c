"""What an earlier run may have left: processes with our mark, engines without their server, /dev/shm segments, held ports."""
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tightrank import plan
from tightrank.check.item import Item, passed, unknown, warned
from tightrank.check.machine import SHM
from tightrank.errors import CAUSES
from tightrank.hygiene import SUFFIX
from tightrank.readers.process import Process, ProcessTable, marked
from tightrank.records import WorkerSpec

# As engines set their titles (setproctitle): vLLM 0.32.0, SGLang 0.5.23.
_RANKS = re.compile(r"VLLM::(EngineCore|Worker)|sglang::(scheduler|detokenizer)")
# multiprocessing's and NCCL's; those of vLLM's message queues are psm_ too.
_SEGMENTS = re.compile(r"psm_[0-9a-f]+|nccl-\w+|sem\.mp-\w+|torch_\w+|cuda\.shm\.\S+")
_LOOKS = 3                             # at who listens, where one of them ends meanwhile
_INITS = ("systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "s6-svscan")


@dataclass(frozen=True, slots=True)
class LeftoverFacts:
    """None: could not be looked at. `segments`: (name, bytes) of /dev/shm that nobody has open."""
    marked: tuple[int, ...] | None = None
    traces: int = 0                    # generations of ours that ended with their supervisor: what they left goes first
    orphans: tuple[Process, ...] | None = None
    segments: tuple[tuple[str, int], ...] | None = None
    holders: tuple[tuple[int, int, str], ...] | None = None       # (port, pid, name) of those that we want


def read(state: Path, specs: Sequence[WorkerSpec]) -> LeftoverFacts:
    """One look. Never raises."""
    ports = {port for spec in specs for _, port in spec.listens()}
    return LeftoverFacts(_marked(state), _traces(state), _orphans(), _segments(), _holders(ports))


def softened(facts: LeftoverFacts, item: Item) -> Item:
    """What an earlier run of ours still holds is ended and removed before the first start: it must not refuse that start."""
    ours = bool(facts.marked) or facts.traces > 0
    if item.cause is None or not ours or CAUSES[item.cause].lasts != "moment":
        return item
    return warned(item.item, item.sentence, "what an earlier run of this deployment left is ended first")


def _traces(state: Path) -> int:
    try:
        return sum(1 for _ in (state / "run").glob(f"*{SUFFIX}"))
    except OSError:
        return 0


def _marked(state: Path) -> tuple[int, ...] | None:
    try:
        return tuple(process.pid for process in marked(plan.mark(state)))
    except FileNotFoundError:
        return ()                      # no state directory, no earlier run
    except OSError:
        return None


def _orphans() -> tuple[Process, ...] | None:
    """Ranks whose server is gone: their parent is the init of this machine or container."""
    try:
        table = ProcessTable.read()
    except OSError:
        return None
    first = table.by_pid.get(1)
    if first is None or first.name not in _INITS:
        return ()
    return tuple(process for process in table.by_pid.values()
                 if process.parent_pid == 1 and _RANKS.match(process.name) and process.state not in "ZX")


def _segments() -> tuple[tuple[str, int], ...] | None:
    try:
        found = {name: os.stat(f"{SHM}/{name}").st_blocks * 512 for name in os.listdir(SHM) if _SEGMENTS.fullmatch(name)}
        open_ones = _open_segments() if found else frozenset()
    except OSError:
        return None
    return tuple(sorted((name, size) for name, size in found.items() if name not in open_ones))


def _open_segments() -> frozenset[str]:
    """Names in /dev/shm that a process has mapped or open. Raises PermissionError where we may not look at all of them, but
    for a container's own init, which often nobody may."""
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as file:
                found |= {match[1] for line in file if (match := re.search(rf"{SHM}/(\S+)", line))}
            found |= {link.removeprefix(f"{SHM}/") for name in os.listdir(f"/proc/{pid}/fd")
                      if (link := _link(f"/proc/{pid}/fd/{name}")).startswith(SHM)}
        except (FileNotFoundError, ProcessLookupError):
            continue                   # it has ended
        except PermissionError:
            if pid != "1":
                raise
    return frozenset(found)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def _holders(ports: set[int]) -> tuple[tuple[int, int, str], ...] | None:
    for _ in range(_LOOKS):
        try:
            return tuple(sorted(set(_listening(ports))))
        except psutil.NoSuchProcess:
            continue                   # one that ended meanwhile: who else has it?
        except (psutil.Error, OSError):
            return None
    return None


def _listening(ports: set[int]) -> Iterator[tuple[int, int, str]]:
    for port, pid in {(found.laddr.port, found.pid) for found in psutil.net_connections("tcp")
                      if found.status == psutil.CONN_LISTEN and found.laddr}:
        if pid is not None and port in ports:
            first = _first(psutil.Process(pid), port)
            yield port, first.pid, first.name()


def _first(holder: psutil.Process, port: int) -> psutil.Process:
    """The one whose children have it too: a worker, or between its fork and its exec a child that has nothing to do with it."""
    parent = holder.parent()
    try:
        shared = parent is not None and any(found.status == psutil.CONN_LISTEN and found.laddr.port == port
                                            for found in parent.net_connections("tcp"))
    except psutil.AccessDenied:
        shared = False
    return _first(parent, port) if parent is not None and shared else holder


def items(facts: LeftoverFacts) -> Iterator[Item]:
    yield _our_processes(facts)
    yield _engines(facts)
    yield _left_segments(facts)
    if facts.holders:
        shown = ", ".join(f"port {port} by pid {pid} ({name})" for port, pid, name in facts.holders)
        yield warned("port holders", f"held: {shown}", "end it, or give another port")


def _our_processes(facts: LeftoverFacts) -> Item:
    item = "processes of an earlier run"
    if facts.marked is None:
        return unknown(item, "/proc or the state directory cannot be looked at")
    if facts.marked:
        return warned(item, f"{len(facts.marked)} of this deployment: pid {', '.join(map(str, facts.marked))}",
                      "nothing: they are ended before the first start")
    return passed(item, "none")


def _engines(facts: LeftoverFacts) -> Item:
    item = "engines without a server"
    if facts.orphans is None:
        return unknown(item, "/proc cannot be listed")
    if facts.orphans:
        shown = ", ".join(f"pid {each.id.pid} ({each.name}, {each.rss_bytes / 2**30:.2f} GiB)" for each in facts.orphans)
        return warned(item, f"{shown}: the server that started it is gone, and its memory stays taken", "end it (kill -9)")
    return passed(item, "none")


def _left_segments(facts: LeftoverFacts) -> Item:
    item = "shared memory of an earlier run"
    if facts.segments is None:
        return unknown(item, f"{SHM} or the processes that use it cannot be looked at")
    taken = sum(size for _, size in facts.segments)
    shown = f"{len(facts.segments)} segments that nobody here has open, {taken / 2**20:.0f} MiB"
    if taken:                          # an empty one takes nothing
        return warned(item, f"{SHM} has {shown} ({facts.segments[0][0]})",
                      "remove them where no other container shares it")
    return passed(item, "none")
