"""What the guard's levels ask of a running engine, here and on the worker's other hosts: its line's budget, what is refused,
what is ended. The budget of a worker is that of its tightest host: all ranks of an engine must cut chunks alike."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from tightrank import engines
from tightrank.adapter import pages
from tightrank.readers.engine_http import Prober
from tightrank.records import NodesView, Shed, WorkerReading, WorkerSpec

BUDGET_SECONDS = 1.0               # between two requests with the same budget; a rank says it with its next look

Say = Callable[[str, str, Mapping[str, object]], None]


class Steering:
    """Of one generation. `budget`, `shed` and `aborts` are of this host's own levels; what is in force may be less."""

    def __init__(self, spec: WorkerSpec, control: pages.ControlWriter | None, say: Say, now: float) -> None:
        self.budget = spec.line.budget if spec.line else None
        self.shed: Shed | None = None
        self.aborts, self.abort_why = 0, ""
        self._spec, self._control, self._say = spec, control, say
        self._others: NodesView | None = None
        self._in_force = self.budget
        self._sent: Future[str] | None = None
        self._due = now
        self._refused: set[str] = set()

    # --- what is in force ---------------------------------------------------------------------------------------------

    @property
    def budget_in_force(self) -> int | None:
        """Token²: what the engine is to keep."""
        return self._in_force

    @property
    def shed_in_force(self) -> Shed | None:
        """The one that refuses most."""
        found = [shed for shed in (self.shed, self._others.shed if self._others else None) if shed is not None]
        return min(found, key=lambda shed: shed.new_tokens, default=None)

    @property
    def aborts_in_force(self) -> tuple[int, str]:
        """How many so far, and why the last one."""
        others, why = (self._others.aborts, self._others.abort_why) if self._others else (0, "")
        return self.aborts + others, self.abort_why or why

    # --- what changes it ----------------------------------------------------------------------------------------------

    def tell_budget(self, budget: int, now: float) -> None:
        """This host's, from now on."""
        self.budget = budget
        self._settle(now)

    def hear_others(self, others: NodesView, now: float) -> None:
        """What the other hosts allow. One that is not heard of any more says nothing: its last word stands."""
        last = self._others
        if others.budget is None and last is not None:
            others = others.with_steering_of(last)
        self._others = others
        if self._settle(now) and others.budget is not None and self.budget is not None:
            bound = others.budget < self.budget
            self._say("line", f"the line's budget is {self._in_force:,} token²: " + (
                f"{others.budget_from} allows no more" if bound else "this host allows no more"), {"budget": self._in_force})

    def abort(self, why: str) -> None:
        """For the gateway, which knows the requests."""
        self.aborts, self.abort_why = self.aborts + 1, why

    def _settle(self, now: float) -> bool:
        """vLLM's scheduler reads it from the page; others are asked (`step`). Whether it is another one."""
        allowed = [each for each in (self.budget, self._others.budget if self._others else None) if each is not None]
        budget = min(allowed, default=None) if self.budget is not None else None
        if budget is None or budget == self._in_force:
            return False
        self._in_force, self._due = budget, now
        if self._control is not None:
            self._control.publish(budget)
        return True

    def step(self, prober: Prober, reading: WorkerReading, now: float) -> None:
        """Asks the engine again until each rank that tells its budget has ours. Where it is read from the page: nothing; on a
        member neither, whose ranks hear it of the leader's engine."""
        if self._in_force is None or self._spec.node:
            return
        call = engines.get(self._spec.engine).budget(self._spec, self._in_force)
        told = {rank.facts["line_budget"] for rank in reading.ranks if "line_budget" in rank.facts}
        if call is None or told <= {self._in_force}:
            return
        if self._sent is not None and self._sent.done():
            why, self._sent = self._sent.result(), None
            if why and why not in self._refused:
                self._refused.add(why)
                self._say("line", f"the engine was told the line's budget and refused: {why}", {})
        if self._sent is None and now >= self._due:
            self._sent, self._due = prober.send(call), now + BUDGET_SECONDS
