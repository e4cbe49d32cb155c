"""Node 0: hears the members, says why a generation cannot start or must end, and tells them what to run."""
from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tightrank.config import Nodes
from tightrank.errors import CAUSES
from tightrank.nodes.words import SCHEMA, Orders, Report
from tightrank.numbering import Generations
from tightrank.records import Diagnosis, NodeOwn, NodeStatus, NodesView, Phase, WorkerView

RUNNING = (Phase.STARTING, Phase.UP, Phase.DRAINING)
RECALLED = "node-recalled"
GONE_SECONDS = 0.75            # after the end of a connection: who lives has made another by then
START_SECONDS = 10.0           # for a member to have begun what it was told to run: it asks a few times a second


@dataclass(frozen=True, slots=True)
class _Heard:
    report: Report
    monotonic: float
    peer: tuple[str, int] | None = None        # its connection
    closed: float | None = None                # when that ended


class Leader:
    """`hear` is called from HTTP threads, the rest from the tick."""

    def __init__(self, nodes: Nodes, agreement: Mapping[str, str], generations: Generations, ring: Callable[[], None]) -> None:
        self.pause_seconds = nodes.lease_seconds / 4
        self._nodes, self._agreement, self._generations, self._ring = nodes, dict(agreement), generations, ring
        self._me = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._heard: dict[int, _Heard] = {}
        self._crew: dict[int, str] = {}        # node -> its supervisor, when this generation began
        self._began = 0.0
        self._orders = Orders(number=1, leader=self._me, generation=None, admitted=False, why="the leader starts")
        self._told = 0.0                       # when they were last looked at by a tick

    # --- from HTTP ----------------------------------------------------------------------------------------------------

    def hear(self, report: Report, now: float, peer: tuple[str, int] | None = None) -> Orders | None:
        """What it is told; None: our own loop has stopped, and nobody may act on what it last said."""
        with self._lock:
            before = self._heard.get(report.node)
            self._heard[report.node] = _Heard(report, now, peer)
            orders = self._orders if now - self._told < self._nodes.lease_seconds else None
        if before is None or _news(before.report) != _news(report):
            self._ring()
        return orders

    def closed(self, peer: tuple[str, int] | None) -> None:
        """A connection has ended. A member whose last word came by it either has another by now or is gone."""
        with self._lock:
            for node, each in self._heard.items():
                if peer is not None and each.peer == peer:
                    self._heard[node] = replace(each, closed=time.monotonic())

    def refusal(self, report: Report) -> str:
        """Why this report cannot be taken ("": it can)."""
        if report.node >= self._nodes.count:
            return f"node {report.node}: nodes.addresses has {self._nodes.count}, so members are 1 to {self._nodes.count - 1}"
        if report.schema_version != SCHEMA:
            return f"schema_version {report.schema_version}: this supervisor speaks {SCHEMA}; install one release on all hosts"
        return ""

    # --- from the tick ------------------------------------------------------------------------------------------------

    def view(self, view: WorkerView, now: float) -> NodesView:
        with self._lock:
            heard = dict(self._heard)
        ranks = [heard.get(node) for node in range(1, self._nodes.count)]
        whole = all(each is not None and self._runs(each.report, view.generation) and each.report.ready for each in ranks)
        troubles = self._said(heard, view.generation) if view.phase is Phase.STOPPING else \
            self._troubles(heard, view.generation, now) if view.phase in RUNNING else iter(())
        trouble = next(troubles, None)
        return replace(self._steering(heard, view.generation, now), trouble=trouble, whole=whole,
                       blocked=next(self._blocks(heard, now), ""))

    def publish(self, own: NodeOwn, now: float) -> None:
        """After a tick: a generation that was started in it has the crew that was heard last."""
        runs = own.phase in RUNNING or own.drains
        with self._lock:
            if runs and own.generation != self._orders.generation:
                self._crew = {node: each.report.supervisor for node, each in self._heard.items()}
                self._began = now
            self._told = now
            generation = own.generation if runs else None
            number = self._orders.number + (generation != self._orders.generation)
            self._orders = Orders(number=number, leader=self._me, generation=generation, admitted=own.phase is Phase.UP,
                                  why=self._why(own, now))

    def next_generation(self, worker: str) -> int:
        with self._lock:
            last = max((each.report.last for each in self._heard.values()), default=0)
        return self._generations.next(worker, last)

    def rows(self, now: float) -> tuple[NodeStatus, ...]:
        with self._lock:
            heard = dict(self._heard)
        return tuple(self._row(node, heard.get(node), now) for node in range(1, self._nodes.count))

    def close(self) -> None:
        pass

    def _steering(self, heard: Mapping[int, _Heard], generation: int, now: float) -> NodesView:
        """What the others allow; nothing is known of it while one of them is not heard of."""
        reports = [(self._name(node), each.report) for node, each in sorted(heard.items())
                   if self._runs(each.report, generation) and not self._late(each, now)]
        if len(reports) < self._nodes.count - 1:
            return NodesView(True)
        budgets = [(report.budget, name) for name, report in reports if report.budget is not None]
        sheds = [report.shed.shed(name) for name, report in reports if report.shed is not None]
        budget, who = min(budgets, default=(None, ""))
        return NodesView(True, budget=budget, budget_from=who, shed=min(sheds, key=lambda shed: shed.new_tokens, default=None),
                         aborts=sum(report.aborts for _, report in reports),
                         abort_why=next((f"{name}: {report.abort_why}" for name, report in reports if report.abort_why), ""))

    # --- what it makes of them ----------------------------------------------------------------------------------------

    def _name(self, node: int) -> str:
        return f"node {node} ({self._nodes.addresses[node]})"

    def _runs(self, report: Report, generation: int) -> bool:
        return (report.leader, report.generation) == (self._me, generation)

    def _late(self, each: _Heard, now: float) -> bool:
        gone = each.closed is not None and now - each.closed > GONE_SECONDS
        return gone or now - each.monotonic > self._nodes.lease_seconds

    def _blocks(self, heard: Mapping[int, _Heard], now: float) -> Iterator[str]:
        for node in range(1, self._nodes.count):
            each = heard.get(node)
            if why := self._absent(each, now):
                yield f"{self._name(node)} {why}"
            elif each is not None and not each.report.clean:
                yield f"{self._name(node)} is not clean yet ({each.report.phase.value}, generation {each.report.generation})"
            elif each is not None and (each.report.heard_from, each.report.heard) != (self._me, self._orders.number):
                yield f"{self._name(node)} has not heard yet that nothing runs"

    def _absent(self, each: _Heard | None, now: float) -> str:
        """Why nothing can be started there."""
        if each is None:
            return "has not reported yet"
        if self._late(each, now):
            closed = ", and closed the connection" if each.closed else ""
            return f"was last heard of {now - each.monotonic:.0f} s ago{closed}"
        different = [f"{name} ({each.report.agreement.get(name, 'unknown')}, here {ours})" for name, ours in
                     self._agreement.items() if each.report.agreement.get(name) != ours]
        if different:
            return f"has another {', '.join(different)}"
        return "is stopping" if each.report.stopping else ""

    def _troubles(self, heard: Mapping[int, _Heard], generation: int, now: float) -> Iterator[Diagnosis]:
        """What a member said of its own ranks goes before what we conclude from its silence."""
        yield from self._said(heard, generation)
        for node in range(1, self._nodes.count):
            if why := self._lost(node, heard.get(node), generation, now):
                yield lost(f"{self._name(node)} {why}")

    def _said(self, heard: Mapping[int, _Heard], generation: int) -> Iterator[Diagnosis]:
        for node, each in sorted(heard.items()):
            trouble = each.report.trouble
            if self._runs(each.report, generation) and trouble is not None and trouble.cause != RECALLED:
                yield trouble.diagnosis(self._name(node))

    def _lost(self, node: int, each: _Heard | None, generation: int, now: float) -> str:
        if each is None or (why := self._absent(each, now)):
            return f"{why}; nodes.lease is {self._nodes.lease_seconds:g} s" if each else "has not reported"
        if self._crew.get(node) != each.report.supervisor:
            return "has another supervisor than when this generation began: it was restarted"
        if self._runs(each.report, generation):
            return "has ended its ranks" if each.report.clean else ""
        late = now - self._began > START_SECONDS and self._orders.generation == generation
        return f"has not started generation {generation} after {START_SECONDS:.0f} s" if late else ""

    def _why(self, own: NodeOwn, now: float) -> str:
        if own.diagnosis is not None:
            return f"{own.diagnosis.cause}: {own.diagnosis.summary}"[:1000]
        blocked = "" if own.phase in RUNNING else next(self._blocks(dict(self._heard), now), "")
        return blocked or f"the worker is {own.phase.value}"

    def _row(self, node: int, each: _Heard | None, now: float) -> NodeStatus:
        address = self._nodes.addresses[node]
        absent = self._absent(each, now)
        if each is None:
            return NodeStatus(node, address, None, "unknown", 0, None, 0, None, absent)
        report, late = each.report, self._late(each, now)
        own = report.trouble is not None and report.trouble.cause != RECALLED
        trouble = f"{report.trouble.cause}: {report.trouble.summary}" if report.trouble and own else ""
        reason = absent or trouble or ("" if report.ready or report.clean else report.phase.value)
        return NodeStatus(node, address, now - each.monotonic, "unknown" if late else report.phase.value, report.generation,
                          None if late else report.available_bytes, report.floor_bytes, report.budget, reason)


def lost(summary: str) -> Diagnosis:
    """The other side is gone, as far as can be told from here."""
    return Diagnosis("node-lost", summary, (), "see whether that host runs, and the network between the two; nodes.lease is "
                     "the limit", CAUSES["node-lost"].restart_helps, {}, "likely")


def _news(report: Report) -> tuple[object, ...]:
    return (report.supervisor, report.leader, report.generation, report.phase, report.clean, report.ready, report.stopping,
            report.trouble, report.budget, report.shed, report.aborts)
