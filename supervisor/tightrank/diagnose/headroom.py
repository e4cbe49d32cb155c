"""What the hook `headroom` found on each rank, and what that says of a KV cache that is too small. Pure.

Engines size by a share of the device's memory and say so: "try to increase --mem-fraction-static". Where the headroom was
the bound, that changes nothing.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tightrank.adapter import headroom
from tightrank.records import Diagnosis, RankReading

if TYPE_CHECKING:
    from tightrank_adapter.headroom import Terms

_SHARES = ("--gpu-memory-utilization", "--mem-fraction-static")      # of the device's memory, as the engines call it
_CAUSES = ("kv-pool-too-small", "context-exceeds-kv-pool", "state-cache-too-small")


def rows(ranks: Sequence[RankReading]) -> list[Terms]:
    """The numbers of those ranks that told them."""
    found = (headroom.of_fact(rank.facts.get("headroom")) for rank in ranks)
    return sorted(row for row in found if row is not None)


def summary(terms: Sequence[Terms], values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """For the status: what bounds the KV cache, on which rank, with all terms; None: nobody has told. `values`: the hook's."""
    if not terms:
        return None
    least = headroom.tightest(terms)
    return {"tightest_rank": least.rank, "bound": least.bound, "available_bytes": least.available_bytes,
            "sentence": headroom.sentence(terms, dict(values)), "ranks": [dict(row._asdict()) for row in terms]}


def explained(diagnosis: Diagnosis, engine: str, terms: Sequence[Terms], values: Mapping[str, Any]) -> Diagnosis:
    """`diagnosis` with the bound, where it is about the KV cache's size and the headroom was the bound; advice to take a
    larger share, which would change nothing, is replaced. Our own message (it has the headroom's number) stands."""
    if diagnosis.cause not in _CAUSES or not terms or "observe" in values or "headroom_bytes" in diagnosis.numbers:
        return diagnosis
    least = headroom.tightest(terms)
    if least.bound != "headroom":
        return diagnosis
    summary = f"{diagnosis.summary.rstrip('.')}; the headroom is the bound: {headroom.sentence(terms, dict(values))}"
    if not any(share in diagnosis.change for share in _SHARES):
        return replace(diagnosis, summary=summary)
    own = "line.budget or headroom.pair_bytes" if "terms" in values else "headroom.reserve"
    # its first advice may be to ask for less, with the number that fits
    first = re.split(r"[,;] ", diagnosis.change)[0]
    less = "" if any(share in first for share in _SHARES) else f"{first}, or "
    change = f"{less}lower {own}, or free memory on rank {least.rank}; a larger share of the device's memory changes nothing"
    return replace(diagnosis, summary=summary, change=change)
