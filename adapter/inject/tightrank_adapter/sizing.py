"""The hook `headroom` where an engine has said what it would give to the KV cache; the arithmetic is headroom.py.

The only collective of ours, at start. Every rank enters it, whatever went wrong on it: a rank that could not tell its
numbers sends FAILED, and then all ranks raise alike. A rank that left the others waiting would hang them.
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


def agree(own: Callable[[], int], number: int, gather: Gather, where: str) -> int:
    """Bytes for the KV cache of this rank: of `own()`, the engine's answer, and of what the other ranks say.

    What `own` raises passes on, after the other ranks were told. Raises HeadroomError on all ranks when one failed, or
    when the headroom leaves nothing.
    """
    mine = headroom.Terms(number, headroom.FAILED, headroom.FAILED, headroom.FAILED)
    try:
        answer = int(own())
        mine = mine._replace(own_bytes=answer)
        mine = fault.tried(HOOK, where, fault.drilled(where, _measure), mine, True, number, answer)
    finally:
        rows = [headroom.Terms(*row) for row in gather(list(mine))]
    if not mine.failed:
        fault.tried(HOOK, where, _tell, None, False, rows, mine)
    return answer if rank.settings().observes(HOOK) else _decided(rows)


def _measure(number: int, own_bytes: int) -> headroom.Terms:
    values = rank.settings().hooks[HOOK]
    cuda = memory.device()
    if cuda is not None:
        cuda.empty_cache()  # what the allocator only keeps is free
    found = memory.rank_memory(values.get("ranks", 1))
    wanted = headroom.wanted_bytes(values, number, found.total_bytes, found.shared)
    return headroom.Terms(number, own_bytes, found.free_bytes, wanted)


def _tell(rows: Sequence[headroom.Terms], mine: headroom.Terms) -> None:
    """Says what was found, to the supervisor and to the log."""
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


def surround(owner: Any, name: str, number: Callable[[Any], int], gather: Callable[[Any], Gather]) -> None:
    """Puts `agree` around the method `owner.name`, which answers bytes. `number`, `gather`: of the engine's object.

    Raises fault.Missing when there is no such method.
    """
    original = fault.require(owner, name)
    where = "%s.%s" % (owner.__name__, name)

    def sized(self: Any, *args: Any, **kwargs: Any) -> int:
        return agree(lambda: original(self, *args, **kwargs), number(self), gather(self), where)

    sized.__name__, sized.__doc__, sized.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
    sized.__tightrank__ = HOOK  # type: ignore[attr-defined]
    setattr(owner, name, sized)
