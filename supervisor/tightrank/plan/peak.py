"""What a prefill chunk takes on top of what a rank holds: its activations, and the scores of an attention indexer. Pure.

With T new rows over L+T keys, P = T·(L+T) pairs: scores of free·P + min(bounded·P, bound) bytes. Dense indexers have no bound
(DeepSeek-V4.1 on SGLang: 14 bytes a pair, published); those that work row by row hold one buffer of a fixed size. Under
context parallelism a rank scores its part of the rows.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightrank.adapter import indexer
from tightrank.config import Config
from tightrank.plan.kv import element_bytes
from tightrank.plan.shape import ModelShape
from tightrank.plan.terms import ASSUMED, MEASURED, READ
from tightrank.records import WorkerSpec

_SCORE_BYTES = 4                       # float32
_VLLM_SCORES_MIB = 512                 # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, envs.py
_ROW_BOUNDED = ("deepseek_v32", "glm_moe_dsa")      # both engines score them in pieces
_PUBLISHED = "docs of the published analysis: 2.97 GB at 2048 x 100k, 2.6 GB at 1024 x 208k"
_V4_CPU = "measured on a tiny DeepSeek-V4: 1.00 byte a pair"
_SHAPE = "the widest place of a layer"


@dataclass(frozen=True, slots=True)
class Peak:
    """`row_bytes`: of each new row. `with_rows`: what a pair holds was measured together with the rows, so the larger counts
    and not the sum. `bound_bytes`: None: `bounded` is bounded by nothing. `ranks`: that share a chunk's rows."""
    row_bytes: float
    free: float
    bounded: float
    bound_bytes: int | None
    with_rows: bool
    ranks: int
    formula: str
    origin: str
    source: str

    def scores(self, pairs: float) -> float:
        """Bytes on one rank for `pairs` (token²) of the whole chunk."""
        mine = pairs / self.ranks
        held = self.bounded * mine
        return self.free * mine + (held if self.bound_bytes is None else min(held, self.bound_bytes))

    def bytes(self, tokens: int, prefix: int) -> float:
        """On one rank, of a chunk of `tokens` behind `prefix`."""
        rows, scores = self.row_bytes * tokens / self.ranks, self.scores(tokens * (prefix + tokens))
        return max(rows, scores) if self.with_rows else rows + scores

    def pairs(self, memory_bytes: float, tokens: int) -> int | None:
        """The most pairs (token²) that chunks of up to `tokens` may have in `memory_bytes`; None: as many as one likes."""
        rows = self.row_bytes * tokens / self.ranks
        left = memory_bytes if self.with_rows else memory_bytes - rows
        if left < 0 or rows > memory_bytes:
            return 0
        each = self.free + self.bounded
        if self.bound_bytes is not None and left >= self.bound_bytes:
            if not self.free:
                return None
            return int(max(left / each, (left - self.bound_bytes) / self.free) * self.ranks)
        return int(left / each * self.ranks) if each else None


def peak(config: Config, spec: WorkerSpec, shape: ModelShape, context_parallel: int, measured: Mapping[str, float],
         cpu: bool) -> Peak:
    """`measured`: terms of an earlier run, by the names of calibration.py."""
    rows = measured.get("row_bytes") or row_bytes(spec, shape)
    if pair := measured.get("pair_bytes"):
        return Peak(rows, pair, 0.0, None, False, context_parallel, "rows and pairs as measured", MEASURED, "calibration.json")
    if _asked(config):
        return _dense(config, rows, context_parallel)
    if shape.indexer is None:
        return Peak(rows, 0.0, 0.0, None, False, context_parallel, "rows alone: the model has no indexer, so nothing grows "
                    "with the prefix", ASSUMED, _SHAPE)
    if shape.model_type in _ROW_BOUNDED or (spec.engine == "vllm" and not cpu):
        bound = config.indexer.budget_bytes if _acts(config) else _VLLM_SCORES_MIB << 20
        said = f"rows, and scores of {_SCORE_BYTES} bytes a pair in pieces of at most {bound / 2**20:,.0f} MiB"
        return Peak(rows, 0.0, _SCORE_BYTES, bound, False, context_parallel, said, ASSUMED, "the engines' own bound on scores")
    if spec.engine == "vllm" and shape.layers.ratios is not None:
        return Peak(rows, _SCORE_BYTES / 4, 0.0, None, False, context_parallel, "rows, and one float32 score for each new "
                    "token and entry of 4 keys", ASSUMED, _V4_CPU)
    return _dense(config, rows, context_parallel)


def _asked(config: Config) -> bool:
    return config.places.get("headroom.pair_bytes", "default") != "default"


def _acts(config: Config) -> bool:
    return "indexer" in config.hooks and "indexer" not in config.observe


def _dense(config: Config, rows: float, context_parallel: int) -> Peak:
    """As published: all that a pair holds, activations in it; the hook indexer bounds the copy among it."""
    held = config.headroom.pair_bytes
    copy = indexer.COPY_BYTES if _acts(config) and held > indexer.COPY_BYTES else 0
    bound = config.indexer.budget_bytes if copy else None
    said = f", of which {copy} in pieces of at most {bound / 2**20:,.0f} MiB" if bound is not None else ""
    origin, source = (READ, "headroom.pair_bytes") if _asked(config) else (ASSUMED, _PUBLISHED)
    return Peak(rows, held - copy, copy, bound, True, context_parallel,
                f"{held} bytes for each pair of new token and key{said}", origin, source)


def row_bytes(spec: WorkerSpec, shape: ModelShape) -> float:
    """Of one new token at the widest place of a layer: residual, its norm and output, and the larger of queries with keys and
    the attention's output, and of the MLP's gate, values and product (each expert that it goes through)."""
    size, tensor_parallel = element_bytes(spec), spec.tensor_parallel
    hidden, heads = shape.hidden_size or 0, shape.num_attention_heads or 0
    dim = shape.latent.nope_dim + shape.latent.rope_dim if shape.latent else shape.head_dim or 0
    attention = (2 * heads + 2 * (shape.num_key_value_heads or 0)) * dim / tensor_parallel
    inner = max(shape.intermediate_size or 0, (shape.moe_intermediate_size or 0) * shape.experts_per_token)
    return size * (3 * hidden + max(attention, 3 * inner / tensor_parallel))
