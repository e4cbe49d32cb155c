"""DeepSeek-V4's caches in SGLang: pages of entries by ratio, slots of windows, rings of the compressors' states. Pure.

Source: SGLang 0.5.23 model_executor/pool_configurator.py, DSV4PoolConfigurator, as it is without speculation, without its
unified pool and with the layout V4. The windows are a share of the tokens, or as many as the most requests at once can need.
"""
from __future__ import annotations

from dataclasses import dataclass

from tightrank.plan import kv
from tightrank.plan.shape import ModelShape

_SHARE = 0.1                           # window slots for each token where the most requests are not set
_ALIGNMENT = 576                       # of a page of FP8 entries, bytes
_RINGS = {4: 8, 128: 128}              # rows of a compressor's state for each request
_EVERY = 128                           # tokens between two evictions from a window (SGLANG_SWA_EVICTION_INTERVAL)
_TAILS = 4                             # cached prefixes for each request whose window is kept
_USUAL_REQUESTS = 2048
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """`token_bytes`: of a token in all layers; `slot_bytes`: of a token in all windows; `fixed_bytes`: of the states that every
    request has, and of `slots` where they are fixed (None: a share of the tokens)."""
    token_bytes: float
    slot_bytes: float
    slots: int | None
    fixed_bytes: float

    def tokens(self, pool_bytes: int, page: int) -> int:
        share = _SHARE if self.slots is None else 0
        return int(max(pool_bytes - self.fixed_bytes, 0) / (self.token_bytes + share * self.slot_bytes)) // page * page

    def held_bytes(self, tokens: int) -> float:
        slots = _SHARE * tokens if self.slots is None else 0
        return self.fixed_bytes + self.token_bytes * tokens + slots * self.slot_bytes


def sizes(shape: ModelShape, how: kv.Storage, page: int, requests: int | None, in_flight: int, layers: range) -> Sizes:
    """Of a rank that holds `layers`. `requests`: the most at once, as asked for; `in_flight`: tokens of all steps at once."""
    ratios = [ratio for layer, ratio in enumerate(shape.layers.ratios or ()) if layer in layers]
    entry, dim = kv.entry_bytes(shape, how, 1) or 0.0, shape.head_dim or 0
    index_dim = shape.indexer.head_dim if shape.indexer else 0
    state = 4 * (dim + index_dim) * _FLOAT_BYTES * _RINGS[4] / page
    slot = len(ratios) * _paged(entry, page, how) + ratios.count(4) * state
    each = sum((_paged(entry, max(page // ratio, 1), how) + _index(shape, how, ratio)) / ratio for ratio in ratios if ratio)
    slots = _slots(shape, page, requests, in_flight) if requests and each else None
    rows = -(-(((requests or _USUAL_REQUESTS) + 2) * _RINGS[128] + 1) // 128) * 128
    fixed = rows * 2 * dim * _FLOAT_BYTES * ratios.count(128) + (slots or 0) * slot
    return Sizes(each, slot, slots, fixed)


def _paged(entry: float, page: int, how: kv.Storage) -> float:
    """Bytes of an entry with its part of the page's padding."""
    return -(-int(page * entry) // _ALIGNMENT) * _ALIGNMENT / page if how.is_fp8 else entry


def _index(shape: ModelShape, how: kv.Storage, ratio: int) -> float:
    """The index keys of ratios 1 and 2 are FP4 whatever the others are."""
    if shape.indexer is None or ratio > 4:
        return 0.0
    return kv.index_bytes(shape, how) if ratio == 4 else shape.indexer.head_dim / 2 + shape.indexer.head_dim // 32


def _slots(shape: ModelShape, page: int, requests: int, in_flight: int) -> int:
    """compute_swa_request_cap, and the windows of cached prefixes."""
    window = shape.layers.window_tokens or 0
    cap = requests * (window + _EVERY + 2 * page) + in_flight + page
    return -(-(cap + _TAILS * requests * (window + page)) // page) * page
