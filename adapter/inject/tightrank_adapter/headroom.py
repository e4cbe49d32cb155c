"""What each rank may give to the KV cache, and which rank is the tightest. Pure; bytes throughout.

available for KV = min(the engine's own number, free on this rank now - headroom), then the minimum over all ranks of the
worker: engines size by a share of the device's memory, which binds alike on all ranks, while what a rank holds beside
weights and activations (communication buffers, contexts, the server's own processes) does not lie alike on them.
The supervisor loads this file by path.
"""
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

FAILED = -1


class Terms(NamedTuple):
    """One rank's numbers. `own_bytes` is what the engine itself would give to the KV cache; `later_bytes` is free now and
    in the engine's own plan for something else (graphs, state caches), so `own_bytes` is without it."""
    rank: int
    own_bytes: int
    free_bytes: int
    headroom_bytes: int
    later_bytes: int = 0

    @property
    def failed(self) -> bool:
        """Whether a rank could not tell: the engine's number or ours is missing."""
        return FAILED in self

    @property
    def left_bytes(self) -> int:
        """What the headroom leaves."""
        return self.free_bytes - self.later_bytes - self.headroom_bytes

    @property
    def available_bytes(self) -> int:
        return min(self.own_bytes, self.left_bytes)

    @property
    def bound(self) -> str:
        """"engine" or "headroom": which of the two is the smaller."""
        return "engine" if self.own_bytes <= self.left_bytes else "headroom"


def wanted_bytes(values: Dict[str, Any], rank: int, total_bytes: int, shared: bool) -> int:
    """The headroom of a rank, of the hook's values in settings.json.

    "fraction" of the rank's memory, or "bytes": one number for each rank, or one for all. "guard_bytes" come on top where
    the rank's memory is the host's, shared by the "ranks". Raises ValueError for a rank without a number.
    """
    if "fraction" in values:
        return int(values["fraction"] * total_bytes)
    sizes: List[int] = values["bytes"]
    if len(sizes) > 1 and rank >= len(sizes):
        raise ValueError("rank %d has no headroom: %d sizes are given" % (rank, len(sizes)))
    size = sizes[rank] if len(sizes) > 1 else sizes[0]
    return size + (values.get("guard_bytes", 0) // values.get("ranks", 1) if shared else 0)


def tightest(rows: Sequence[Terms]) -> Terms:
    """The rank that the KV cache of all is sized for; the lowest of equals. Raises ValueError without rows."""
    return min(rows, key=lambda row: (row.available_bytes, row.rank))


def of_fact(fact: Any) -> Optional[Terms]:
    """The terms that a rank wrote into its hello; None for anything else."""
    if not isinstance(fact, dict) or set(fact) != set(Terms._fields) or not all(type(value) is int for value in fact.values()):
        return None
    return Terms(**fact)


def sentence(rows: Sequence[Terms], values: Dict[str, Any]) -> str:
    """What decided, on which rank, with all terms of the sum. `values`: the hook's, which say what the headroom is made of.

    One row of several ranks speaks of that rank alone: its engine takes the minimum itself.
    """
    row = tightest(rows)
    others = ["rank %d %s" % (other.rank, _mib(other.available_bytes)) for other in rows if other.rank != row.rank]
    alone = len(rows) == 1 and values.get("ranks", 1) > 1
    head = "rank %d can give" % row.rank if alone else "rank %d is the tightest%s," % (
        row.rank, " (%s)" % ", ".join(others) if others else "")
    text = "%s %s to the KV cache: %s%s" % (head if alone else head + " with", _mib(row.available_bytes), _sum(row),
                                            _made_of(values))
    return "only observed, the engine's own number stands; it would be: " + text if values.get("observe") else text


def _sum(row: Terms) -> str:
    later = " - %s that the engine takes later" % _mib(row.later_bytes) if row.later_bytes else ""
    left = "%s free%s - %s headroom = %s" % (_mib(row.free_bytes), later, _mib(row.headroom_bytes), _mib(row.left_bytes))
    own = "the engine's own " + _mib(row.own_bytes)
    return "%s, under %s" % ((own, left) if row.bound == "engine" else (left, own))


def _made_of(values: Dict[str, Any]) -> str:
    terms = dict(values.get("terms", {}))
    if not terms:
        return ""
    guard = values.get("guard_bytes", 0)
    return "; headroom is " + " + ".join("%s %s" % (name, _mib(size)) for name, size in terms.items()) + (
        ", and of the guard's %s this rank's share where memory is the host's" % _mib(guard) if guard else "")


def _mib(size: int) -> str:
    return "%.1f MiB" % (size / (1 << 20))
