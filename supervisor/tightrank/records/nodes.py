"""What the other hosts of a worker mean for it."""
from __future__ import annotations

from dataclasses import dataclass, replace

from tightrank.records.life import Diagnosis, Phase, Shed


@dataclass(frozen=True, slots=True)
class NodesView:
    """Of one worker whose ranks live on several hosts, at this moment.

    On the leader `blocked` says why no generation can start ("": one can), and `whole` whether the ranks of all other hosts
    are in force. On a member `wanted` is the generation that it is to run (None: none), `admitted` whether that one is up at
    the leader. `trouble`: why this generation must end here.
    """
    leads: bool
    trouble: Diagnosis | None = None
    blocked: str = ""
    whole: bool = False
    wanted: int | None = None
    admitted: bool = False
    budget: int | None = None          # leader: the least that another host allows, token²; None: not known now
    budget_from: str = ""              # which host that is
    shed: Shed | None = None           # leader: of the host that refuses most
    aborts: int = 0                    # leader: of all other hosts, in this generation
    abort_why: str = ""

    def with_steering_of(self, earlier: NodesView) -> NodesView:
        """This, with what an earlier look knew of budgets and levels."""
        return replace(self, budget=earlier.budget, budget_from=earlier.budget_from, shed=earlier.shed, aborts=earlier.aborts,
                       abort_why=earlier.abort_why)


@dataclass(frozen=True, slots=True)
class NodeOwn:
    """How the worker is on this host after a tick, for the others. `ready`: all its ranks of this host are there and every
    wanted hook is in force; `stopping`: the supervisor is being ended."""
    name: str
    phase: Phase
    generation: int
    drains: bool
    stopping: bool
    ready: bool
    diagnosis: Diagnosis | None
    budget: int | None                 # token², that this host allows
    shed: Shed | None
    aborts: int
    abort_why: str
    available_bytes: int | None
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One host of a worker as another one knows it."""
    node: int
    address: str
    heard_seconds_ago: float | None    # None: never
    phase: str
    generation: int
    available_bytes: int | None
    floor_bytes: int
    budget: int | None                 # of the line, token², that this host allows
    reason: str                        # why it is not ready, "" when it is
