"""The arithmetic of an indexer's score budget: what a budget does to a chunk's peak, and to the line.

A sparse-attention indexer scores each of the T new rows of a chunk against all L+T keys. A chunk has P = T·(L+T) pairs
(token², the unit of the line's budget B) and holds c·P bytes at its peak. Of c, COPY_BYTES are a copy of the scores that
the engine makes in pieces of at most S bytes, its score budget. Pure, standard library only, no import of ours: the
supervisor's plan loads this file by path. Bytes throughout.
"""
from typing import Any

COPY_BYTES = 4   # fp32, of each pair
PAIR_BYTES = 14  # c as published for DeepSeek V4.1: 2.97 GB at T=2048, L=100k under a budget (1 GiB) that did not bind


def _check(pairs_or_bytes: int, budget_bytes: int, pair_bytes: int) -> None:
    if pairs_or_bytes < 0 or budget_bytes < 0:
        raise ValueError("%d, budget_bytes=%d: must be at least 0" % (pairs_or_bytes, budget_bytes))
    if pair_bytes <= COPY_BYTES:
        raise ValueError("pair_bytes=%d: must be more than the %d of one copy" % (pair_bytes, COPY_BYTES))


def peak_bytes(pairs: int, budget_bytes: int, pair_bytes: int = PAIR_BYTES) -> int:
    """Bytes at the peak of a chunk of `pairs` (token²): (c - 4)·P + min(4·P, S).

    `pair_bytes` is c under a budget that does not bind. Raises ValueError for values outside their range.

    >>> peak_bytes(205_000_000, 1 << 30), peak_bytes(205_000_000, 256 << 20)
    (2870000000, 2318435456)
    """
    _check(pairs, budget_bytes, pair_bytes)
    return (pair_bytes - COPY_BYTES) * pairs + min(COPY_BYTES * pairs, budget_bytes)


def largest_pairs(memory_bytes: int, budget_bytes: int, pair_bytes: int = PAIR_BYTES) -> int:
    """The most pairs (token²) of a chunk whose peak fits in `memory_bytes`: the line's B for that much memory.

    >>> largest_pairs(2_870_000_000, 1 << 30), largest_pairs(2_870_000_000, 256 << 20)
    (205000000, 260156454)
    """
    _check(memory_bytes, budget_bytes, pair_bytes)
    whole = memory_bytes // pair_bytes
    return max(whole, (memory_bytes - budget_bytes) // (pair_bytes - COPY_BYTES))


def derived_budget_bytes(wanted_bytes: int, fixed_bytes: int, fraction: float, available_bytes: int) -> int:
    """What stands in for a budget that an engine derives from free memory: never more than `wanted_bytes`.

    The engine's formula (SGLang's mqa_logits_budget_bytes) is min(fraction × free, fixed_bytes), of which fixed_bytes
    comes from the device's size alone. On devices that use the host's memory its `free` is MemFree, in which page cache
    that could be dropped is missing; available_bytes takes its place.
    """
    return max(1, min(wanted_bytes, fixed_bytes, int(fraction * available_bytes)))


def has_indexer(model: Any) -> bool:
    """Whether a layer of a torch model is an indexer, by its own name or its class's.

    So all are named that SGLang 0.5.22, 0.5.23 and vLLM 0.32, 0.33 have: DeepSeek V3.2, V4 and V4.1, GLM, Qwen's QSA.
    """
    return any("indexer" in (name + type(layer).__name__).lower() for name, layer in model.named_modules())
