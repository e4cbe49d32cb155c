"""What each rank holds of the weights: divided, kept whole, padded, placed on the first and the last stage."""
from __future__ import annotations

from typing import Any

import pytest
from preflight import make_spec
from tightrank.plan import estimate, weights
from tightrank.plan.safetensors import Tensor
from tightrank.plan.shape import shape

MODEL: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "hidden_size": 64,
                         "head_dim": 8, "vocab_size": 100, "intermediate_size": 128, "tie_word_embeddings": False}


def tensor(name: str, *sizes: int, dtype: str = "BF16") -> Tensor:
    count = 1
    for size in sizes:
        count *= size
    return Tensor(name, dtype, sizes, count * {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype])


def held(found: Tensor, tensor_parallel: int = 1, pipeline_parallel: int = 1, args: tuple[str, ...] = (),
         engine: str = "vllm", **model: Any) -> tuple[int, ...]:
    whole = {**MODEL, **model}
    spec = make_spec(args, engine=engine, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    return weights.rank_bytes((found,), shape(whole), weights.split(spec, whole))


@pytest.mark.parametrize(("found", "one", "four"), [
    (tensor("model.layers.0.self_attn.q_proj.weight", 64, 64), 8192, 2048),
    (tensor("model.layers.0.self_attn.q_proj.bias", 64), 128, 32),
    (tensor("model.layers.0.self_attn.k_proj.weight", 16, 64), 2048, 1024),       # 2 heads, 4 ranks: one head each
    (tensor("model.layers.0.self_attn.qkv_proj.weight", 96, 64), 12288, 4096),    # 2 of 8 query heads, 1 key, 1 value
    (tensor("model.layers.0.self_attn.o_proj.weight", 64, 64), 8192, 2048),
    (tensor("model.layers.0.self_attn.o_proj.bias", 64), 128, 128),
    (tensor("model.layers.0.self_attn.sinks", 8), 16, 4),
    (tensor("model.layers.0.input_layernorm.weight", 64), 128, 128),
    (tensor("model.layers.0.mlp.gate.weight", 8, 64), 1024, 1024),
    (tensor("model.layers.0.mlp.experts.3.up_proj.weight", 128, 64), 16384, 4096),
    (tensor("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 24, 64), 3072, 3072),
    (tensor("model.layers.0.self_attn.indexer.wq_b.weight", 24, 64), 3072, 3072),
    (tensor("model.embed_tokens.weight", 100, 64), 128 * 64 * 2, 128 * 64 * 2 // 4),   # 100 rows are padded to 128
    (tensor("mtp.0.eh_proj.weight", 64, 64), 0, 0), (tensor("model.layers.4.eh_proj.weight", 64, 64), 0, 0)])
def test_what_ranks_divide(found: Tensor, one: int, four: int) -> None:
    assert (held(found), held(found, 4)) == ((one,), (four,))


@pytest.mark.parametrize(("name", "tied", "wanted"), [
    ("model.embed_tokens.weight", False, (True, False, False)), ("model.embed_tokens.weight", True, (True, False, True)),
    ("lm_head.weight", False, (False, False, True)), ("lm_head.weight", True, (False, False, False)),
    ("model.layers.0.self_attn.q_proj.weight", False, (True, False, False)),
    ("model.layers.3.self_attn.q_proj.weight", False, (False, False, True)),
    ("vision_tower.encoder.layers.3.fc1.weight", False, (True, False, False))])
def test_where_stages_hold_them(name: str, tied: bool, wanted: tuple[bool, ...]) -> None:
    found = held(tensor(name, 64, 64), 1, 3, tie_word_embeddings=tied)
    assert tuple(size > 0 for size in found) == wanted


@pytest.mark.parametrize(("engine", "architecture", "stages"), [
    ("sglang", "LlamaForCausalLM", 3), ("sglang", "Qwen3ForCausalLM", 1), ("vllm", "LlamaForCausalLM", 1)])
def test_sglangs_llama_has_its_output_embedding_on_every_stage(engine: str, architecture: str, stages: int) -> None:
    """Seen in 0.5.23: a first stage of two holds 262,144 bytes more than its layer and the input embedding."""
    found = held(tensor("lm_head.weight", 64, 64), 1, 3, engine=engine, architectures=[architecture])
    assert sum(size > 0 for size in found) == stages and found[2]


@pytest.mark.parametrize(("engine", "count", "size", "wanted"), [
    ("vllm", 61, 4, [15, 15, 16, 15]), ("vllm", 62, 4, [15, 16, 16, 15]), ("sglang", 61, 4, [15, 15, 15, 16]),
    ("sglang", 62, 4, [15, 15, 16, 16]), ("vllm", 8, 2, [4, 4]), ("vllm", 3, 1, [3])])
def test_layers_of_stages(engine: str, count: int, size: int, wanted: list[int]) -> None:
    """vLLM and SGLang, distributed/utils.py, get_pp_indices."""
    assert weights.stages(engine, count, size) == wanted


@pytest.mark.parametrize(("dtype", "args", "model", "growth"), [
    ("BF16", (), {}, 1), ("F32", (), {}, 0.5), ("F32", ("--dtype", "float32"), {}, 1), ("BF16", ("--dtype", "float32"), {}, 2),
    ("BF16", ("--quantization", "fp8"), {}, 0.5), ("BF16", ("--quantization", "awq"), {}, 0.25), ("F8_E4M3", (), {}, 1),
    ("BF16", ("--dtype", "float32"), {"quantization_config": {"quant_method": "fp8"}}, 1)])
def test_what_they_grow_to(dtype: str, args: tuple[str, ...], model: dict[str, Any], growth: float) -> None:
    found = tensor("model.layers.0.mlp.up_proj.weight", 128, 64, dtype=dtype)
    assert held(found, args=args, **model) == (int(found.size_bytes * growth),)


def test_what_a_quantization_leaves_alone() -> None:
    for name, sizes in (("model.norm.weight", (64,)), ("lm_head.weight", (128, 64))):
        found = tensor(name, *sizes)
        assert held(found, args=("--quantization", "fp8")) == (found.size_bytes,)


def test_an_estimate_is_divided_as_real_weights_are() -> None:
    """Llama 3 70B on 8 ranks: an eighth of what is divided, which is all but norms."""
    model = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False}
    spec = make_spec(tensor_parallel=8)
    found = weights.rank_bytes(estimate.tensors(shape(model), model), shape(model), weights.split(spec, model))
    assert found == (pytest.approx(70.55e9 * 2 / 8, rel=0.001),)


def test_sglang_pads_heads_on_a_cpu() -> None:
    """Seen in 0.5.23: one key head of four queries on two ranks makes two of eight."""
    model = {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 1}
    for cpu, kept in ((True, 8192), (False, 4096)):
        how = weights.split(make_spec(engine="sglang", tensor_parallel=2), model, cpu)
        found = tensor("model.layers.0.self_attn.q_proj.weight", 64, 64)
        assert weights.rank_bytes((found,), shape(model), how) == (kept,)
