"""One worker over several hosts. Each host runs a supervisor; that of node 0 leads, the others are members.

Every member asks the leader a few times a second: it says what it is (`Report`) and is told what to run (`Orders`). An
exchange shows each side that the other lives, in both directions; a stream would show the one who writes nothing. A side that
has not had one for `nodes.lease` takes the other for lost and ends its ranks; where the other's system closes or refuses the
connection, its supervisor is dead (and its ranks with it), and that is known at once. Who leads is no matter of votes: the
engine's rank 0 is the leader's, and without it there is nothing to serve.

A generation is fenced by its number and by the leader's supervisor. It starts when all members were heard of, are clean and
agree on configuration, adapter, engine and model; a member takes a number once and only a higher one than before, and runs it
for that supervisor alone. So what wakes up in an old generation finds its lease over, ends its ranks and reports that.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tightrank.config import Config
from tightrank.nodes.agreement import agreement
from tightrank.nodes.leader import Leader
from tightrank.nodes.member import Member
from tightrank.numbering import Generations
from tightrank.records import NodeOwn, NodeStatus, NodesView, WorkerView

__all__ = ["Alone", "Leader", "Member", "Others", "agreement", "others"]


class Others(Protocol):
    """The other hosts, as the tick sees them."""
    pause_seconds: float                       # the longest that a tick may be away

    def view(self, view: WorkerView, now: float) -> NodesView | None:
        """What they mean for the worker; None: there are none."""
        ...

    def publish(self, own: NodeOwn, now: float) -> None:
        """Tells them how the worker is, after a tick."""
        ...

    def next_generation(self, worker: str) -> int:
        """The number of the generation that starts now. Raises OSError when it cannot be kept."""
        ...

    def rows(self, now: float) -> tuple[NodeStatus, ...]: ...

    def closed(self, peer: tuple[str, int] | None) -> None:
        """A client's connection has ended; from the HTTP thread."""
        ...

    def close(self) -> None: ...


class Alone:
    """One host."""
    pause_seconds = 3600.0

    def __init__(self, generations: Generations) -> None:
        self.next_generation = generations.next

    def view(self, view: WorkerView, now: float) -> NodesView | None:
        return None

    def publish(self, own: NodeOwn, now: float) -> None:
        pass

    def rows(self, now: float) -> tuple[NodeStatus, ...]:
        return ()

    def closed(self, peer: tuple[str, int] | None) -> None:
        pass

    def close(self) -> None:
        pass


def others(config: Config, token: str, alike: Mapping[str, str], generations: Generations,
           ring: Callable[[], None]) -> Alone | Leader | Member:
    """`alike`: what all hosts must have alike (`agreement`). `ring` ends the wait between two ticks."""
    if not config.nodes.addresses:
        return Alone(generations)
    if config.nodes.rank == 0:
        return Leader(config.nodes, alike, generations, ring)
    return Member(config.nodes, config.http.port, token, alike, generations, ring)
