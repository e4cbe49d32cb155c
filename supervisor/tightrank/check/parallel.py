"""What config.json says about sizes: whether heads and layers can be divided as asked for. Pure."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.config.flags import has
from tightrank.plan.shape import ModelShape, shape
from tightrank.records import WorkerSpec

OVERRIDES = ("--hf-overrides", "--json-model-override-args", "--hf-config-path")     # config.json is not all that counts

_LARGEST_SIZE = 1024                   # of workers[].tensor_parallel


def fits(found: ModelShape, size: int) -> bool:
    """KV heads are divided among the ranks, or each is kept by several of them (vLLM and SGLang, models/llama.py)."""
    heads, kv_heads = found.num_attention_heads or size, found.num_key_value_heads or size
    return heads % size == 0 and (found.one_kv_vector or kv_heads % size == 0 or size % kv_heads == 0)


def sizes(found: ModelShape) -> list[int]:
    """The tensor parallel sizes that the heads allow."""
    return [size for size in range(1, min(found.num_attention_heads or 1, _LARGEST_SIZE) + 1) if fits(found, size)]


def items(model: Mapping[str, Any], spec: WorkerSpec, on_cpu: bool) -> Iterator[Item]:
    found = shape(model)
    yield _heads(found, spec, on_cpu)
    if found.num_hidden_layers is not None and spec.pipeline_parallel > found.num_hidden_layers:
        yield failed("pipeline parallel", "arguments-invalid", f"pipeline_parallel {spec.pipeline_parallel} and "
                     f"{found.num_hidden_layers} layers", f"use at most {found.num_hidden_layers}")
    experts = ("--enable-expert-parallel", "--ep-size", "--expert-parallel-size", "--ep")
    if found.num_experts is not None and has(spec.argv, *experts):
        yield _experts(found.num_experts, spec)


def _heads(found: ModelShape, spec: WorkerSpec, on_cpu: bool) -> Item:
    item, size = "tensor parallel", spec.tensor_parallel
    if found.num_attention_heads is None:
        return unknown(item, "config.json does not say how many attention heads there are")
    heads = f"{found.num_attention_heads} attention heads, {found.num_key_value_heads} KV heads"
    valid = ", ".join(map(str, sizes(found)))
    if fits(found, size):
        return passed(item, f"tensor_parallel {size} divides {heads} (valid: {valid})")
    if has(spec.argv, *OVERRIDES):
        return unknown(item, f"tensor_parallel {size} and {heads} of config.json, which the command line overrides")
    if has(spec.argv, "--attn-dp-size", "--attn-cp-size", "--attention-context-parallel-size"):
        return unknown(item, f"tensor_parallel {size} and {heads}: attention is divided by rules of its own here")
    if spec.engine == "sglang" and on_cpu:       # configs/update_config.py, adjust_config_with_unaligned_cpu_tp
        return warned(item, f"tensor_parallel {size} does not divide {heads}: SGLang pads them on a CPU",
                      f"use one of {valid} where that is not wanted")
    return failed(item, "tensor-parallel-invalid", f"tensor_parallel {size} does not divide {heads}", f"use one of {valid}")


def _experts(experts: int, spec: WorkerSpec) -> Item:
    item, size = "experts", spec.tensor_parallel
    if experts % size == 0:
        return passed(item, f"tensor_parallel {size} divides {experts} experts")
    return warned(item, f"tensor_parallel {size} does not divide {experts} experts, which many models refuse",
                  f"use one of {', '.join(str(each) for each in range(1, experts + 1) if experts % each == 0)}")
