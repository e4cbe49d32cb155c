"""What the hook `headroom` found on each rank, and what that says of a KV cache that is too small. Pure.

Engines size by a share of the device's memory and say so: "try to increase --mem-fraction-static". Where the headroom was
the bound, that changes nothing.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tightrank.adapter import headroom
from tightrank.records import Diagnosis, RankReading

if TYPE_CHECKING:
    from tightrank_adapter.headroom import Terms

# cause -> what must fit into the KV cache, by engine
_FLAGS: Mapping[str, Mapping[str, str]] = {
    "context-exceeds-kv-pool": {"vllm": "--max-model-len", "sglang": "--context-length", "atom": "--max-model-len"},
    "state-cache-too-small": {"vllm": "--max-num-seqs", "sglang": "--max-running-requests", "atom": "--max-num-seqs"},
    "kv-pool-too-small": {"vllm": "--max-num-seqs", "sglang": "--max-running-requests", "atom": "--max-num-seqs"},
}


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
    """`diagnosis` with what to change, where it is about the KV cache's size and the headroom was the bound."""
    if diagnosis.cause not in _FLAGS or not terms or headroom.tightest(terms).bound != "headroom" or "observe" in values:
        return diagnosis
    least = headroom.tightest(terms)
    said: str = headroom.sentence(terms, dict(values))
    return replace(diagnosis, summary=f"{diagnosis.summary.rstrip('.')}; the headroom is the bound: {said}",
                   change=f"lower {_FLAGS[diagnosis.cause][engine]}, or headroom.reserve, or free memory on rank {least.rank}; "
                          "a larger share of the device's memory changes nothing")
