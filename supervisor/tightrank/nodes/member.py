"""Another node than 0: asks the leader what to run, says how it is, and takes silence for the leader's end."""
from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx2
from pydantic import ValidationError

from tightrank.config import Nodes
from tightrank.config.units import local_url
from tightrank.errors import CAUSES
from tightrank.nodes.leader import GONE_SECONDS, RECALLED, RUNNING, lost
from tightrank.nodes.words import Orders, Refusal, Report, Trouble
from tightrank.numbering import Generations
from tightrank.records import Diagnosis, NodeOwn, NodeStatus, NodesView, Phase, WorkerView

ASKS_IN_A_LEASE = 12
CLEAN = (Phase.BACKING_OFF, Phase.STOPPED)         # FAILED on a member: its ranks could not be ended


@dataclass(frozen=True, slots=True)
class _Told:
    orders: Orders
    asked: float                   # when the question was sent: the leader counts from when it came, which is later


class Member:
    """Its own thread asks; all methods are for the tick."""

    def __init__(self, nodes: Nodes, port: int, token: str, agreement: Mapping[str, str], generations: Generations,
                 ring: Callable[[], None]) -> None:
        assert nodes.rank
        self.pause_seconds = nodes.lease_seconds / 4
        self._nodes, self._agreement, self._generations, self._ring = nodes, dict(agreement), generations, ring
        self._rank, self._me = nodes.rank, uuid.uuid4().hex
        self._url, self._token = local_url(nodes.addresses[0], port) + "/nodes", token
        self._leader = f"the leader ({nodes.addresses[0]})"
        self._told: _Told | None = None
        self._refused = "it has not answered yet"
        self._report: Report | None = None
        self._reported = 0.0
        self._no_door: float | None = None     # since when nobody listens there
        self._crew = ""                        # the leader's supervisor, of the generation that was started last
        self._wanted: Orders | None = None     # as the last view saw it
        self._over = False
        threading.Thread(target=self._ask_again, name="leader", daemon=True).start()

    # --- for the tick -------------------------------------------------------------------------------------------------

    def view(self, view: WorkerView, now: float) -> NodesView:
        told = self._told
        gone = self._no_door is not None and now - self._no_door > GONE_SECONDS
        orders = told.orders if told is not None and now - told.asked <= self._nodes.lease_seconds and not gone else None
        self._wanted = orders
        if orders is None:
            return NodesView(False, lost(self._silence(told, now)))
        mine = view.phase not in RUNNING or (orders.leader, orders.generation) == (self._crew, view.generation)
        wanted = orders.generation if orders.generation is None or view.phase in RUNNING or \
            orders.generation > self._generations.last(view.name) else None
        return NodesView(False, None if mine else _recalled(orders, self._leader), wanted=wanted, admitted=orders.admitted)

    def publish(self, own: NodeOwn, now: float) -> None:
        """After a tick."""
        acted = self._wanted
        self._report = Report(
            node=self._rank, supervisor=self._me, agreement=self._agreement, leader=self._crew, generation=own.generation,
            phase=own.phase, clean=own.phase in CLEAN, stopping=own.stopping or self._over, ready=own.ready,
            last=self._generations.last(own.name), heard=acted.number if acted else 0, heard_from=acted.leader if acted else "",
            trouble=None if own.diagnosis is None else Trouble.of(own.diagnosis), available_bytes=own.available_bytes,
            floor_bytes=own.floor_bytes, budget=own.budget, shed=None if own.shed is None else Refusal.of(own.shed),
            aborts=own.aborts, abort_why=own.abort_why[:1000])
        self._reported = now

    def next_generation(self, worker: str) -> int:
        orders = self._wanted
        if orders is None or orders.generation is None:
            raise OSError("the leader no longer wants a generation")
        self._crew = orders.leader
        return self._generations.take(worker, orders.generation)

    def rows(self, now: float) -> tuple[NodeStatus, ...]:
        told = self._told
        ago = None if told is None else now - told.asked
        known = told is not None and ago is not None and ago <= self._nodes.lease_seconds
        return (NodeStatus(0, self._nodes.addresses[0], ago, "leader" if known else "unknown",
                           (told.orders.generation or 0) if told else 0, None, 0, None,
                           told.orders.why if known and told else self._silence(told, now)),)

    def close(self) -> None:
        """One report more, so that the leader need not wait for the lease."""
        self._over = True
        if self._report is not None:
            self._report = self._report.model_copy(update={"stopping": True})
            with httpx2.Client(trust_env=False, timeout=1.0) as client:
                self._exchange(client)

    def closed(self, peer: tuple[str, int] | None) -> None:
        pass

    def _silence(self, told: _Told | None, now: float) -> str:
        if told is None:
            return f"{self._leader} has not told anything yet: {self._refused}"
        return (f"{self._leader} was last heard of {now - told.asked:.1f} s ago, and nodes.lease is "
                f"{self._nodes.lease_seconds:g} s: {self._refused}")

    # --- its own thread -----------------------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        pause = self._nodes.lease_seconds / ASKS_IN_A_LEASE
        with httpx2.Client(trust_env=False, timeout=self._nodes.lease_seconds / 2) as client:
            while not self._over:
                began = time.monotonic()
                if self._report is not None and began - self._reported < self._nodes.lease_seconds:
                    self._exchange(client)     # else our own loop has stopped: the leader must not think that we watch
                time.sleep(max(pause - (time.monotonic() - began), 0.01))

    def _exchange(self, client: httpx2.Client) -> None:
        report, asked = self._report, time.monotonic()
        assert report is not None
        try:
            answer = client.post(self._url, content=report.model_dump_json().encode(),
                                 headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"})
            if answer.status_code != 200:
                self._refused = f"it answered {answer.status_code}: {answer.text[:200]}"
                return
            orders = Orders.model_validate_json(answer.content)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            nobody = isinstance(error, httpx2.ConnectError) and "refused" in str(error)
            self._no_door = (self._no_door or asked) if nobody else None
            if nobody:
                self._ring()
            self._refused = f"{type(error).__name__}: {error}"
            return
        except ValidationError as error:
            self._refused = f"its answer is none of ours ({error.error_count()} faults)"
            return
        before, self._told, self._refused, self._no_door = self._told, _Told(orders, asked), "", None
        if before is None or before.orders != orders:
            self._ring()


def _recalled(orders: Orders, leader: str) -> Diagnosis:
    now = "runs none now" if orders.generation is None else f"runs generation {orders.generation} now"
    return Diagnosis(RECALLED, f"{leader} {now}: {orders.why}", (), "see the leader's status and journal: they tell the "
                     "cause", CAUSES[RECALLED].restart_helps)
