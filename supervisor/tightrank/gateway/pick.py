"""Where the next try of a request goes: pure, from the members' loads and standings.

Prefill by prompt tokens that wait, decode and plain workers by requests that run. An engine that is suspect is taken only
where none is up, one that is out never. A worker of role `both` is preferred to a pair: it needs no transfer.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from tightrank.gateway.peers import Member
from tightrank.gateway.records import Peer, Route, Standing

_ORDER = {Standing.UP: 0, Standing.SUSPECT: 1}


def pick(members: Iterable[Member], model: str | None, avoid: Collection[str], paired: Callable[[Peer, Peer], bool],
         pairs: bool = True) -> Route | None:
    """The best route to a peer of `model` (None: any) that is not in `avoid` (IDs); None: there is none.

    `pairs` False: plain workers only. `paired` says whether a transfer between two peers was seen to work.
    """
    usable = _usable(members, model, avoid)
    plain = [m for m in usable if m.peer.role == "both"]
    best_plain = min(plain, key=_running, default=None)
    best_pair = _pair(usable, paired) if pairs else None
    if best_pair is None or (best_plain is not None and best_plain.standing is Standing.UP):
        return Route(best_plain.peer) if best_plain is not None else None
    if best_plain is not None and any(m.standing is not Standing.UP for m in best_pair):
        return Route(best_plain.peer)
    return Route(best_pair[1].peer, best_pair[0].peer)


def serves(member: Member, model: str | None) -> bool:
    """Whether a request for `model` (None: any) may go there; a peer whose model nobody named takes any."""
    return model is None or member.peer.model in ("", model)


def _usable(members: Iterable[Member], model: str | None, avoid: Collection[str]) -> list[Member]:
    return [m for m in members if m.standing in _ORDER and m.peer.id not in avoid and serves(m, model)]


def _pair(usable: Sequence[Member], paired: Callable[[Peer, Peer], bool]) -> tuple[Member, Member] | None:
    prefills = [m for m in usable if m.peer.role == "prefill"]
    decodes = [m for m in usable if m.peer.role == "decode"]
    pairs = [(p, d) for p in prefills for d in decodes
             if (p.peer.engine, p.peer.model) == (d.peer.engine, d.peer.model)]
    return min(pairs, key=lambda pair: (_ORDER[pair[0].standing] + _ORDER[pair[1].standing],
                                        not paired(pair[0].peer, pair[1].peer),
                                        pair[0].queued_tokens, pair[1].running, pair[0].answered, pair[1].answered),
               default=None)


def _running(member: Member) -> tuple[int, int, int, float]:
    return _ORDER[member.standing], member.running, member.queued_tokens, member.answered


def any_role(members: Iterable[Member], model: str | None, avoid: Collection[str]) -> Route | None:
    """For what needs no prefill: /v1/models, /tokenize."""
    best = min(_usable(members, model, avoid), key=_running, default=None)
    return Route(best.peer) if best is not None else None
