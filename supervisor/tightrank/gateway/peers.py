"""The table of peers: the latest that is known of each engine, its standing, and what it has in flight.

Two sources change a standing. A supervisor tells phases and generations: what it calls up is up, what it calls anything else
is out, and the legs of a generation that ended fail at once. Our own legs and probes tell the rest: a refused connection or a
failed probe is out, whatever else is odd is suspect until a probe has answered.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tightrank.gateway.pace import Pace, joined
from tightrank.gateway.records import Failure, LegFailed, Peer, Pulse, Standing

_FACTS = (Failure.REFUSED, Failure.FROZEN)
_NO_FAULT = (Failure.BUSY, Failure.ABORTED)


class Held(Protocol):
    """What stands and falls with a peer: a leg in flight, or a finished prefill whose KV is still to be fetched."""
    opened: float                          # CLOCK_MONOTONIC

    @property
    def waiting_tokens(self) -> int:
        """Of a prompt whose answer has not begun."""

    def fail(self, failure: LegFailed) -> None:
        """Ends it now, with this reason. May be called twice."""


@dataclass(slots=True)
class Member:
    """One peer with what changes about it."""
    peer: Peer
    standing: Standing
    why: str = ""
    since: float = field(default_factory=time.monotonic)
    legs: set[Held] = field(default_factory=set)
    queued_tokens: int = 0                 # of prompts whose answer has not begun
    running: int = 0                       # requests
    pace: Pace = field(default_factory=Pace)
    answered: float = 0.0                  # when it last began an answer
    pulse: tuple[Pulse, float] | None = None   # the last one and when it was asked for


class Peers:
    """All members. `on_doubt` is called for each member that is not up and could be asked whether it is; `on_change` after
    every change of a standing."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.on_doubt: Callable[[Member], None] = lambda member: None
        self.on_change: Callable[[], None] = lambda: None

    # --- what is told -------------------------------------------------------------------------------------------------

    def named(self, peers: Iterable[Peer]) -> None:
        """Engines without a supervisor: suspect until a probe has answered."""
        for peer in peers:
            self._add(Member(peer, Standing.SUSPECT, "not asked yet"))

    def told(self, supervisor: str, peers: Iterable[Peer]) -> None:
        """The whole list of one supervisor's workers, as they are now."""
        peers = list(peers)
        for peer in peers:
            member = self.members.get(peer.id)
            if member is None:
                self._add(Member(peer, *_told_standing(peer)))
            else:
                self._update(member, peer)
        here = {peer.id for peer in peers}
        for member in [m for m in self.members.values() if m.peer.supervisor == supervisor and m.peer.id not in here]:
            self._end_legs(member, "its supervisor knows it no more")
            del self.members[member.peer.id]
        self.on_change()

    def ended(self, peer_id: str, generation: int, why: str) -> None:
        """A generation is being ended; the list that says what it is now will come."""
        member = self.members.get(peer_id)
        if member is not None and member.peer.generation == generation and member.peer.running:
            member.peer = replace(member.peer, phase="stopping", reason=why, drains=False)
            self._end_legs(member, why)
            self._stand(member, *_told_standing(member.peer))

    def unheard(self, supervisor: str, why: str) -> None:
        """The supervisor's stream is lost: what it said may be over."""
        for member in self.members.values():
            if member.peer.supervisor == supervisor and member.standing is Standing.UP:
                self._stand(member, Standing.SUSPECT, why)

    def _update(self, member: Member, peer: Peer) -> None:
        old, member.peer = member.peer, peer
        if peer.generation != old.generation or (old.running and not peer.running):
            self._end_legs(member, peer.reason or f"generation {old.generation} has ended", old)
        if peer.generation == old.generation and peer.aborts > old.aborts:
            _abort_largest(member)
        if peer.generation != old.generation or peer.up != old.up:
            self._stand(member, *_told_standing(peer))
        elif not peer.up:
            member.why = peer.reason
        elif member.standing is not Standing.UP:
            self.on_doubt(member)

    # --- what we saw ourselves ----------------------------------------------------------------------------------------

    def failed(self, failure: LegFailed) -> None:
        """Takes in how a leg failed. An engine that is busy, or short of memory, is a healthy one."""
        member = self.members.get(failure.peer.id)
        if member is None or member.peer.generation != failure.peer.generation or failure.kind in _NO_FAULT:
            return
        if failure.kind is not Failure.ENDED and member.peer.up:
            out = failure.kind in _FACTS or member.standing is Standing.OUT
            self._stand(member, Standing.OUT if out else Standing.SUSPECT, failure.sentence)

    def probed(self, member: Member, failure: LegFailed | None) -> None:
        """A probe was answered (None), or spoke against it."""
        if not member.peer.up:
            return
        if failure is None:
            self._stand(member, Standing.UP, "")
        elif failure.kind is not Failure.SILENT or not member.legs:    # silent beside our legs: it may be busy with them
            self._stand(member, Standing.OUT, failure.sentence)

    # --- what others read ---------------------------------------------------------------------------------------------

    def of(self, peer: Peer) -> Member | None:
        """The member, when it still is in the generation of `peer`."""
        member = self.members.get(peer.id)
        return member if member is not None and member.peer.generation == peer.generation else None

    def pace(self, member: Member) -> Pace:
        """Its own pace, or what like engines took."""
        if member.pace.prompt_seconds is not None:
            return member.pace
        like = [other.pace for other in self.members.values()
                if (other.peer.engine, other.peer.role, other.peer.model) ==
                (member.peer.engine, member.peer.role, member.peer.model)]
        return joined(like)

    def to_json(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [{"id": m.peer.id, "name": m.peer.name, "engine": m.peer.engine, "role": m.peer.role, "url": m.peer.url,
                 "model": m.peer.model, "supervisor": m.peer.supervisor, "generation": m.peer.generation,
                 "phase": m.peer.phase or None, "standing": m.standing.value, "why": m.why, "cause": m.peer.cause,
                 "change": m.peer.change or None, "runbook": m.peer.runbook or None,
                 "since_seconds": round(now - m.since, 3), "legs": len(m.legs), "queued_tokens": m.queued_tokens,
                 "running": m.running, "longest_prompt_tokens": m.peer.longest_prompt_tokens}
                for m in self.members.values()]

    # --- how ----------------------------------------------------------------------------------------------------------

    def _add(self, member: Member) -> None:
        self.members[member.peer.id] = member
        if member.standing is not Standing.UP and member.peer.up:
            self.on_doubt(member)

    def _stand(self, member: Member, standing: Standing, why: str) -> None:
        if member.standing is not standing:
            member.since = time.monotonic()
        member.standing, member.why = standing, why
        if standing is not Standing.UP and member.peer.up:
            self.on_doubt(member)
        self.on_change()

    def _end_legs(self, member: Member, why: str, peer: Peer | None = None) -> None:
        for leg in list(member.legs):
            leg.fail(LegFailed(Failure.ENDED, peer or member.peer, why))


def _abort_largest(member: Member) -> None:
    """Ends the longest prompt that waits there for its first token, if there is one."""
    victim = max(member.legs, key=lambda leg: leg.waiting_tokens, default=None)
    if victim is not None and victim.waiting_tokens:
        victim.fail(LegFailed(Failure.ABORTED, member.peer, f"memory is short there; {member.peer.abort_why}"))


def _told_standing(peer: Peer) -> tuple[Standing, str]:
    return (Standing.UP, "") if peer.up else (Standing.OUT, peer.reason or f"it is {peer.phase}")
