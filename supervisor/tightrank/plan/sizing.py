"""How many bytes an engine takes for its KV pool on each rank: its own formula, or what its arguments say. Pure.

vLLM and ATOM take a part of all the memory less what else they need; SGLang keeps a part of what was free before the weights
came. Sources: vLLM 0.32 v1/worker/gpu_worker.py and cpu_worker.py (determine_available_memory), SGLang 0.5.23
mem_cache/kv_cache_configurator.py (_profile_available_bytes) and arg_groups/memory_hook.py (mem_fraction_static).
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tightrank.adapter import wire
from tightrank.config.flags import value
from tightrank.plan.terms import ASSUMED, READ, Term, weakest
from tightrank.records import WorkerSpec

MIB, GIB = 2**20, 2**30
_UTILIZATION = {"vllm": 0.92, "atom": 0.9}            # vLLM 0.32 config/cache.py; ATOM's --gpu-memory-utilization
_ATOM_SAFETY = 0.02                                   # of all the memory (atom/model_engine/model_runner.py)


@dataclass(frozen=True, slots=True)
class Rank:
    """What the formulas ask of one rank, bytes. `part_bytes`: of what is free, what it has to itself; `outside_bytes`: what the
    engine's process holds beside weights."""
    total_bytes: int
    free_bytes: int
    part_bytes: int
    weights_bytes: float
    outside_bytes: float
    peak_bytes: float
    graphs_bytes: float
    origin: str


def fixed(spec: WorkerSpec, space: str | None) -> tuple[int, str]:
    """(bytes on each rank, what says so); (0, "") where the engine takes what is left. `space`: VLLM_CPU_KVCACHE_SPACE."""
    if (text := value(spec.argv, "--kv-cache-memory-bytes", "--kv-cache-memory")) is not None:
        return number(text, 1), "--kv-cache-memory-bytes"
    if space_bytes := number(space, GIB):
        return space_bytes, "VLLM_CPU_KVCACHE_SPACE"
    return 0, ""     # SGLang takes --max-total-tokens for an upper bound (0.5.23 kv_cache_configurator.py)


def number(text: str | None, unit: int) -> int:
    """`text` in units, as the engines' parsers read it: 8, 8000000, 2g, 1.5G. 0: none that can be read."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([kmgtKMGT]?)", text or "")
    suffixes = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return int(float(match[1]) * suffixes[match[2]]) * unit if match else 0


def kv_space(spec: WorkerSpec, environment: Mapping[str, str], cpu: bool) -> str | None:
    """vLLM's own variable for the size of its KV cache, which counts on a CPU alone."""
    return {**environment, **spec.env}.get("VLLM_CPU_KVCACHE_SPACE") if cpu and spec.engine == "vllm" else None


def pool(spec: WorkerSpec, rank: Rank, ranks: int, chunk_tokens: int, space: str | None, cpu: bool, number_of: int) -> Term:
    """Bytes for KV on the rank `number_of`; 0 where nothing is left. The hook headroom takes its part off."""
    size, flag = fixed(spec, space)
    if flag:
        found = Term("KV pool", size, "bytes", f"as {flag} says", READ)
    elif spec.engine == "sglang":
        found = _sglang(spec, rank, ranks, chunk_tokens)
    elif cpu:
        found = _vllm_cpu(spec, rank)
    else:
        found = _utilized(spec, rank)
    return _less_headroom(spec, rank, found, number_of)


def _fraction(spec: WorkerSpec, flag: str) -> float | None:
    """The value of a flag in (0, 1]; None: not there, or nothing that makes sense (the engine will say so)."""
    text = value(spec.argv, flag)
    return float(text) if text and re.fullmatch(r"1(\.0{0,9})?|0?\.\d{1,9}", text) else None


def _utilized(spec: WorkerSpec, rank: Rank) -> Term:
    asked = _fraction(spec, "--gpu-memory-utilization")
    part = asked or _UTILIZATION[spec.engine]
    safety = _ATOM_SAFETY * rank.total_bytes if spec.engine == "atom" else 0.0
    taken = rank.weights_bytes + rank.outside_bytes + rank.peak_bytes + rank.graphs_bytes + safety
    left = min(part * rank.total_bytes - taken, rank.free_bytes - taken)
    said = "" if asked else ", the engine's default"
    return Term("KV pool", max(left, 0), "bytes", f"{part} of the memory{said}, less weights, process, the peak of a chunk and "
                "graphs", weakest(rank.origin, ASSUMED))


def _vllm_cpu(spec: WorkerSpec, rank: Rank) -> Term:
    part = _fraction(spec, "--gpu-memory-utilization") or _UTILIZATION["vllm"]
    left = part * rank.total_bytes - rank.weights_bytes - rank.outside_bytes
    return Term("KV pool", max(left, 0), "bytes", f"{part} of the memory, less what the worker's process holds",
                weakest(rank.origin, ASSUMED))


def _sglang(spec: WorkerSpec, rank: Rank, ranks: int, chunk_tokens: int) -> Term:
    asked = _fraction(spec, "--mem-fraction-static")
    part = asked or _static_fraction(rank.total_bytes, ranks, chunk_tokens, rank.graphs_bytes)
    left = part * rank.free_bytes - rank.weights_bytes - rank.outside_bytes
    said = "" if asked else ", SGLang's default for this memory and chunk"
    return Term("KV pool", max(left, 0), "bytes", f"{part:.3f} of what is free before the weights{said}, less weights and "
                "process", weakest(rank.origin, ASSUMED))


def _static_fraction(total_bytes: int, ranks: int, chunk_tokens: int, graphs_bytes: float) -> float:
    """512 MiB, 1.5 MiB for each token of a chunk, an eighth of a GiB for each rank, the graphs; at least 10 GiB of a large
    device (handle_gpu_memory_settings)."""
    kept = 512 * MIB + 1.5 * MIB * max(chunk_tokens, 2048) + ranks / 8 * GIB + graphs_bytes
    if total_bytes > 60 * GIB:
        kept = max(kept, 10 * GIB)
    return round(max(total_bytes - kept, 0) / total_bytes, 3) if total_bytes else 0.0


def _less_headroom(spec: WorkerSpec, rank: Rank, found: Term, number_of: int) -> Term:
    """min(the engine's number, free - headroom): tightrank_adapter/headroom.py."""
    told = spec.hooks.get("headroom")
    if told is None or told.get(wire.OBSERVE):
        return found
    sizes = told.get("bytes", ())
    kept = told["fraction"] * rank.total_bytes if "fraction" in told else sizes[0 if len(sizes) == 1 else number_of]
    kept += told.get("guard_bytes", 0)
    left = max(rank.part_bytes - rank.weights_bytes - rank.outside_bytes - kept, 0)
    if left >= found.value:
        return found
    return Term("KV pool", left, "bytes", f"free after the weights, less the headroom of {kept / GIB:.2f} GiB",
                weakest(found.origin, ASSUMED))
