"""DeepSeek-V4's caches in vLLM: five kinds of pages side by side in one block, as its grouping packs them. Pure.

Each layer keeps a window of its own; one that compresses an entry for `ratio` tokens and the compressor's state; one of ratio 4
the same for its indexer. Sources: vLLM 0.32 models/deepseek_v4/attention.py and compressor.py (pages, block sizes),
v1/core/kv_cache_utils.py, _get_packed_kv_cache_groups (groups). A test holds it against that code.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tightrank.plan import kv
from tightrank.plan.shape import ModelShape

BLOCK = 256                            # the kernels know no other size
KNOWN_RATIOS = frozenset((0, 4, 128))
_WINDOW_BLOCK = 64
_STATE_BLOCKS = {4: 4, 128: 8}         # of a compressor's state, by ratio
_FP8_ALIGNMENT, _ALIGNMENT = 576, 512  # of a page, bytes
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of one layer. `window`: it keeps the last tokens alone; None: all."""
    layer: int
    block: int
    page_bytes: int
    window: int | None = None


def caches(shape: ModelShape, how: kv.Storage) -> list[Cache]:
    """Of all layers."""
    ratios, dim, window = shape.layers.ratios or (), shape.head_dim or 0, shape.layers.window_tokens or 0
    entry = kv.entry_bytes(shape, how, 1) or 0.0
    found = []
    for layer, ratio in enumerate(ratios):
        found.append(Cache(layer, _WINDOW_BLOCK, _page(_WINDOW_BLOCK * entry, how), window))
        if ratio > 1:
            found += _compressed(layer, ratio, entry, dim, how)
        if ratio == 4 and shape.indexer is not None:
            found += _compressed(layer, ratio, kv.index_bytes(shape, how), shape.indexer.head_dim, how)
    return found


def _compressed(layer: int, ratio: int, entry: float, dim: int, how: kv.Storage) -> list[Cache]:
    """The entries, and the compressor's keys and scores in float32: of twice as many tokens where ratios overlap (4)."""
    overlap = 2 if ratio == 4 else 1
    block = _STATE_BLOCKS.get(ratio, ratio)
    state = _page(block * 2 * overlap * dim * _FLOAT_BYTES, how)
    return [Cache(layer, BLOCK, _page(BLOCK // ratio * entry, how)), Cache(layer, block, state, overlap * ratio)]


def _page(size: float, how: kv.Storage) -> int:
    step = _FP8_ALIGNMENT if how.is_fp8 else _ALIGNMENT
    return -(-int(size) // step) * step


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Caches that need the same number of blocks; `pages`: page size -> its caches."""
    pages: Mapping[int, list[Cache]]

    @property
    def first(self) -> Cache:
        return next(iter(self.pages.values()))[0]

    @property
    def count(self) -> int:
        return sum(map(len, self.pages.values()))

    @property
    def repeats(self) -> int:
        return max(map(len, self.pages.values()))

    @property
    def balanced(self) -> bool:
        """As many caches of each page size, so that it may be split."""
        return len(set(map(len, self.pages.values()))) == 1

    def widest(self, groups: int) -> int:
        """Bytes of the largest of so many groups."""
        return sum(-(-len(found) // groups) * size for size, found in self.pages.items())


def groups(found: Sequence[Cache]) -> list[list[Cache]]:
    """vLLM's groups: a block of the pool holds one page of each cache of any one of them."""
    buckets = _buckets(found)
    least = max((bucket.repeats for bucket in buckets if bucket.balanced and len(bucket.pages) > 1), default=0)
    repeats = _least_padding([bucket.repeats for bucket in buckets if bucket.balanced], least) if least else None
    counts = [-(-bucket.repeats // repeats) if bucket.balanced and repeats is not None else 1 for bucket in buckets]
    states = [repeats is None and bucket.first.window is not None for bucket in buckets]
    anchor = max(bucket.widest(bucket.count if state else count)
                 for bucket, count, state in zip(buckets, counts, states, strict=True))
    made: list[list[Cache]] = []
    for bucket, count, state in zip(buckets, counts, states, strict=True):
        if state:
            count = max(count, -(-bucket.count // max(anchor // bucket.first.page_bytes, 1)))
        made += _split(bucket, count)
    return made


def _buckets(found: Sequence[Cache]) -> list[_Bucket]:
    sorted_out: dict[tuple[int, int | None], dict[int, list[Cache]]] = {}
    for cache in found:
        sorted_out.setdefault((cache.block, cache.window), {}).setdefault(cache.page_bytes, []).append(cache)
    return [_Bucket(pages) for pages in sorted_out.values()]


def _split(bucket: _Bucket, count: int) -> list[list[Cache]]:
    if count == 1:
        return [[cache for found in bucket.pages.values() for cache in found]]
    repeats = list(zip(*bucket.pages.values(), strict=False))
    return [[cache for repeat in repeats[number::count] for cache in repeat] for number in range(count)]


def _least_padding(counts: Sequence[int], least: int) -> int:
    """To multiples of which `counts` are rounded up with the least waste, from `least` on; the largest such number."""
    sizes = range(max(1, least), max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size)) if sizes else least


def block_bytes(made: Sequence[Sequence[Cache]], layers: range) -> int:
    """Of a block on a rank that holds `layers`."""
    return max(sum(cache.page_bytes for cache in group if cache.layer in layers) for group in made)


def request_blocks(made: Sequence[Sequence[Cache]], context: int, in_flight: int) -> int:
    """Blocks of one request at the maximum length."""
    return sum(_blocks(group[0], context, in_flight) for group in made)


def _blocks(cache: Cache, context: int, in_flight: int) -> int:
    if cache.window is None:
        return -(-context // cache.block)
    return -(-min(cache.window - 1 + in_flight, context) // cache.block) + 1
