"""What an attention indexer's scores hold at the peak of one prefill chunk. Pure; bytes, and pairs of (new token, key).

Placeholder of the branch `indexer`.
"""
PAIR_BYTES, COPY_BYTES = 14, 4


def peak_bytes(pairs: int, budget_bytes: int, pair_bytes: int = PAIR_BYTES) -> int:
    return (pair_bytes - COPY_BYTES) * pairs + min(COPY_BYTES * pairs, budget_bytes)


def largest_pairs(memory_bytes: int, budget_bytes: int, pair_bytes: int = PAIR_BYTES) -> int:
    return max(memory_bytes // pair_bytes if COPY_BYTES * (memory_bytes // pair_bytes) <= budget_bytes else 0,
               (memory_bytes - budget_bytes) // (pair_bytes - COPY_BYTES))
