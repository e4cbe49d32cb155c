"""What the planner reads from config.json: layers, heads, KV of a token, states and weights, against what was published.

The numbers of each config.json are typed in from the model's own page; a figure stands beside where it was published.
"""
from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tightrank.plan import estimate, kv
from tightrank.plan.kv import Storage
from tightrank.plan.layers import FULL, NONE, STATE, WINDOW
from tightrank.plan.pool import Question, tokens
from tightrank.plan.shape import ModelShape, shape

GIB, KIB = 2**30, 2**10
HALF, FP8 = Storage("auto", 2), Storage("fp8", 1)


def config(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "tie_word_embeddings": False, **more}


GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}
LLAMA2_7B = config("llama", 4096, 32, 32, 32, intermediate_size=11008, vocab_size=32000)
LLAMA3_8B = config("llama", 4096, 32, 32, 8, intermediate_size=14336, vocab_size=128256)
LLAMA3_70B = config("llama", 8192, 80, 64, 8, intermediate_size=28672, vocab_size=128256)
LLAMA3_405B = config("llama", 16384, 126, 128, 8, intermediate_size=53248, vocab_size=128256)
QWEN_72B = config("qwen2", 8192, 80, 64, 8, intermediate_size=29568, vocab_size=152064, sliding_window=131072,
                  use_sliding_window=False, max_window_layers=80)
MISTRAL_7B = config("mistral", 4096, 32, 32, 8, intermediate_size=14336, vocab_size=32000, sliding_window=4096)
MIXTRAL = config("mixtral", 4096, 32, 32, 8, intermediate_size=14336, vocab_size=32000, num_local_experts=8,
                 sliding_window=None)
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
DEEPSEEK_V2 = config("deepseek_v2", 5120, 60, 128, 128, intermediate_size=12288, moe_intermediate_size=1536, vocab_size=102400,
                     n_routed_experts=160, n_shared_experts=2, first_k_dense_replace=1, **_MLA)
DEEPSEEK_V3 = config("deepseek_v3", 7168, 61, 128, 128, intermediate_size=18432, moe_intermediate_size=2048, vocab_size=129280,
                     n_routed_experts=256, n_shared_experts=1, first_k_dense_replace=3, **_MLA)
_INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
DEEPSEEK_V32 = {**DEEPSEEK_V3, **_INDEX, "model_type": "deepseek_v32"}
KIMI_K2 = {**DEEPSEEK_V3, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840}
DEEPSEEK_V4_PRO = config("deepseek_v4", 7168, 61, 128, 1, head_dim=512, moe_intermediate_size=3072, vocab_size=129280,
                         n_routed_experts=384, n_shared_experts=1, q_lora_rank=1536, o_groups=16, o_lora_rank=1024,
                         qk_rope_head_dim=64, sliding_window=128, compress_ratios=[128, *[4, 128] * 30], **_INDEX)
GPT_OSS_120B = config("gpt_oss", 2880, 36, 64, 8, head_dim=64, intermediate_size=2880, num_local_experts=128, vocab_size=201088,
                      sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18,
                      quantization_config={"quant_method": "mxfp4"})
GEMMA3_27B = {"model_type": "gemma3", "text_config": {
    "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208, "sliding_window": 1024}}
JAMBA = config("jamba", 4096, 32, 32, 8, intermediate_size=14336, vocab_size=65536, num_experts=16, attn_layer_period=8,
               attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16, mamba_d_conv=4,
               mamba_expand=2, mamba_dt_rank=256)
QWEN3_NEXT = config("qwen3_next", 2048, 48, 16, 2, head_dim=256, intermediate_size=5120, moe_intermediate_size=512,
                    shared_expert_intermediate_size=512, vocab_size=151936, num_experts=512, full_attention_interval=4,
                    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
                    linear_conv_kernel_dim=4)
KIMI_LINEAR = config("kimi_linear", 2304, 27, 32, 32, head_dim=72, vocab_size=163840, intermediate_size=9216,
                     kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, linear_attn_config={
                         "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                         "short_conv_kernel_size": 4})


def of_token(model: dict[str, Any], how: Storage = HALF, tensor_parallel: int = 1) -> float:
    found = kv.token_bytes(shape(model), how, tensor_parallel)
    assert found is not None
    return found


def of_request(model: dict[str, Any], context: int, how: Storage = HALF) -> float:
    found = kv.request_bytes(shape(model), how, 1, context, 4)
    assert found is not None
    return found


ISCA = "Insights into DeepSeek-V3, arXiv 2505.09343, table 1"
JAMBA_PAPER = "Jamba, arXiv 2403.19887, table 1 (256K tokens, 16 bit)"
FUTURE_SHOCK = "news.future-shock.ai/the-weight-of-remembering"


@pytest.mark.parametrize(("model", "published", "source"), [
    (GPT2_XL, 300 * KIB, FUTURE_SHOCK), (LLAMA3_8B, 128 * KIB, FUTURE_SHOCK),
    (LLAMA3_70B, 320 * KIB, "njalla.io/from-300kb-to-69kb-per-token-how-llm-architectures"),
    (DEEPSEEK_V3, 70_272, ISCA), (QWEN_72B, 327_680, ISCA), (LLAMA3_405B, 516_096, ISCA),
    (DEEPSEEK_V2, 34.6e3 * 2, "DeepSeek-V2, arXiv 2405.04434, table 9: 34.6K elements"),
    (DEEPSEEK_V32, 83.88 * GIB / 2**20, "vllm.ai/blog/deepseek-v4: 83.9 GiB at 1M tokens, all of it in bf16")])
def test_kv_of_a_token(model: dict[str, Any], published: float, source: str) -> None:
    assert of_token(model, Storage("bf16", 2, index="16 bit")) == pytest.approx(published, rel=0.05), source


@pytest.mark.parametrize(("model", "context", "published", "source"), [
    (LLAMA2_7B, 2**18, 128 * GIB, JAMBA_PAPER), (MIXTRAL, 2**18, 32 * GIB, JAMBA_PAPER), (JAMBA, 2**18, 4 * GIB, JAMBA_PAPER),
    (LLAMA3_70B, 2**17, 40 * GIB, "njalla.io: 40 GB at 128K"),
    (DEEPSEEK_V4_PRO, 2**20, 9.62 * GIB, "vllm.ai/blog/deepseek-v4: 9.62 GiB at 1M tokens in bf16"),
    (MISTRAL_7B, 2**15, 32 * 2**12 * 4096, "Mistral 7B, arXiv 2310.06825: an eighth at 32k tokens")])
def test_kv_of_a_request(model: dict[str, Any], context: int, published: float, source: str) -> None:
    assert of_request(model, context, Storage("bf16", 2, index="16 bit")) == pytest.approx(published, rel=0.05), source


def test_a_hybrid_keeps_a_quarter() -> None:
    """Kimi Linear, arXiv 2510.26692: up to 75 % less KV than the same model with full attention."""
    every = {**KIMI_LINEAR, "linear_attn_config": None}
    assert 1 - of_token(KIMI_LINEAR) / of_token(every) == pytest.approx(0.75, rel=0.05)


def test_published_sizes_of_packed_tokens() -> None:
    """vLLM's fp8_ds_mla and SGLang's DSA pool: 656 bytes and an index key of 132; DeepSeek-V4: 584 for an entry."""
    found = shape(DEEPSEEK_V32)
    assert (kv.entry_bytes(found, FP8, 8), kv.index_bytes(found, FP8)) == (656, 132)
    four = shape(DEEPSEEK_V4_PRO)
    assert kv.entry_bytes(four, FP8, 8) == 584
    assert kv.layer_bytes(four, FP8, 8, 1) == (584 + 132) / 4 and kv.layer_bytes(four, FP8, 8, 0) == 584 / 128


@pytest.mark.parametrize(("tensor_parallel", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_key_heads_are_divided_until_each_rank_has_one(tensor_parallel: int, heads: int) -> None:
    assert of_token(LLAMA3_70B, HALF, tensor_parallel) == 80 * heads * 2 * 128 * 2
    assert of_token(DEEPSEEK_V3, HALF, tensor_parallel) == 61 * 576 * 2, "MLA: all of it on every rank"


@pytest.mark.parametrize(("how", "bytes_of_a_head"), [
    (Storage("fp8", 1), 256), (Storage("int8_per_token_head", 1, 4), 264), (Storage("int4_per_token_head", 0.5, 4), 136),
    (Storage("nvfp4", 9 / 16), 144), (Storage("mxfp8", 33 / 32), 264)])
def test_quantized_kv_has_its_scales(how: Storage, bytes_of_a_head: int) -> None:
    assert of_token(LLAMA3_70B, how) == 80 * 8 * bytes_of_a_head


@pytest.mark.parametrize(("model", "published", "source"), [
    (LLAMA3_70B, 70.6e9, "Llama 3 model card"), (LLAMA3_405B, 405e9, "Llama 3.1, arXiv 2407.21783"),
    (QWEN_72B, 72.7e9, "Qwen2.5 model card"), (MIXTRAL, 46.7e9, "mistral.ai/news/mixtral-of-experts"),
    (DEEPSEEK_V2, 236e9, "arXiv 2405.04434"), (DEEPSEEK_V3, 671e9, "arXiv 2412.19437"), (KIMI_K2, 1.04e12, "arXiv 2507.20534"),
    (DEEPSEEK_V4_PRO, 1.6e12, "vllm.ai/blog/deepseek-v4"), (GPT_OSS_120B, 116.83e9, "gpt-oss model card, arXiv 2508.10925"),
    (GEMMA3_27B, 27.0e9, "Gemma 3, arXiv 2503.19786, table 1, without the vision encoder"), (JAMBA, 52e9, "arXiv 2403.19887"),
    (QWEN3_NEXT, 80e9, "Qwen3-Next model card"), (LLAMA2_7B, 6.74e9, "arXiv 2307.09288"), (GPT2_XL, 1.56e9, "OpenAI, GPT-2")])
def test_parameters_from_the_shape_alone(model: dict[str, Any], published: float, source: str) -> None:
    found = estimate.tensors(shape(model), model)
    assert sum(math.prod(tensor.shape) for tensor in found) == pytest.approx(published, rel=0.05), source


def test_bytes_of_a_quantized_model_from_its_shape() -> None:
    """gpt-oss model card: a checkpoint of 60.8 GiB. Llama 3.1 405B in FP8: half of 16 bit but for the embeddings."""
    found = sum(tensor.size_bytes for tensor in estimate.tensors(shape(GPT_OSS_120B), GPT_OSS_120B))
    assert found == pytest.approx(60.8 * GIB, rel=0.05)
    eight = {**LLAMA3_405B, "quantization_config": {"quant_method": "fp8"}}
    assert sum(tensor.size_bytes for tensor in estimate.tensors(shape(eight), eight)) == pytest.approx(410e9, rel=0.05)


@pytest.mark.parametrize(("model", "kinds"), [
    (GEMMA3_27B, {WINDOW: 52, FULL: 10}), (GPT_OSS_120B, {WINDOW: 18, FULL: 18}), (QWEN_72B, {FULL: 80}),
    (MISTRAL_7B, {WINDOW: 32}), (MIXTRAL, {FULL: 32}),
    (JAMBA, {STATE: 28, FULL: 4}), (QWEN3_NEXT, {STATE: 36, FULL: 12}), (KIMI_LINEAR, {STATE: 20, FULL: 7}),
    (config("nemotron_h", 4480, 4, 40, 8, hybrid_override_pattern="M-M*"), {STATE: 2, NONE: 1, FULL: 1}),
    (config("bamba", 4096, 4, 32, 8, attn_layer_indices=[2]), {STATE: 3, FULL: 1}),
    (config("llama4_text", 5120, 4, 40, 8, attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0]), {WINDOW: 3, FULL: 1}),
    (config("qwen2", 896, 4, 14, 2, sliding_window=64, use_sliding_window=True, max_window_layers=2), {WINDOW: 2, FULL: 2}),
    (config("minimax", 6144, 4, 64, 8, attn_type_list=[0, 0, 0, 1], head_dim=128), {STATE: 3, FULL: 1})])
def test_kinds_of_layers(model: dict[str, Any], kinds: dict[str, int]) -> None:
    found = shape(model).layers.kinds
    assert {kind: found.count(kind) for kind in set(found)} == kinds


def test_states_of_linear_attention() -> None:
    """Qwen3-Next: q, k and v of 8192 channels, 3 tokens back in bf16, and 32 matrices of 128 x 128 in float32."""
    assert kv.state_bytes(shape(QWEN3_NEXT), 1, 2, 4) == 8192 * 3 * 2 + 32 * 128 * 128 * 4
    assert kv.state_bytes(shape(QWEN3_NEXT), 2, 2, 4) == (8192 * 3 * 2 + 32 * 128 * 128 * 4) // 2
    assert kv.state_bytes(shape(JAMBA), 1, 2, 4) == 8192 * 3 * 2 + 8192 * 16 * 4
    assert kv.state_bytes(shape(LLAMA3_8B), 1, 2, 4) is None


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
                    max_leaves=4)
KEYS = sorted({key for model in (GPT2_XL, DEEPSEEK_V4_PRO, GPT_OSS_120B, JAMBA, QWEN3_NEXT, KIMI_LINEAR, DEEPSEEK_V2)
               for key in model} | {"text_config", "layer_types", "hybrid_override_pattern", "no_rope_layers", "attn_type_list",
                                    "attn_layer_indices", "quantization_config", "mlp_only_layers"})


@settings(deadline=None)
@given(st.sampled_from([{}, LLAMA3_8B, DEEPSEEK_V4_PRO, JAMBA, QWEN3_NEXT, KIMI_LINEAR, GPT_OSS_120B, GPT2_XL]),
       st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), st.sampled_from(["vllm", "sglang", "atom"]), st.integers(1, 9))
def test_no_config_json_makes_it_raise(base: dict[str, Any], change: dict[str, Any], engine: str, size: int) -> None:
    model = {**base, **change}
    found: ModelShape = shape(model)
    assert all(tensor.size_bytes >= 0 for tensor in estimate.tensors(found, model))
    ask = Question(found, HALF, engine, size, min(size, 3), 16, 4096, 2048, 2, 4)
    pool = tokens(ask, 10 * GIB)
    assert pool is None or pool.tokens >= 0
