"""One worker's state machine, the only writer of its state. Called from the tick alone; `apply` carries out decisions.

    stopped/failed/backing-off --start--> starting --admit--> up <--resume/drain--> draining
    any of these --stop--> stopping --(nothing is left)--> backing-off | failed | stopped | starting
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tightrank import engines, launch
from tightrank.breaker import Breaker
from tightrank.calibration import Account, measured, sentence
from tightrank.calibration.store import Calibration
from tightrank.decide import RESTARTS, STEADY_SECONDS
from tightrank.ending import End
from tightrank.generation import Generation
from tightrank.hygiene import Rules
from tightrank.plan import for_generation
from tightrank.plan.pace import Pace
from tightrank.readers.engine_http import Prober
from tightrank.readers.process import ProcessTable
from tightrank.records import (
    ActionKind,
    Comparison,
    Decision,
    Diagnosis,
    Event,
    Failure,
    Line,
    NodesView,
    Phase,
    Request,
    Snapshot,
    WorkerReading,
    WorkerSpec,
    WorkerView,
)
from tightrank.watch import Watched

if TYPE_CHECKING:
    from tightrank_adapter import wire as wire_types

_VAGUE = ("rank-died", "engine-exited", "unknown")     # a later line may name what was behind them
# What the ranks here say of it when those on another host have died.
_ECHOES = (*_VAGUE, "collective-timeout", "collective-init-failed", "rendezvous-timeout", "engine-error", "engine-hung",
           "node-lost")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker needs of the daemon."""
    state_directory: Path
    environment: Mapping[str, str]
    prober: Prober
    next_generation: Callable[[str], int]
    guard_stops: Callable[[], int]
    breaker: Breaker
    hygiene: Rules = field(default_factory=Rules)
    calibration: Calibration = field(default_factory=Calibration)


class Worker:
    """One worker over all its generations."""

    def __init__(self, template: WorkerSpec, around: Surroundings, bundle: str | None = None) -> None:
        self.template = template
        self._key = around.breaker.key(template)      # of the last start
        before = around.breaker.standing(template.name, self._key)
        self.phase = Phase.BACKING_OFF if before.diagnosis is None else Phase.FAILED
        self.since = time.monotonic()
        self.since_unix = time.time()
        self.next_start: float | None = None if before.failures else self.since
        self.generation = 0
        self.restarts = 0
        self.forced_end = False            # the last drain did not end in time
        self.diagnosis = before.diagnosis
        self.run: Generation | None = None
        self._failures = before.failures   # in a row
        self._end: End | None = None
        self._account: Account | None = None    # of what was measured in this generation, once it is up
        self._unspawned = False            # there is nothing to end
        self._restart_wanted = False
        self._failed_at_start = False
        self._requests: list[Request] = []
        self._around = around
        self._events: list[Event] = []
        self._failed: list[Failure] = []
        self.bundle = bundle               # of the last failure, in an earlier daemon too
        self._last_tail: tuple[str, ...] = ()
        if before.diagnosis is not None:
            cause = before.diagnosis.cause
            self._say("cause", f"{cause}: not started: it failed for good under an earlier supervisor; configuration, engine, "
                      f"model and host are as they were. `tightrank resume {template.name}` starts it", {"cause": cause})

    # --- what comes in ------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> None:
        """Kept until the next decision; several at once are all seen by it."""
        self._requests.append(request)

    def hurry(self) -> None:
        """A second SIGTERM: no more patience."""
        if self._end is not None:
            self._end.hurry()

    def read_pipes(self) -> list[Line]:
        return self.run.read_pipes(self.phase is Phase.STARTING) if self.run else []

    def hear_kernel(self, lines: Sequence[Line]) -> None:
        if self.run and lines:
            self.run.hear_kernel(lines)

    def hear_others(self, others: NodesView, now: float) -> None:
        """What the other hosts allow, and what they say of their ranks where ours are being ended for what may be its echo."""
        if self.run is not None:
            self.run.steering.hear_others(others, now)
        trouble, known = others.trouble, self.diagnosis
        if trouble is not None and self._end is not None and known is not None and known.cause in _ECHOES and \
                trouble.cause not in _ECHOES:
            self._blame(trouble)

    def receive(self) -> list[wire_types.Step]:
        return self.run.receive() if self.run else []

    def observe(self, snapshot: Snapshot) -> None:
        """Takes in one pass of `watch`."""
        if self.run is None:
            return
        now = snapshot.monotonic
        self.run.observe(snapshot.workers[self.template.name], snapshot.memory.oom_kills, now)
        self.run.clues.remember_memory(snapshot.memory.available_bytes, snapshot.guard.get("lowest_available_bytes"), now)
        if self.phase is Phase.STARTING:
            self.run.step_probe(self._around.prober, now)
        elif self.phase in (Phase.UP, Phase.DRAINING):
            self.run.steering.step(self._around.prober, snapshot.workers[self.template.name], now)
            self._calibrate(snapshot.workers[self.template.name], now)
        if self._failures and self.phase is Phase.UP and now - self.since > STEADY_SECONDS:
            self._forget_failures()

    def _calibrate(self, reading: WorkerReading, now: float) -> None:
        """Keeps what is measured, and says what is not as it was expected."""
        assert self.run is not None
        if self._account is None:
            store = self._around.calibration
            self._account = Account(store, store.identity(self.template, self._key), self.template.predicted)
        line = self.template.line
        found = measured(reading, self.run.prefills.meter.pace, self._account.fresh, self.run.prefills.evidence(now),
                         line.budget if line else 0)
        for row in self._account.step(found, now):
            self._say("calibration", f"expected and measured disagree: {sentence(row)}",
                      {"term": row.term, "predicted": row.predicted, "measured": row.measured, "source": row.source})

    # --- what decide and the loop see ---------------------------------------------------------------------------------

    def view(self, now: float) -> WorkerView:
        """The requests go with it: the next decision answers them."""
        run, spec = self.run, self.template
        requests, self._requests = tuple(self._requests), []
        running = self.phase is not Phase.STOPPING
        return WorkerView(
            name=spec.name, engine=spec.engine, role=spec.role, phase=self.phase, generation=self.generation,
            since_monotonic=self.since, started_monotonic=run.started if run else self.since,
            progress_monotonic=run.progress if run else self.since, start_stall_seconds=spec.start_stall_seconds,
            hooks=tuple(spec.hooks), hook_roles=engines.hook_roles(spec), exit_status=run.exit_status if run else None,
            proof=run.proof if run else None,
            post_mortem=run.post_mortem(self.phase is Phase.STARTING) if run and run.hurt and running else None,
            fault_since_monotonic=run.fault_since if run else None, probe=run.result if run else None,
            healthy_since_monotonic=run.healthy_since if run else None,
            guard_stops_at_start=run.guard_stops if run else 0,
            ended=self._unspawned or (self._end is not None and self._end.ended),
            end_trouble=self._end.trouble(now) if self._end else None, diagnosis=self.diagnosis,
            failures_in_row=self._failures, next_start_monotonic=self.next_start, requests=requests,
            restart_wanted=self._restart_wanted, line=spec.line, budget=run.steering.budget if run else None,
            context_tokens=spec.context_tokens, evidence=run.prefills.evidence(now) if run else (),
            shed=run.steering.shed if run else None, prefill_width=run.prefills.width_now(now) if run else 0,
            stall=run.turns.stall if run else None)

    def watched(self) -> Watched:
        return self.run.watched() if self.run else Watched(self.template.name, self.generation)

    @property
    def drains(self) -> bool:
        """Whether it is being ended on request and its engine still serves what it has."""
        return self._end is not None and self._end.drains

    @property
    def working(self) -> bool:
        """Whether its engine has requests, or is stopped."""
        return self.run is not None and self.run.turns.working

    @property
    def suspect(self) -> bool:
        """Whether it does not move although it should."""
        return self.run is not None and self.run.turns.suspect

    @property
    def pace(self) -> Pace | None:
        """Of its prefill steps; of those of an earlier generation until there are enough."""
        own = self.run.prefills.meter.pace if self.run is not None else None
        return own or (self._account.pace if self._account is not None else None)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """What was measured in this generation against what was expected."""
        return self._account.rows if self._account is not None else ()

    def descriptors(self) -> list[int]:
        return self.run.descriptors() if self.run else []

    def tail(self) -> tuple[str, ...]:
        """The last lines of this generation, or of the last one that ran."""
        return self.run.tail() if self.run else self._last_tail

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take_failures(self) -> list[Failure]:
        """Those whose last words are read, for the bundle."""
        failed, self._failed = self._failed, []
        return failed

    def bundled(self, generation: int, name: str, trouble: str) -> None:
        """What became of the bundle of one of them."""
        if not trouble:
            self.bundle = name
        self._events.append(Event(time.time(), "bundle", self.template.name, generation,
                                  f"no bundle {name}: {trouble}" if trouble else f"bundle {name}", {"bundle": self.bundle}))

    # --- what was decided ---------------------------------------------------------------------------------------------

    def apply(self, decision: Decision, now: float) -> None:
        """Carries out one decision; one for another generation is void. A start that fails is a failure of the worker."""
        if decision.generation != self.generation:
            return
        self._say("decision", decision.sentence, {"action": decision.kind.value, "reason": decision.reason})
        {ActionKind.START: self._start, ActionKind.ADMIT: self._admit, ActionKind.DRAIN: self._drain,
         ActionKind.STOP: self._stop, ActionKind.BACK_OFF: self._back_off, ActionKind.FAIL: self._fail,
         ActionKind.REST: self._rest, ActionKind.TIGHTEN: self._tighten, ActionKind.SHED: self._shed,
         ActionKind.ABORT: self._abort}[decision.kind](decision, now)

    def step_ending(self, table: ProcessTable, now: float) -> None:
        """Goes on ending the tree. The diagnosis may grow clearer with the lines that still come."""
        if self._end is None or self.run is None:
            return
        if told := self._end.step(table, now):
            self._say("cause", told, {"cause": self.diagnosis.cause if self.diagnosis else None})
        if self._end.gone and self.diagnosis is not None and self.diagnosis.cause in _VAGUE:
            better = self.run.post_mortem(self._failed_at_start)
            if better.cause not in _VAGUE:
                self._blame(better)

    def _start(self, decision: Decision, now: float) -> None:
        if self.phase in (Phase.FAILED, Phase.STOPPED):
            self._forget_failures()        # a person asked: what was wrong may be mended
        self._key = self._around.breaker.key(self.template)
        self._close()
        self.restarts += self.generation > 0
        self._restart_wanted = self.forced_end = False
        try:
            self.generation = self._around.next_generation(self.template.name)
            spec = for_generation(self.template, self.generation, self._around.state_directory)
            self.run = Generation(spec, self._around.environment, self._around.guard_stops(), self._say, now,
                                  self._around.hygiene)
        except OSError as error:
            self._count_failure()
            self._blame(launch.failed(error))
            self._unspawned = True         # whether and when to try again is decided as always
            self._enter(Phase.STOPPING, now)
            return
        self.diagnosis = None
        launch.forget_older(Path(spec.run_directory).parent, spec.name, self.generation)
        self._enter(Phase.STARTING, now)

    def _admit(self, decision: Decision, now: float) -> None:
        assert self.run is not None
        if self.phase is Phase.STARTING:
            self.run.turns.forget_steps()
            self.run.prefills.meter.forget()
        self.run.note_traces()             # all its processes are there now; from here on we look seldom
        self._enter(Phase.UP, now)

    def _drain(self, decision: Decision, now: float) -> None:
        self._enter(Phase.DRAINING, now)

    def _stop(self, decision: Decision, now: float) -> None:
        assert self.run is not None
        if decision.diagnosis is not None:
            self._count_failure()
            self._blame(decision.diagnosis)
        self._restart_wanted = decision.reason in RESTARTS
        self._failed_at_start = self.phase is Phase.STARTING
        self._end = End(self.run, decision.diagnosis.cause if decision.diagnosis else None, now)
        self._enter(Phase.STOPPING, now)

    def _back_off(self, decision: Decision, now: float) -> None:
        if decision.diagnosis is not None and decision.diagnosis != self.diagnosis:
            self._blame(decision.diagnosis)
        self._close()
        self.next_start = now + decision.delay_seconds
        self._enter(Phase.BACKING_OFF, now)

    def _fail(self, decision: Decision, now: float) -> None:
        if decision.diagnosis is not None and decision.diagnosis != self.diagnosis:
            self._blame(decision.diagnosis)
        self._around.breaker.keep(self.template.name, self._key, self._failures, self.diagnosis)
        self._close()
        self._enter(Phase.FAILED, now)

    def _rest(self, decision: Decision, now: float) -> None:
        self._close()
        self._enter(Phase.STOPPED, now)

    def _tighten(self, decision: Decision, now: float) -> None:
        if self.run is not None and decision.budget is not None:
            self.run.steering.tell_budget(decision.budget, now)

    def _shed(self, decision: Decision, now: float) -> None:
        if self.run is not None:
            self.run.steering.shed = decision.shed

    def _abort(self, decision: Decision, now: float) -> None:
        if self.run is not None:
            self.run.steering.abort(decision.sentence)

    def _close(self) -> None:
        if self.phase is Phase.STOPPING and self.diagnosis is not None:
            run = self.run
            self._failed.append(Failure(
                self.template.name, self.generation, time.time(), self.diagnosis, run.engine_version if run else None,
                tuple(run.lines) if run else (), run.spec.run_directory if run else "", self._end.stacks if self._end else ""))
        if self._end is not None:
            self.forced_end = self._end.forced
            self._end.close()
        self._end, self._unspawned, self.next_start = None, False, None
        if self.run is not None:
            self._last_tail = self.run.tail()
            self.run.close()
            self.run = self._account = None

    def _count_failure(self) -> None:
        self._failures += 1
        self._around.breaker.keep(self.template.name, self._key, self._failures)

    def _forget_failures(self) -> None:
        self._failures = 0
        self._around.breaker.forget(self.template.name)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        before, self.phase, self.since, self.since_unix = self.phase, phase, now, time.time()
        self._say("phase", f"{before.value} -> {phase.value}", {"from": before.value, "to": phase.value, "drains": self.drains})

    def _blame(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self._say("cause", f"{diagnosis.cause}: {diagnosis.summary.rstrip('.')}. {diagnosis.change}",
                  {"cause": diagnosis.cause, "evidence": list(diagnosis.evidence), "numbers": dict(diagnosis.numbers)})

    def _say(self, kind: str, sentence: str, data: Mapping[str, object]) -> None:
        self._events.append(Event(time.time(), kind, self.template.name, self.generation, sentence, data))
