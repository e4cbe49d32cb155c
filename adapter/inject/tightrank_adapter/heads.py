"""Head counts of vLLM's FP8 MLA prefill on ROCm: the width its kernels take, and the bytes that go with each count.

AITER's pair of kernels (mla_prefill_ps_asm_fwd, mla_reduce_v1) takes a multiple of 16 heads. The scratch that vLLM holds
for it for good depends on the count by way of a greatest common divisor, so a wider count can need less: 24 heads as they
are 193.6 MiB, as 32 heads 68.6 MiB (256 compute units, 1 request, 512 queries, value dimension 128). Pure, standard
library only; the supervisor's plan and the hook `heads` use this one copy. Unit of every result: bytes, tiles or heads.
"""
from math import gcd
from typing import NamedTuple

ALIGN_HEADS = 16
TILE_TOKENS = 256        # queries per tile of mla_prefill_ps_asm_fwd
CONTEXT_TOKENS = 65536   # most keys that vLLM decompresses at once (determine_chunked_prefill_workspace_size)
_SEGMENT_BYTES = 256     # vLLM's WorkspaceManager starts each tensor at a multiple of this
_BF16, _FLOAT, _INT = 2, 4, 4


class Shape(NamedTuple):
    """One rank's share of an MLA model: heads of this rank, and the dimensions of its config.json."""
    heads: int
    nope_dim: int     # qk_nope_head_dim
    rope_dim: int     # qk_rope_head_dim
    value_dim: int    # v_head_dim
    latent_dim: int   # kv_lora_rank


KIMI_K3_TP8 = Shape(heads=12, nope_dim=128, rope_dim=64, value_dim=128, latent_dim=512)


def _require(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError("%s=%r: must be a whole number" % (name, value))
        if value < 1:
            raise ValueError("%s=%d: must be at least 1" % (name, value))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def width(heads: int) -> int:
    """Heads that the kernels are handed for `heads` real ones: the next multiple of 16. The one rule for all of them."""
    _require(heads=heads)
    return _up(heads, ALIGN_HEADS)


def tiles_by_heads(wide: int, compute_units: int, requests: int, query_tokens: int) -> int:
    """Partial tiles that AITER allows for at `wide` heads, and vLLM 0.27 to 0.30 reserves.

    `requests` is vLLM's max_num_seqs, `query_tokens` min(max_model_len, max_num_batched_tokens). Source:
    aiter.get_ps_metadata_info_v1, reduce_partial_map: the compute units form gcd(wide, compute units) clusters.
    """
    _require(wide=wide, compute_units=compute_units, requests=requests, query_tokens=query_tokens)
    per_cluster = compute_units // gcd(wide, compute_units)
    return min(requests + per_cluster - 1, 2 * (per_cluster - 1)) * -(-query_tokens // TILE_TOKENS)


def tiles_by_tokens(batched_tokens: int, requests: int, compute_units: int) -> int:
    """Partial tiles that vLLM 0.31 and later reserves: one for each tile of queries, one more for each compute unit.

    `batched_tokens` is max_num_batched_tokens. Source: AiterMLAMetadataBuilder._init_fp8_prefill_ps_buffers.
    """
    _require(batched_tokens=batched_tokens, requests=requests, compute_units=compute_units)
    return -(-batched_tokens // TILE_TOKENS) + requests - 1 + compute_units


def workspace_bytes(heads: int, tiles: int, batched_tokens: int, value_dim: int, wide: int = 0) -> int:
    """Bytes that vLLM's workspace holds for the prefill of `heads` heads at `wide` (by default: width(heads)).

    Partial outputs float32 [tiles·256, wide, value], their log-sums [tiles·256, wide], final log-sums [batched tokens,
    wide], and where wide > heads an output bf16 [batched tokens, wide, value], since the caller's is too narrow.
    """
    wide = wide or width(heads)
    _require(heads=heads, tiles=tiles, batched_tokens=batched_tokens, value_dim=value_dim, wide=wide)
    rows = tiles * TILE_TOKENS
    segments = [rows * wide * value_dim * _FLOAT, rows * wide * _FLOAT, batched_tokens * wide * _FLOAT]
    if wide > heads:
        segments.append(batched_tokens * wide * value_dim * _BF16)
    return sum(_up(segment, _SEGMENT_BYTES) for segment in segments)


def metadata_bytes(wide: int, compute_units: int, requests: int, query_tokens: int) -> int:
    """Bytes of the six plan buffers beside the workspace (aiter.get_ps_metadata_info_v1).

    vLLM 0.32 and later holds all but the first of them twice more in pinned host memory.
    """
    partials = tiles_by_heads(wide, compute_units, requests, query_tokens)
    tiles = -(-query_tokens // TILE_TOKENS)
    works = (requests + compute_units // gcd(wide, compute_units) - 1) * tiles * wide
    return 2 * 8 + _INT * ((compute_units + 1) + 8 * works + (requests * tiles + 1) + 2 * requests * tiles + partials)


def context_chunk_tokens(model_tokens: int, requests: int, block_tokens: int) -> int:
    """Keys that the bf16 path decompresses at once, at most (MLACommonMetadataBuilder, mla_attention.py).

    `model_tokens` is max_model_len, `requests` max_num_seqs, `block_tokens` the KV cache's block size.
    """
    _require(model_tokens=model_tokens, requests=requests, block_tokens=block_tokens)
    return min(max(8 * model_tokens, 4 * requests * block_tokens), CONTEXT_TOKENS)


def profiled_bytes(shape: Shape, chunk_tokens: int = CONTEXT_TOKENS) -> int:
    """What vLLM's memory profile holds in an MLA layer in place of the bf16 path: one bf16 [chunk, heads, nope + value].

    Source: MLAAttention.forward_impl without metadata. The rest of `fallback_bytes` comes after the KV pool took its share.
    """
    return chunk_tokens * shape.heads * (shape.nope_dim + shape.value_dim) * _BF16


def fallback_bytes(shape: Shape, new_tokens: int, context_tokens: int, chunk_tokens: int = CONTEXT_TOKENS) -> int:
    """Peak of the temporaries of one MLA layer's bf16 path for `new_tokens` rows over `context_tokens` cached keys.

    Source: MLACommonImpl.forward_mha and _compute_prefill_context (mla_attention.py). The rows' own keys and values
    decompressed [T, heads, nope + value], their keys again with the rotary part [T, heads, nope + rope], the output and
    its log-sums stay while the context is decompressed chunk by chunk in the same way. A chunk's two tensors are still
    held when the next chunk is decompressed: with two chunks or more there are three, which is the peak. Queries and
    the layer's output are the caller's. Holds the FP8 path's later chunks too: it takes only prompts without a context.
    """
    decompressed = shape.heads * (shape.nope_dim + shape.value_dim) * _BF16
    keys = shape.heads * (shape.nope_dim + shape.rope_dim) * _BF16
    output = shape.heads * (shape.value_dim * _BF16 + _FLOAT)
    own = new_tokens * (decompressed + keys + output)
    if context_tokens <= 0:
        return new_tokens * (decompressed + keys + output - shape.heads * _FLOAT)  # no log-sums without a merge
    full, rest = divmod(context_tokens, chunk_tokens)
    sizes = [chunk_tokens] * min(full, 3) + ([rest] if rest else [])
    return own + max(_chunk_bytes(new_tokens * output, decompressed, keys, index, sizes) for index in range(len(sizes)))


def _chunk_bytes(partial: int, decompressed: int, keys: int, index: int, sizes: "list[int]") -> int:
    """Peak while chunk `index` is computed. `partial`: bytes of one output over all rows; the first is kept as it came."""
    size = sizes[index]
    if index == 0:
        return size * (decompressed + keys) + partial
    before = sizes[index - 1]
    held = 2 * partial  # the sum so far and the output of the chunk before
    return held + max(before * (decompressed + keys) + size * decompressed,
                      before * keys + size * (decompressed + keys),
                      size * (decompressed + keys) + partial)


def pool_share(shape: Shape, tokens: int, layers: int, pool_bytes: int, element_bytes: int = 1) -> float:
    """The part of a KV pool that `tokens` tokens take in `layers` MLA layers (1 byte an element: an FP8 KV cache)."""
    return tokens * layers * (shape.latent_dim + shape.rope_dim) * element_bytes / pool_bytes
