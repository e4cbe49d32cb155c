"""One generation of a worker: the running engine, what it prints, records and answers. It decides nothing."""
from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightrank import diagnose, engines, launch, plan
from tightrank.adapter import wire
from tightrank.clues import Clues
from tightrank.config.flags import MASK
from tightrank.diagnose import headroom
from tightrank.hang import Turns
from tightrank.hygiene import Rules, Traces
from tightrank.logs import RING_LINES
from tightrank.prefills import Prefills
from tightrank.readers.engine_http import Prober
from tightrank.readers.ranks import RankReader
from tightrank.records import (
    Diagnosis,
    Line,
    ProbeResult,
    ProcessId,
    RankReading,
    StartStep,
    WorkerReading,
    WorkerSpec,
)
from tightrank.steering import Say, Steering
from tightrank.watch import Watched

if TYPE_CHECKING:
    from tightrank_adapter import wire as wire_types
    from tightrank_adapter.headroom import Terms

_PROGRESS_BYTES = 16 << 20         # a tree that grew by this much is loading
_STEPS = list(StartStep)
# What engines print again and again while nothing moves: no sign of progress.
_WAITS = re.compile(r"No available shared memory broadcast block|[Ww]aiting for ")
_COMPUTING = ("worker", "runner", "scheduler", "engine-core")
TAIL_LINES = 40


class Generation:
    """Starts the engine of `spec` (with its generation filled in). Raises OSError when that fails.

    `say(kind, sentence, data)` receives events. All methods are called from the daemon's main thread and never wait.
    """

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str], guard_stops: int, say: Say, now: float,
                 rules: Rules | None = None) -> None:
        self.traces = Traces(spec, environment, rules or Rules(), lambda sentence: say("hygiene", sentence, {}))
        self.spec = spec = self.traces.open(spec, environment)
        try:
            self.launched = launch.spawn(spec, environment)
        except OSError:
            self.traces.abandon()
            raise
        self.ranks = RankReader(Path(spec.run_directory), spec.name, spec.generation)
        self.guard_stops = guard_stops
        self.started = self.progress = now
        self.step = StartStep.LOADING
        self.lines: deque[Line] = deque(maxlen=RING_LINES)
        self.headroom: Mapping[str, object] | None = None    # what its ranks told, as in WorkerStatus
        self._proof: Diagnosis | None = None
        self._terms: list[Terms] = []
        self.fault_since: float | None = None
        self.known: set[ProcessId] = {self.launched.main}
        self.result: ProbeResult | None = None
        self.healthy_since: float | None = None
        self.exit_status: int | None = None
        self.lost_role: str | None = None  # of the first process that said hello and is gone
        self.prefills = Prefills(spec, engines.get(spec.engine).whole_steps, now)
        self.steering = Steering(spec, self.launched.control, say, now)
        self.turns = Turns()
        self.reading: WorkerReading | None = None            # the last one
        self.clues = Clues(self.launched.main.pid)
        self._on_device: set[int] = set()  # pids of ranks that compute on one
        self._probe: Future[ProbeResult] | None = None
        self._seen = (0, 0, 0)             # processes, ranks, RSS: what counts as progress
        self._hellos: dict[ProcessId, int] = {}      # pidfd of each process that said hello; -1 once it has ended
        self._faults: set[tuple[int, str, str]] = set()
        self._problems: set[str] = set()
        self._secrets = plan.secrets(spec)
        self._say = say

    # --- what the engine says -----------------------------------------------------------------------------------------

    def read_pipes(self, starting: bool) -> list[Line]:
        """The lines that have come since the last call. While starting, one of them may prove a failure."""
        found = [self._without_secrets(line) for pipe in self.launched.pipes if pipe.open for line in pipe.read()]
        for line in found:
            self.lines.append(line)
            if not _WAITS.search(line.text):
                self.progress = line.monotonic
            if starting:
                self._learn(line)
        return found

    def _without_secrets(self, line: Line) -> Line:
        """Engines print their arguments, keys too, and the last lines are open to whoever may read /status."""
        for secret in self._secrets:
            if secret in line.text:
                line = replace(line, text=line.text.replace(secret, MASK))
        return line

    def _learn(self, line: Line) -> None:
        step = engines.get(self.spec.engine).start_step(line.text)
        if step is not None and _STEPS.index(step) > _STEPS.index(self.step):
            self.step = step
            self._say("phase", f"starting: {step.value}", {})
        if self._proof is None:
            self._proof = diagnose.deciding_line(self.spec.engine, line)

    def receive(self) -> list[wire_types.Step]:
        """The prefill steps recorded since the last call; faults are kept."""
        records = self.launched.records.receive(self.spec.generation, {item.pid for item in self.known})
        steps = [record for record in records if isinstance(record, wire.Step)]
        for record in records:
            if isinstance(record, wire.Fault):
                self._take_fault(record.pid, record.hook, record.where, record.error)
        for step in steps:
            self.turns.learn(step.milliseconds / 1000, wire.step_cost(step.rows, step.width))
        self.prefills.learn(steps, self._on_device)
        return steps

    def _take_fault(self, pid: int, hook: str, where: str, error: str) -> None:
        """A fault comes twice, by datagram and by hello, and is told once for each process and place."""
        if self.fault_since is None:
            self.fault_since = time.monotonic()
        if (pid, hook, where) not in self._faults:
            self._faults.add((pid, hook, where))
            self._say("cause", f"adapter-fault: hook {hook} raised in {where} (pid {pid}): {error}", {"cause": "adapter-fault"})

    def hear_kernel(self, lines: Sequence[Line]) -> None:
        """Keeps those that are of this engine."""
        self.lines.extend(self.clues.ours(lines))

    @property
    def engine_version(self) -> str | None:
        """As its ranks say it."""
        ranks = (*self.reading.ranks, *self.reading.dead_ranks) if self.reading else ()
        return next((rank.engine_version for rank in ranks if rank.engine_version), None)

    def tail(self) -> tuple[str, ...]:
        return tuple(line.text for line in list(self.lines)[-TAIL_LINES:])

    # --- what is seen of it -------------------------------------------------------------------------------------------

    def observe(self, reading: WorkerReading, oom_kills: int | None, now: float) -> None:
        """Takes in one pass of `watch`: the exit, new ranks, progress; `oom_kills`: the kernel's, so far."""
        self.exit_status = self.launched.process.poll()
        self.reading = reading
        self.turns.observe(reading, now)
        for rank in (*reading.ranks, *reading.dead_ranks):
            self._meet(rank)
        if self.lost_role is None and reading.dead_ranks:
            self.lost_role = min((rank.role for rank in reading.dead_ranks), key=_by_weight)
        self.known = {self.launched.main, *self._hellos, *(process.id for process in reading.processes)}
        self.clues.observe(reading, (process.pid for process in self.known), oom_kills, now)
        self._on_device |= {rank.id.pid for rank in reading.ranks if rank.device is not None}
        self.traces.look([process.id.pid for process in reading.processes if process.state != "D"],
                         [rank.device for rank in reading.ranks if rank.device is not None], now)
        if "headroom" in self.spec.hooks:
            self._size(reading)
        for problem in set(reading.problems) - self._problems:
            self._problems.add(problem)
            self._say("hello", problem, {})
        seen = (len(reading.processes), len(reading.ranks), sum(process.rss_bytes for process in reading.processes))
        if seen[:2] != self._seen[:2] or seen[2] > self._seen[2] + _PROGRESS_BYTES:
            self.progress, self._seen = now, seen
        if self.hurt:
            self.clues.hurt(now)

    def note_traces(self) -> None:
        """Of all but those in state D: to read their maps may wait for a lock that they hold in a driver."""
        stuck = {process.id for process in self.reading.processes if process.state == "D"} if self.reading else set()
        self.traces.note([process.pid for process in self.known - stuck])

    def _size(self, reading: WorkerReading) -> None:
        """The headroom's numbers of all ranks; said once they have all told theirs."""
        self._terms = headroom.rows((*reading.ranks, *reading.dead_ranks))
        if self.headroom is None and len(self._terms) == self.spec.ranks_here:
            self.headroom = headroom.summary(self._terms, self.spec.hooks["headroom"])
            self._say("hello", f"headroom: {self.headroom['sentence']}" if self.headroom else "", dict(self.headroom or {}))

    def _meet(self, rank: RankReading) -> None:
        if rank.id not in self._hellos:
            self._hellos[rank.id] = _pidfd(rank.id.pid) if rank.alive else -1
            number = "" if rank.rank is None else f" {rank.rank}"
            self._say("hello", f"{rank.role}{number} (pid {rank.id.pid}) said hello",
                      {"role": rank.role, "rank": rank.rank, "pid": rank.id.pid})
        elif not rank.alive and self._hellos[rank.id] >= 0:
            os.close(self._hellos[rank.id])
            self._hellos[rank.id] = -1
        for fault in rank.facts.get("faults", ()):
            self._take_fault(rank.id.pid, fault["hook"], fault["where"], fault["error"])

    def step_probe(self, prober: Prober, now: float) -> None:
        """Keeps one probe of the engine's port under way until a real request was served."""
        if self._probe is None:
            self._probe = prober.start(self.spec, self.healthy_since is not None)
        elif self._probe.done():
            self.result, self._probe = self._probe.result(), None
            if self.result.health_ok and self.healthy_since is None:
                self.healthy_since = self.progress = now
                self.step = StartStep.WARMING

    @property
    def proof(self) -> Diagnosis | None:
        """Of its lines so far: that it cannot come up."""
        return self._explained(self._proof) if self._proof is not None else None

    def _explained(self, diagnosis: Diagnosis) -> Diagnosis:
        return headroom.explained(diagnosis, self.spec.engine, self._terms, self.spec.hooks.get("headroom", {}))

    @property
    def hurt(self) -> bool:
        """Whether a process that matters has ended."""
        return self.exit_status is not None or self.lost_role is not None

    def post_mortem(self, starting: bool) -> Diagnosis:
        """What all lines and the end of the process that ended first say."""
        role = self.lost_role or "main"
        ended = diagnose.ExitInfo(self.exit_status if role == "main" else None, starting, role, self.clues.oom_killed,
                                  frozenset(self.clues.pids), self.clues.lowest_bytes)
        return self._explained(diagnose.diagnose(self.spec.engine, tuple(self.lines), ended))

    # --- for the loop -------------------------------------------------------------------------------------------------

    def watched(self) -> Watched:
        return Watched(self.spec.name, self.spec.generation, self.launched.main, self.ranks, frozenset(self.known))

    def descriptors(self) -> list[int]:
        """What wakes the loop: output, records, the end of a process."""
        ends = [descriptor for descriptor in self._hellos.values() if descriptor >= 0]
        if self.exit_status is None:
            ends.append(self.launched.descriptor)
        return [*ends, self.launched.records.socket.fileno(), *(pipe.descriptor for pipe in self.launched.pipes if pipe.open)]

    def close(self) -> None:
        """Lets go of everything of ours; the engine's tree must have ended."""
        self.ranks.close()
        self.launched.records.close()
        if self.launched.control is not None:
            self.launched.control.close()
        for pipe in self.launched.pipes:
            pipe.close()
        for descriptor in (self.launched.descriptor, *self._hellos.values()):
            if descriptor >= 0:
                os.close(descriptor)


def _by_weight(role: str) -> int:
    """Of several that had ended when we looked: the others end with the one that computes, and seldom the other way round."""
    return _COMPUTING.index(role) if role in _COMPUTING else len(_COMPUTING)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
