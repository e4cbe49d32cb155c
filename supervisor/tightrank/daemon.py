"""The table of contents: builds the parts, then turns: collect, read, decide, act, publish.

`python -m tightrank.daemon <state>/run/config.json`, started by the guard. The main thread is the loop (it also spawns the
engines: their parent-death signal is bound to it); HTTP, log writing and probes have threads of their own.
"""
from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

from tightrank import (
    api,
    breaker,
    decide,
    engines,
    host,
    hygiene,
    inputs,
    leftovers,
    levels,
    nodes,
    plan,
    serve,
    sockets,
    status,
    survey,
)
from tightrank.adapter import pages
from tightrank.bell import Bell, heard
from tightrank.bundle.keeper import Keeper
from tightrank.calibration.store import Calibration
from tightrank.config import Config, read_secret
from tightrank.config.units import is_loopback
from tightrank.decide import missing_hooks
from tightrank.errors import EXIT_CONFIG, EXIT_SOFTWARE, EXIT_TEMPORARY, ConfigError, exit_code
from tightrank.levels.ladder import Sample, close
from tightrank.logs import Sink
from tightrank.numbering import Generations
from tightrank.readers.engine_http import Prober
from tightrank.readers.guard import GuardReader
from tightrank.readers.kernel import KernelLog
from tightrank.readers.memory import MemoryReader
from tightrank.readers.nvidia import NvidiaReader
from tightrank.records import Event, NodeOwn, Phase, Request, Snapshot, WorkerView
from tightrank.report import Board, Journal
from tightrank.watch import Watch
from tightrank.worker import Surroundings, Worker

CALM_SECONDS, BUSY_SECONDS = 5.0, 0.25       # between ticks when nothing happens; a death, a line or a record wakes at once
WORK_SECONDS = 0.5                           # while a worker has work: it may hang with it
CALM_TABLE_SECONDS, BUSY_TABLE_SECONDS = 15.0, 0.25
LOOK_SECONDS = 0.5                           # at the guard's page while it is calm
FAULTS_IN_A_ROW = 20                         # ticks that raise, then the daemon ends and the guard starts it again
SHOWN_SECONDS = 2.0                          # a reason can be read for this long before `on_failed: exit` ends it
_ENDED = (Phase.STOPPED, Phase.FAILED)
_MOVING = (Phase.STARTING, Phase.STOPPING, Phase.BACKING_OFF)


class Daemon:
    """One deployment, from its first start to its end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = Path(config.state_directory)
        self.started_unix = time.time()
        self.policy = decide.Policy.of(config)
        self.generations = Generations(self.state / "generations.json")
        self.journal = Journal(self.state / "journal.jsonl")
        self.board = Board()
        self.sink = Sink(self.state / "logs")
        self.bell = Bell()
        self.prober = Prober(self.bell.ring)
        self.guard = GuardReader(self.state / "run")
        self.kernel = KernelLog()
        nvidia = NvidiaReader()
        self.watch = Watch(MemoryReader(), self.guard, nvidia)
        self.levels, self.looked = levels.Levels(), Sample(0.0, None)
        self.told: list[Event] = []          # by the levels in this tick
        self.beat = pages.Page(str(self.state / "run" / "daemon.beat"), "Q", True)
        facts = host.read()
        read = inputs.read(config, os.environ)
        self.specs = survey.expecting(config, plan.build(config, facts, read), read)
        known = breaker.facts(facts, survey.release(self.specs[0], os.environ))              # one engine for all workers
        self.others = nodes.others(config, self._secret("nodes.token_file", config.nodes.token_file),
                                   nodes.agreement(config, known[-1]), self.generations, self.bell.ring)
        around = Surroundings(self.state, dict(os.environ), self.prober, self.others.next_generation, self.guard.stops,
                              breaker.Breaker(self.state / "breaker.json", known, os.environ, partial(self._say, "daemon")),
                              hygiene.Rules(config.hygiene.limit_seconds, config.hygiene.tolerance_bytes,
                                            config.hygiene.drop_page_cache == "weights", nvidia),
                              Calibration(self.state / "calibration.json", known, partial(self._say, "calibration")))
        self.keeper = Keeper(config, self.specs, os.environ, self.bell.ring)
        self.workers = [Worker(spec, around, self.keeper.last(spec.name)) for spec in self.specs]
        self.requests = api.Requests(self.bell.ring)
        self.stops = 0                       # SIGTERMs so far
        self.orphaned = False                # the guard is gone
        self.log_trouble = ""                # as it was last said

    # --- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until it is told to stop. Returns the exit code."""
        listening = serve.listen(self.config.http.host, self.config.http.port)
        self._signals()
        sockets.raise_descriptors()
        self._say("daemon", f"daemon started (pid {os.getpid()})")
        if self.kernel.why:
            self._say("kernel", f"the kernel's log cannot be read ({self.kernel.why}); OOM kills are told by counters alone")
        leftovers.end_earlier(self.state, self._say)
        app = api.create(self.board, self.journal, self.requests, self._api_settings())
        server = serve.Server(app, listening, self.others.closed)
        gc.collect()
        gc.freeze()                          # what is there now stays: no collection needs to walk it in a tick
        try:
            return self._loop()
        finally:
            self.others.close()
            server.stop()
            self.keeper.close()
            self.keeper.step(self.workers, self.board, self.journal)
            self._tell()
            self.sink.close()

    def _loop(self) -> int:
        faults = 0
        while True:
            try:
                self.tick()
                faults = 0
            except Exception as error:     # noqa: BLE001 - the top of a tick: one bad reading must not end the watch
                faults += 1
                self._fault(error)
                if faults >= FAULTS_IN_A_ROW:
                    return EXIT_SOFTWARE
            if self._over():
                return self._exit_code()
            self._wait()

    def tick(self) -> None:
        """The program."""
        self._collect()
        snapshot = self._read()
        views = [self._view(worker, snapshot.monotonic) for worker in self.workers]
        decisions = decide.decide(snapshot, views, self.policy)
        self.levels, self.told, held = levels.step(self.levels, self.config.guard, snapshot, views)
        for decision in (*decisions, *held):
            self._worker(decision.worker).apply(decision, snapshot.monotonic)
        for worker in self.workers:
            worker.step_ending(self.watch.table, snapshot.monotonic)
        for worker in self.workers:
            self.others.publish(self._own(worker, snapshot), snapshot.monotonic)
        self.keeper.step(self.workers, self.board, self.journal)
        self._publish(snapshot)
        self._leave_failed(snapshot.monotonic)

    def _view(self, worker: Worker, now: float) -> WorkerView:
        view = worker.view(now)
        found = self.others.view(view, now)
        if found is None:
            return view
        worker.hear_others(found, now)
        return replace(view, nodes=found)

    def _own(self, worker: Worker, snapshot: Snapshot) -> NodeOwn:
        ranks, roles, run = snapshot.workers[worker.template.name].ranks, engines.hook_roles(worker.template), worker.run
        told = run.steering if run is not None else None
        return NodeOwn(
            name=worker.template.name, phase=worker.phase, generation=worker.generation, drains=worker.drains,
            stopping=self.stops > 0, ready=run is not None and bool(ranks) and not missing_hooks(roles, ranks),
            diagnosis=worker.diagnosis, budget=told.budget if told else None, shed=told.shed if told else None,
            aborts=told.aborts if told else 0, abort_why=told.abort_why if told else "",
            available_bytes=snapshot.memory.available_bytes,
            floor_bytes=snapshot.guard.get("floor_bytes") or self.config.guard.floor_bytes)

    # --- one tick, in order -------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        self.beat.write(time.monotonic_ns())
        self.bell.hush()
        while not self.requests.empty():
            wanted = self.requests.get_nowait()
            self._say("request", f"{wanted.action} {wanted.worker}", wanted.worker)
            self._worker(wanted.worker).ask(Request(wanted.action))
        kernel = self.kernel.read()
        for worker in self.workers:
            self._ask_to_stop(worker)
            self.sink.put(worker.template.name, worker.read_pipes())
            worker.hear_kernel(kernel)

    def _ask_to_stop(self, worker: Worker) -> None:
        """In every tick anew: a worker that is being ended for another reason must not start again afterwards."""
        if self.stops > 0:
            worker.ask(Request.STOP)
        if self.stops > 1:
            worker.hurry()

    def _read(self) -> Snapshot:
        moving = any(worker.phase in _MOVING or worker.suspect for worker in self.workers)
        snapshot = self.watch.read([worker.watched() for worker in self.workers],
                                   BUSY_TABLE_SECONDS if moving else CALM_TABLE_SECONDS)
        self.keeper.remember(snapshot)
        for worker in self.workers:
            worker.observe(snapshot)
            self.board.add_steps(worker.template.name, worker.receive())     # after its hellos: who is unknown is not heard
        return snapshot

    def _publish(self, snapshot: Snapshot) -> None:
        self.board.publish(status.build(self.config.name, self.started_unix, snapshot, self.workers, self.policy,
                                        self.stops > 0, levels.rows(self.levels, self.config.guard, snapshot.guard),
                                        self.levels.aims, self.others.rows(snapshot.monotonic)))
        self._tell()                         # after the status: who reads it because of an event must see what it tells
        if self.sink.trouble != self.log_trouble:
            self.log_trouble = self.sink.trouble
            self._say("daemon", f"logs: {self.log_trouble or 'written again'}")

    def _leave_failed(self, now: float) -> None:
        """`on_failed: exit`: as if it was told to stop."""
        failed = [worker for worker in self.workers if worker.phase is Phase.FAILED and now - worker.since >= SHOWN_SECONDS]
        if failed and not self.stops and self.config.on_failed == "exit":
            self._say("daemon", f"{failed[0].template.name} failed for good: draining the others, then the end (on_failed)")
            self.stops = 1

    def _tell(self) -> None:
        told, self.told = self.told, []      # once: the end of `run` tells what is left
        for event in (*told, *(event for worker in self.workers for event in worker.take_events())):
            self._write(event)

    def _wait(self) -> None:
        poll = self.bell.poll(descriptor for worker in self.workers for descriptor in worker.descriptors())
        pause = BUSY_SECONDS if self.levels.busy else min(self.others.pause_seconds, *map(_pause_seconds, self.workers))
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0:
            if heard(poll, min(left, LOOK_SECONDS)) or self._close_to_a_level():
                return

    def _close_to_a_level(self) -> bool:
        """Whether memory asks for a tick before its time. Of the guard's last sample: a look takes 8 us, two a second 0.06 %
        of a core with their waking. While a level is in force a tick comes every 0.25 s: 0.9 % (scripts/bench/idle)."""
        page, before = self.guard.read(), self.looked
        self.looked = Sample(time.monotonic(), page.get("available_bytes"))
        return close(levels.rules_now(self.config.guard, page), before, self.looked)

    # --- signals and the end ------------------------------------------------------------------------------------------

    def _signals(self) -> None:
        self.bell.ring_on_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR2, self._on_orphaned)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_stop(self, number: int, frame: object) -> None:
        self.stops += 1                      # the tick does the rest: it may be in the middle of a worker's requests now

    def _on_orphaned(self, number: int, frame: object) -> None:
        self.orphaned = True

    def _over(self) -> bool:
        if self.orphaned:
            leftovers.end_all(self.state, [worker.watched() for worker in self.workers], self._say)
            return True
        return self.stops > 0 and all(worker.phase in _ENDED for worker in self.workers)

    def _exit_code(self) -> int:
        if self.orphaned:
            return EXIT_TEMPORARY
        self._say("daemon", "daemon ended")
        failed = [each.diagnosis.cause for each in self.workers if each.phase is Phase.FAILED and each.diagnosis is not None]
        return exit_code(failed, any(worker.forced_end for worker in self.workers), self.config.on_failed == "exit")

    # --- small things -------------------------------------------------------------------------------------------------

    def _worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.template.name == name)

    def _api_settings(self) -> api.ApiSettings:
        token = self._secret("http.token_file", self.config.http.token_file) or os.environ.get("TIGHTRANK_TOKEN")
        leader = self.others if isinstance(self.others, nodes.Leader) else None
        member_of = self.config.nodes.addresses[0] if self.config.nodes.rank else ""
        return api.ApiSettings(not is_loopback(self.config.http.host), self.state, token, plan.to_json(self.specs), leader,
                               self._secret("nodes.token_file", self.config.nodes.token_file), member_of)

    def _secret(self, key: str, path: str | None) -> str:
        return read_secret(path, partial(self.config.error, key)) if path else ""

    def _fault(self, error: Exception) -> None:
        self._say("daemon", f"a tick failed: {error!r}")
        self.sink.say("".join(traceback.format_exception(error)).rstrip())

    def _say(self, kind: str, sentence: str, worker: str | None = None) -> None:
        self._write(Event(time.time(), kind, worker, None, sentence))

    def _write(self, event: Event) -> None:
        self.journal.append(event)
        if event.kind in ("phase", "decision", "cause", "daemon", "hygiene", "level", "dry-run", "bundle", "calibration"):
            place = f"{event.worker}: " if event.worker else ""
            self.sink.say(f"{place}{event.sentence}")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: see errors.py; 0 only after a clean stop."""
    path, = sys.argv[1:] if argv is None else argv
    try:
        return Daemon(Config.from_json(Path(path).read_text())).run()
    except ConfigError as error:
        _last_words(error)
        return EXIT_CONFIG
    except OSError as error:                 # no descriptors, no disk: the guard tries again
        _last_words(error)
        return EXIT_SOFTWARE


def _pause_seconds(worker: Worker) -> float:
    """The longest wait for a worker's next look, when nothing wakes the loop."""
    if worker.phase in _MOVING or worker.suspect:
        return BUSY_SECONDS
    return WORK_SECONDS if worker.working else CALM_SECONDS


def _last_words(error: Exception) -> None:
    with contextlib.suppress(OSError):       # nobody may read stderr any more: the exit code must still be right
        print(f"tightrank: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
