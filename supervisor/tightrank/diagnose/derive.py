"""Values for `change`, computed from the numbers of a line. Each takes the numbers and answers the words to fill in."""
from __future__ import annotations

from collections.abc import Mapping
from math import floor

from tightrank.diagnose.signature import Numbers


def lower_utilization(numbers: Numbers) -> Mapping[str, str]:
    """The largest utilization that the free memory allows, rounded down to a hundredth, with 1 % left over."""
    share = floor(numbers["free_bytes"] / numbers["total_bytes"] * 100 - 1) / 100
    return {"change": f"--gpu-memory-utilization {share:.2f}, or free the memory that others hold" if share > 0
            else "free the memory that others hold: almost none is free"}


def kv_gib(numbers: Numbers) -> Mapping[str, str]:
    space = floor(numbers["free_bytes"] / 2**30 - 1)
    return {"change": f"VLLM_CPU_KVCACHE_SPACE={space} at most (GiB, for each worker), or --kv-cache-memory-bytes "
                      f"{space << 30}" if space > 0 else "free host memory: too little is left for any KV cache"}


def half_the_requests(numbers: Numbers) -> Mapping[str, str]:
    """Memory of the warm-up grows with the requests: half of them takes half."""
    now = int(numbers["requests"])
    return {"fewer": f"--max-num-seqs {now // 2} (now {now})" if now > 1 else f"--max-num-seqs (now {now})"}


def tensor_parallel(numbers: Numbers) -> Mapping[str, str]:
    """The sizes that divide `heads`; of a large number only those up to 64 are of use."""
    heads = int(numbers["heads"])
    sizes = [str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0]
    words = sizes[0] if len(sizes) == 1 else f"{', '.join(sizes[:-1])} or {sizes[-1]}"
    return {"sizes": f"{words} ({'a divisor' if len(sizes) > 1 else 'the only divisor'} of {heads})"}


def host_cache(numbers: Numbers) -> Mapping[str, str]:
    """--hicache-size takes whole GB."""
    size = floor(numbers["free_bytes"] / 1e9)
    return {"change": f"--hicache-size {size} at most (GB, for each rank), or a lower --hicache-ratio" if size > 0 else
            "leave --enable-hierarchical-cache out: less than 1 GB is there for each rank"}


def state_slots(numbers: Numbers) -> Mapping[str, str]:
    slots = int(numbers["slots"])
    return {"fewer": f"--max-running-requests {slots} at most" if slots > 0 else "lower --max-running-requests"}
