"""The hook `headroom` where an engine has said what it would give to the KV cache; the arithmetic is headroom.py.

The only collective of ours, at start. Every rank whose engine has its number enters it, whatever went wrong with ours: it
sends FAILED then, and all ranks raise alike. A rank whose engine raised does not enter: the others may still be in a
collective of the engine's own, and a process that ends is what ends their wait, in that one and in ours.
"""
from typing import Any, Callable, List, Sequence

from . import boot, fault, headroom, memory, rank, wire

HOOK = "headroom"
Row = List[int]  # the fields of headroom.Terms
Gather = Callable[[Row], Sequence[Row]]


class HeadroomError(RuntimeError):
    """No rank may size its KV cache: what is raised inside the engine, alike on all ranks."""


def alone(row: Row) -> Sequence[Row]:
    """The gather of an engine that takes the minimum over its ranks itself."""
    return [row]


def nothing(engine: Any) -> int:
    """`later` where the engine takes nothing after it has sized."""
    return 0


def absent(number: int) -> Row:
    """The row of a rank that has no number of its engine's."""
    return list(headroom.Terms(number, *[headroom.FAILED] * 4))


def agree(own: Callable[[], int], number: int, gather: Gather, where: str, later: Callable[[], int] = lambda: 0) -> int:
    """Bytes for the KV cache of this rank: of `own()`, the engine's answer, and of what the other ranks say.

    `later()`: bytes that the engine's answer leaves out and that it takes only afterwards. What `own` raises passes on.
    Raises HeadroomError on all ranks when one failed, or when the headroom leaves nothing.
    """
    answer = int(own())
    observes = rank.settings().observes(HOOK)
    mine = headroom.Terms(number, answer, headroom.FAILED, headroom.FAILED, headroom.FAILED)
    mine = fault.tried(HOOK, where, fault.drilled(where, _measure), mine, not observes, number, answer, later)
    found = fault.tried(HOOK, where, gather, None, not observes, list(mine))
    rows = [headroom.Terms(*row) for row in found] if found is not None else [mine]
    if not mine.failed:
        fault.tried(HOOK, where, _tell, None, False, rows, mine)
    if observes:
        return answer
    if found is None:
        raise HeadroomError("tightrank: hook headroom failed on rank %d: it could not ask the other ranks" % number)
    return _decided(rows)


def _measure(number: int, own_bytes: int, later: Callable[[], int]) -> headroom.Terms:
    values = rank.settings().hooks[HOOK]
    cuda = memory.device()
    if cuda is not None and not rank.settings().observes(HOOK):
        cuda.empty_cache()  # what the allocator only keeps is free
    found = memory.rank_memory(values.get("ranks", 1))
    wanted = headroom.wanted_bytes(values, number, found.total_bytes, found.shared)
    return headroom.Terms(number, own_bytes, found.free_bytes, wanted, later())


def _tell(rows: Sequence[headroom.Terms], mine: headroom.Terms) -> None:
    """To the supervisor and to the log."""
    rank.fact(HOOK, dict(mine._asdict()))
    rank.hook(HOOK, wire.IN_FORCE)
    if not any(row.failed for row in rows):
        boot.complain("headroom: " + headroom.sentence(rows, rank.settings().hooks[HOOK]))


def _decided(rows: Sequence[headroom.Terms]) -> int:
    silent = [row.rank for row in rows if row.own_bytes == headroom.FAILED]
    if silent:
        raise HeadroomError("tightrank: the engine failed on rank %d before it could size its KV cache" % silent[0])
    failed = [row.rank for row in rows if row.failed]
    if failed:
        raise HeadroomError("tightrank: hook headroom failed on rank %d: without its numbers no rank can size its KV cache"
                            % failed[0])
    least = headroom.tightest(rows)
    if least.available_bytes <= 0 and least.bound == "headroom":
        raise HeadroomError(
            "tightrank: headroom leaves no memory for the KV cache: rank %d has %.2f GiB free and keeps %.2f GiB"
            % (least.rank, least.free_bytes / 2**30, least.headroom_bytes / 2**30))
    return least.available_bytes


def surround(owner: Any, name: str, number: Callable[[Any], int], gather: Callable[[Any], Gather],
             later: Callable[[Any], int] = nothing, refusal: Callable[[Any], str] = lambda engine: "") -> None:
    """Puts `agree` around the method `owner.name`, which answers bytes. All that is handed in gets the engine's object.

    `refusal`: why the headroom cannot hold in an engine that is configured so, alike on all ranks; "": it can.
    Raises fault.Missing when there is no such method.
    """
    original = fault.require(owner, name)
    where = "%s.%s" % (owner.__name__, name)

    def sized(self: Any, *args: Any, **kwargs: Any) -> int:
        observes = rank.settings().observes(HOOK)
        place = fault.tried(HOOK, where, lambda: (number(self), gather(self), refusal(self)), None, not observes)
        if place is None and not observes:
            raise HeadroomError("tightrank: hook headroom failed on rank %s: it cannot tell its place" % rank.number())
        if place is None or place[2]:
            rank.hook(HOOK, wire.FAILED, where, place[2] if place else "it cannot tell its place")
            return int(original(self, *args, **kwargs))
        return agree(lambda: original(self, *args, **kwargs), place[0], place[1], where, lambda: later(self))

    sized.__name__, sized.__doc__, sized.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
    sized.__tightrank__ = HOOK  # type: ignore[attr-defined]
    setattr(owner, name, sized)
