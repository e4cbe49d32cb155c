"""What config.json says about sizes: whether heads and layers can be divided as asked for. Pure."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.config.flags import has
from tightrank.engines.base import sections
from tightrank.records import WorkerSpec

OVERRIDES = ("--hf-overrides", "--json-model-override-args", "--hf-config-path")     # config.json is not all that counts

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_LARGEST_SIZE = 1024                   # of workers[].tensor_parallel


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of config.json; None: it does not say, or nothing that makes sense."""
    heads: int | None
    kv_heads: int | None
    layers: int | None
    experts: int | None
    head_dimension: int | None
    latent: int | None                 # MLA: what is kept of a token on a layer, in elements, on each rank


def shape(model: Mapping[str, Any]) -> Shape:
    text = sections(model)
    heads, hidden = _first(text, _HEADS), whole(text.get("hidden_size"))
    rank, rope = whole(text.get("kv_lora_rank")), whole(text.get("qk_rope_head_dim"))
    return Shape(heads, _first(text, _KV_HEADS) or heads, _first(text, _LAYERS), _first(text, _EXPERTS),
                 whole(text.get("head_dim")) or (hidden // heads if hidden and heads else None),
                 rank + rope if rank and rope else None)


def whole(value: Any) -> int | None:
    """A positive whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _first(text: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := whole(text.get(name)))), None)


def fits(found: Shape, size: int) -> bool:
    """KV heads are divided among the ranks, or each is kept by several of them (vLLM and SGLang, models/llama.py)."""
    heads, kv_heads = found.heads or size, found.kv_heads or size
    return heads % size == 0 and (found.latent is not None or kv_heads % size == 0 or size % kv_heads == 0)


def sizes(found: Shape) -> list[int]:
    """The tensor parallel sizes that the heads allow."""
    return [size for size in range(1, min(found.heads or 1, _LARGEST_SIZE) + 1) if fits(found, size)]


def items(model: Mapping[str, Any], spec: WorkerSpec, on_cpu: bool) -> Iterator[Item]:
    found = shape(model)
    yield _heads(found, spec, on_cpu)
    if found.layers is not None and spec.pipeline_parallel > found.layers:
        yield failed("pipeline parallel", "arguments-invalid", f"pipeline_parallel {spec.pipeline_parallel} and "
                     f"{found.layers} layers", f"use at most {found.layers}")
    if found.experts is not None and has(spec.argv, "--enable-expert-parallel", "--ep-size", "--expert-parallel-size", "--ep"):
        yield _experts(found.experts, spec)


def _heads(found: Shape, spec: WorkerSpec, on_cpu: bool) -> Item:
    item, size = "tensor parallel", spec.tensor_parallel
    if found.heads is None:
        return unknown(item, "config.json does not say how many attention heads there are")
    heads = f"{found.heads} attention heads, {found.kv_heads} KV heads"
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
