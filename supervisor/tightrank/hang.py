"""Whether a worker that has work moves: `Turns` watches its processes, `overdue` judges what was seen. Neither acts.

Busy is not dead, and what looks dead may be busy. A step that is longer than all before it, a kernel that is compiled, a
graph that is captured, weights that are exchanged: in all of them a loop stands still for long and nothing is wrong. A false
alarm costs every request of the worker and a start of minutes; a hang found late costs the difference. So the less is known
the longer is waited:

- A process in state T was stopped by a signal and does nothing until somebody lets it go on: the floor (`limits.hang`), at
  any time. (State t is a debugger's or py-spy's: judged like any other.)
- All that compute are quiet: they sleep, and use no processor. The floor, or `limits.hang_factor` times the longest step,
  scaled up when the step under way computes more than that one did. A device may be computing while its process sleeps, so
  where no step of that size was seen it is at least UNPROVEN_SECONDS.
- They use their processors: that is a step on a CPU, a kernel compiled in the process, or a spin inside a collective whose
  peer will never come (NCCL waits that way): from outside all three look alike. `limits.hang_busy`.
- Processes that a rank started compute (ptxas, nvcc, a C++ compiler): no collective does that. `limits.start_stall`, as when
  starting.

Not judged, for want of a sign: a loop without work (vLLM's sleeps then), a server or detokenizer that is not stopped.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nlargest

from tightrank.config import Limits
from tightrank.records import ProcessId, ProcessReading, RankReading, Stall, WorkerReading

# The most that one look adds to a silence: docker pause, a live migration or a starved host holds up the daemon and the
# engine alike, and afterwards every heartbeat is old.
WATCHED_SECONDS = 1.0
SUSPECT_SECONDS = 0.4       # from here on processes are looked at anew in every tick, and only such looks count as quiet
# Of a core. Idle, a rank on a CPU takes less: 0.01 SGLang's scheduler with --sleep-on-idle, 0.03 vLLM's worker; a starved one
# that computes is in state R.
BUSY_SHARE = 0.05
# vLLM's engine core spins for 1 s after the last answer of a worker and sleeps then (shm_broadcast.py of 0.28.0 - 0.33.0): what
# it uses later is work of its own, a grammar that it compiles or a long queue. Of a core; its other threads take less.
SPIN_SECONDS, CORE_SHARE = 1.5, 0.5
HELPER_CPU_SECONDS = 0.02   # two ticks of the kernel's clock: anything that runs at all
UNPROVEN_SECONDS = 30.0     # a first chunk of a long prompt after a canary of a few tokens; a lazy load of kernels
KEPT_STEPS = 256
# Of the longest steps this many do not count once there are enough others: a kernel compiled within a step makes one that
# takes 20 s where the next takes 0.02 (vLLM's first request on a CPU), and would blind us for as long as it is kept.
ONE_OFFS, ENOUGH_STEPS = 2, 16
BUSY_TIMES = 4              # `hang_busy` is never less than this many of the quiet limit


@dataclass(frozen=True, slots=True)
class HangLimits:
    """`floor_seconds` 0: nothing is judged."""
    floor_seconds: float = 2.0
    factor: int = 5
    busy_seconds: float = 60.0
    helped_seconds: float = 300.0


def limits_of(configured: Limits) -> HangLimits:
    return HangLimits(configured.hang_seconds, configured.hang_factor, configured.hang_busy_seconds,
                      configured.start_stall_seconds)


@dataclass(frozen=True, slots=True)
class Overdue:
    """The verdict, with its limit."""
    sentence: str
    limit_seconds: float


def overdue(stall: Stall, limits: HangLimits, starting: bool) -> Overdue | None:
    """None while `stall` may be anything but a hang. While starting only what is certain, or long past the usual, counts:
    `limits.start_stall` is there for the rest."""
    if not limits.floor_seconds:
        return None
    if stall.stopped:
        return _verdict(stall, limits.floor_seconds, "is stopped by a signal (state T)", stall.still_seconds)
    quiet = _quiet_limit(stall, limits, starting)
    sleeps = _verdict(stall, quiet, "sleeps", stall.quiet_seconds)
    if sleeps is not None or starting:
        return sleeps
    busy = max(limits.busy_seconds, BUSY_TIMES * quiet)
    return _verdict(stall, busy, "computes without end", stall.unhelped_seconds) or _verdict(
        stall, max(limits.helped_seconds, busy), "waits for what it compiles", stall.still_seconds)


def _quiet_limit(stall: Stall, limits: HangLimits, starting: bool) -> float:
    if stall.longest_seconds is None or stall.expected_seconds is None or starting:
        return max(limits.floor_seconds, UNPROVEN_SECONDS)
    proven, scaled = limits.factor * stall.longest_seconds, limits.factor * stall.expected_seconds
    return max(limits.floor_seconds, min(scaled, max(UNPROVEN_SECONDS, proven)))


def _verdict(stall: Stall, limit: float, how: str, seconds: float) -> Overdue | None:
    if seconds < limit:
        return None
    work = "" if stall.stopped else f" with {stall.in_flight} requests in flight"
    known = stall.longest_seconds is not None and not stall.stopped
    before = f"; the longest step before took {stall.longest_seconds:.2f} s" if known else ""
    return Overdue(f"{stall.who} {how}: it has not moved for {seconds:.1f} s{work} (limit {limit:.1f} s{before})", limit)


@dataclass(slots=True)
class Turns:
    """Of one generation: since when each of its processes has not moved, and what its steps took so far."""
    stall: Stall | None = None
    working: bool = False                  # something is in flight or stopped: look often
    _looked: float | None = None
    _loops: dict[ProcessId, int] = field(default_factory=dict)
    _had: dict[ProcessId, int] = field(default_factory=dict)     # in flight at the last look
    _still: dict[ProcessId, float] = field(default_factory=dict)
    _cpu: dict[ProcessId, float] = field(default_factory=dict)
    _quiet: float = 0.0
    _unhelped: float = 0.0
    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def learn(self, seconds: float, cost: int) -> None:
        """A prefill step took so long; `cost` as in wire.step_cost."""
        self._steps.append((seconds, cost))

    def forget_steps(self) -> None:
        """Those of a start are of another kind: they compile and warm up."""
        self._steps.clear()

    @property
    def suspect(self) -> bool:
        return self.stall is not None and self.stall.still_seconds > SUSPECT_SECONDS

    def observe(self, reading: WorkerReading, now: float) -> None:
        """Takes in one pass of `watch`."""
        passed = now - self._looked if self._looked is not None else 0.0
        self._looked, watched = now, min(passed, WATCHED_SECONDS)
        computes, helped = self._computes(reading, passed), self._helped(reading)
        self._quiet = 0.0 if computes or helped or not self.suspect else self._quiet + watched
        self._unhelped = 0.0 if helped or not self.suspect else self._unhelped + watched
        ranks = (*reading.ranks, *_main_before_its_hello(reading))
        for rank in ranks:
            self._watch(rank, watched)
        held = [rank for rank in ranks if rank.state == "T" or (rank.in_flight and rank.beat_age_seconds is not None)]
        self.working = bool(held)
        worst = max((rank for rank in held if self._still[rank.id] > 0), default=None,
                    key=lambda rank: (rank.state == "T", self._still[rank.id]))
        self.stall = self._stall(worst, reading) if worst is not None else None

    def _watch(self, rank: RankReading, watched: float) -> None:
        """While it is stopped -1 stands for its loops: that counts from when it was first seen, and not as a step."""
        before, still = self._loops.get(rank.id), self._still.get(rank.id, 0.0)
        loops, had = -1 if rank.state == "T" else rank.loops, self._had.get(rank.id, 0)
        self._had[rank.id] = rank.in_flight
        self._loops[rank.id], self._still[rank.id] = loops, still + watched if loops == before else 0.0
        if had and rank.in_flight and loops != before and -1 not in (loops, before) and still > SUSPECT_SECONDS:
            self._steps.append((still, rank.step_cost))      # whatever it was (a read from a remote cache), it ended well

    def _stall(self, rank: RankReading, reading: WorkerReading) -> Stall:
        still = self._still[rank.id]
        longest, expected = self._expected(max((each.step_cost for each in reading.ranks), default=0))
        return Stall(_words(rank), rank.state == "T", rank.in_flight, still, min(still, self._quiet),
                     min(still, self._unhelped), longest, expected)

    def _expected(self, cost: int) -> tuple[float | None, float | None]:
        """(the longest step, what one of `cost` may take)."""
        if not self._steps:
            return None, None
        left_out = ONE_OFFS if len(self._steps) >= ENOUGH_STEPS else 0
        seconds, proven = nlargest(left_out + 1, self._steps)[-1]
        return seconds, seconds * max(1.0, cost / proven if proven else 1.0)

    def _computes(self, reading: WorkerReading, passed: float) -> bool:
        """A rank that computes for the worker runs, waits for a disk, or has used its processor; vLLM's engine core, which
        has no rank number, still uses its own when it no longer spins."""
        signs = [rank.state in ("R", "D") or self._used(rank.id, rank.cpu_seconds) > BUSY_SHARE * passed
                 for rank in reading.ranks if rank.rank is not None]
        signs += [self._used(rank.id, rank.cpu_seconds) > CORE_SHARE * passed and self._still.get(rank.id, 0.0) > SPIN_SECONDS
                  for rank in reading.ranks if rank.role == "engine-core"]
        return any(signs)

    def _helped(self, reading: WorkerReading) -> bool:
        signs = [self._used(process.id, process.cpu_seconds) > HELPER_CPU_SECONDS for process in _helpers(reading)]
        return any(signs)

    def _used(self, process: ProcessId, cpu_seconds: float | None) -> float:
        """Processor time since the last look; all of it, for one that is new."""
        if cpu_seconds is None:
            return 0.0
        before, self._cpu[process] = self._cpu.get(process, 0.0), cpu_seconds
        return cpu_seconds - before


def _helpers(reading: WorkerReading) -> Iterator[ProcessReading]:
    """Processes that a rank (or a helper of one) started and that said no hello."""
    by_pid = {process.id.pid: process for process in reading.processes}
    ranks = {rank.id.pid for rank in reading.ranks if rank.rank is not None}
    for process in reading.processes:
        above: ProcessReading | None = process if process.role is None else None
        for _ in by_pid:                   # bounded: a reading may be torn
            if above is None:
                break
            if above.parent_pid in ranks:
                yield process
                break
            above = by_pid.get(above.parent_pid)


def _main_before_its_hello(reading: WorkerReading) -> Iterator[RankReading]:
    """It may be stopped while it still imports; nothing else of it can be judged."""
    for process in reading.processes:
        if process.id == reading.main and all(rank.id != process.id for rank in reading.ranks):
            yield RankReading(process.id, "main", None, None, None, None, None, "", True, {}, {}, None, "", None, 0, 0, 0, 0,
                              state=process.state)


def _words(rank: RankReading) -> str:
    number = "" if rank.rank is None else f" {rank.rank}"
    return f"{rank.role}{number} (pid {rank.id.pid})"
