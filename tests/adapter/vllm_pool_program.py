"""What vLLM's own code makes of KV pools: cases as JSON on stdin, [blocks, tokens] of each as JSON in the last line of stdout.

Run by test_vllm_pool.py in vLLM's environment. No engine is started: the specs that layers would give are made here.
"""
import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout


def config(case):
    """As much of a VllmConfig as is asked for."""
    mode = "align" if case["prefix_caching"] else "none"
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC, num_gpu_blocks_override=None,
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


def answer(case):
    vllm_config = config(case)
    specs = {f"layers.{index}": spec(kind, case) for index, kind in enumerate(case["kinds"])}
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    found = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, case["pool"])
    return [found.num_blocks, kv_cache_utils.get_kv_cache_capacity(vllm_config, found)[0]]


print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
