"""What vLLM's own code makes of KV pools: cases as JSON on stdin, [blocks, tokens] of each as JSON in the last line of stdout.

Run by test_vllm_pool.py in vLLM's environment. No engine is started: the specs that layers would give are made here.
"""
import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def config(case):
    """As much of a VllmConfig as is asked for."""
    mode = "align" if case["prefix_caching"] else "none"
    layout = KVCacheLayout.BLHNC if "ratios" in case else KVCacheLayout.LBNHC
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=None,
                            prefix_cache_retention_interval=None, mamba_cache_mode=mode)
    return SimpleNamespace(
        cache_config=cache, model_config=SimpleNamespace(max_model_len=case["context"]), speculative_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None), max_in_flight_tokens=case["in_flight"],
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1))


def spec(kind, case):
    attention = {"block_size": case["block"], "num_kv_heads": case["kv_heads"], "head_size": case["head_dim"],
                 "dtype": torch.bfloat16}
    if kind == "full":
        return FullAttentionSpec(**attention)
    if kind == "window":
        return SlidingWindowSpec(**attention, sliding_window=case["window"], dcp_sharded=False)
    page = case["block"] * 2 * case["kv_heads"] * case["head_dim"] * 2
    return MambaSpec(block_size=case["block"], shapes=((case["state"],),), dtypes=(torch.uint8,), page_size_padded=page)


def packed(ratios):
    """As models/deepseek_v4 makes them for an FP8 cache."""
    one, eight = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}, {"dtype": torch.uint8}
    whole = {"state_content_bytes": 584, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4", "head_size": 512}
    found = {}
    for index, ratio in enumerate(ratios):
        found[f"{index}.window"] = SlidingWindowMLASpec(**one, **eight, **whole, block_size=64, sliding_window=128)
        if ratio > 1:
            found[f"{index}.keys"] = MLAAttentionSpec(**one, **eight, **whole, block_size=256, tokens_per_state=ratio)
            found[f"{index}.state"] = compressor(one, ratio, 512)
        if ratio == 4:
            found[f"{index}.index"] = MLAAttentionSpec(**one, **eight, head_size=132, block_size=256, tokens_per_state=4)
            found[f"{index}.index state"] = compressor(one, ratio, 128)
    return found


def compressor(one, ratio, dim):
    overlap = 1 + (ratio == 4)
    return SlidingWindowMLASpec(**one, block_size=4 if ratio == 4 else 8, head_size=2 * overlap * dim, dtype=torch.float32,
                                sliding_window=overlap * ratio)


def answer(case):
    vllm_config = config(case)
    specs = packed(case["ratios"]) if "ratios" in case else {
        f"layers.{index}": spec(kind, case) for index, kind in enumerate(case["kinds"])}
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    found = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, case["pool"])
    return [found.num_blocks, kv_cache_utils.get_kv_cache_capacity(vllm_config, found)[0]]


print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
