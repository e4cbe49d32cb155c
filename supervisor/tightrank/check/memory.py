"""What a worker's ranks take for certain, against what is available now. Pure; weights from the files' headers.

Precision first: what is counted is a lower bound, so that what fails here cannot start. Activations, graphs and the engine's
own processes (0.6 to 7 GiB) are not counted; `tightrank plan` counts them.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightrank.adapter import wire
from tightrank.check.devices import Device, DeviceFacts, candidates, local_ranks
from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.check.model import ModelFacts, reads_safetensors
from tightrank.config import Config
from tightrank.config.flags import has, value
from tightrank.plan import sizing, weights
from tightrank.plan.shape import shape
from tightrank.records import MemoryReading, WorkerSpec

_GIB = 2**30
_LEAST_UTILIZATION = 0.9               # vLLM's default was 0.9 and is 0.92 (config/cache.py)


@dataclass(frozen=True, slots=True)
class Need:
    """Of each rank, bytes. `host_bytes`: of the host, whatever device computes. `reserve_bytes`: what the hook headroom keeps
    free. `kv_flag`: what fixes the size of the KV cache; "" where the engine takes what is left."""
    weights_bytes: int
    kv_bytes: int
    host_bytes: int
    reserve_bytes: int
    kv_flag: str

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.host_bytes

    @property
    def text(self) -> str:
        kv = f", KV {self.kv_bytes / _GIB:.2f}" if self.kv_flag else ""
        host = f", host cache {self.host_bytes / _GIB:.2f}" if self.host_bytes else ""
        return f"about {self.total_bytes / _GIB:.2f} GiB (weights {self.weights_bytes / _GIB:.2f}{kv}{host})"


def need(facts: ModelFacts, spec: WorkerSpec, environment: Mapping[str, str], model: Mapping[str, Any], cpu: bool) -> Need:
    """At least; weights are 0 where the files do not say."""
    kv, flag = sizing.fixed(spec, sizing.kv_space(spec, environment, cpu))
    host = sizing.number(value(spec.argv, "--hicache-size"), 10**9)
    return Need(_weights(facts, spec, model), kv, host, _reserve(spec), flag)


def _weights(facts: ModelFacts, spec: WorkerSpec, model: Mapping[str, Any]) -> int:
    """Of the average stage, which the heaviest is never under."""
    if not reads_safetensors(spec):
        return 0
    return sum(weights.rank_bytes(facts.tensors, shape(model), weights.split(spec, model))) // spec.pipeline_parallel


def _reserve(spec: WorkerSpec) -> int:
    told = spec.hooks.get("headroom", {})
    return max(told.get("bytes", ()), default=0) if not told.get(wire.OBSERVE) else 0


# --- the host's memory ------------------------------------------------------------------------------------------------


def host_items(config: Config, workers: Sequence[tuple[WorkerSpec, Need]], memory: MemoryReading) -> Iterator[Item]:
    """`workers`: those whose ranks use the host's memory, all together."""
    if not workers:
        return
    item, available = "memory of the host", memory.available_bytes
    if available is None:
        yield unknown(item, f"what is available cannot be read ({memory.why})")
        return
    ranks = sum(local_ranks(spec) for spec, _ in workers)
    total = sum(found.total_bytes * local_ranks(spec) for spec, found in workers)
    spare = config.guard.margin_bytes + sum(found.reserve_bytes * local_ranks(spec) for spec, found in workers)
    largest = max((found for _, found in workers), key=lambda found: found.total_bytes)
    sentence = (f"{'the rank' if ranks == 1 else f'each of {ranks} ranks'} takes {largest.text}, {total / _GIB:.2f} in all; "
                f"{available / _GIB:.2f} GiB are available, of which guard.floor keeps {config.guard.floor_bytes / _GIB:.2f}")
    over = total + config.guard.floor_bytes - available
    if not total:
        yield unknown(item, f"how much the ranks take cannot be told; {available / _GIB:.2f} GiB are available")
    elif over > 0:
        yield failed(item, "host-memory-too-small", sentence, _less(workers, over, ranks))
    elif over + spare > 0:
        yield warned(item, f"{sentence} and margin and headroom want {spare / _GIB:.2f}", _less(workers, over + spare, ranks))
    else:
        yield passed(item, sentence)


def _less(workers: Sequence[tuple[WorkerSpec, Need]], over: int, ranks: int) -> str:
    """What to change so that `over` bytes less are taken."""
    each = math.ceil(over / ranks)
    need = max((found for _, found in workers), key=lambda found: found.kv_bytes)
    if need.kv_flag and need.kv_bytes > each:
        return f"free {over / _GIB:.2f} GiB, or lower {need.kv_flag} by {each / _GIB:.2f} GiB for each rank"
    return f"free {over / _GIB:.2f} GiB, or use a smaller or quantized model"


# --- memory of devices ------------------------------------------------------------------------------------------------


# Weights that are not on the device, by rules of their own.
_OFFLOADS = ("--kt-weight-path", "--kt-num-gpu-experts", "--offload-group-size", "--offload-num-in-group", "--offload-backend")


def device_items(facts: DeviceFacts, spec: WorkerSpec, environment: Mapping[str, str], found: Need) -> Iterator[Item]:
    """Against the devices that have memory of their own. The best case counts: the freest of those that it may use."""
    item = f"memory of {spec.name}'s devices"
    ranks = local_ranks(spec)
    mine = sorted(candidates(facts, spec, environment), key=lambda device: device.free_bytes or 0, reverse=True)[:ranks]
    if len(mine) < ranks:
        yield unknown(item, facts.why or f"{len(mine)} devices for {ranks} ranks")
        return
    tightest = mine[-1]
    yield _device(item, spec, found, tightest) or _utilization(item, spec, found, tightest)


def _device(item: str, spec: WorkerSpec, found: Need, tightest: Device) -> Item | None:
    """A failure, when what is certain does not fit."""
    assert tightest.free_bytes is not None and tightest.total_bytes is not None
    if has(spec.argv, *_OFFLOADS):
        return None
    taken = found.weights_bytes + found.kv_bytes - sizing.number(value(spec.argv, "--cpu-offload-gb"), _GIB)
    if taken <= tightest.free_bytes:
        return None
    sentence = (f"a rank takes {found.text}, and device {tightest.index} has {tightest.free_bytes / _GIB:.2f} of "
                f"{tightest.total_bytes / _GIB:.2f} GiB free")
    if taken <= tightest.total_bytes:
        return failed(item, "device-memory-taken", sentence, "end what else uses the device (nvidia-smi)")
    return failed(item, "kv-pool-too-small", sentence, "raise tensor_parallel, or use a smaller or quantized model")


def _utilization(item: str, spec: WorkerSpec, found: Need, tightest: Device) -> Item:
    """vLLM wants its part of all the memory to be free at the start, whatever the KV cache is set to (v1/worker/utils.py)."""
    assert tightest.free_bytes is not None and tightest.total_bytes is not None
    free, total = tightest.free_bytes, tightest.total_bytes
    sentence = f"a rank takes {found.text}; device {tightest.index} has {free / _GIB:.2f} of {total / _GIB:.2f} GiB free"
    if spec.engine != "vllm":
        return passed(item, sentence)
    asked = value(spec.argv, "--gpu-memory-utilization") if has(spec.argv, "--gpu-memory-utilization") else None
    wanted = _fraction(asked)
    if wanted * total <= free:
        return passed(item, sentence)
    shown = f"--gpu-memory-utilization {asked}" if asked else f"vLLM's default utilization, {wanted} or more,"
    return failed(item, "device-memory-taken", f"{shown} of {total / _GIB:.2f} GiB is {wanted * total / _GIB:.2f}, and "
                  f"{free / _GIB:.2f} are free on device {tightest.index}",
                  f"free it, or use --gpu-memory-utilization {math.floor(100 * free / total) / 100:g} or less")


def _fraction(text: str | None) -> float:
    try:
        return float(text) if text else _LEAST_UTILIZATION
    except ValueError:
        return _LEAST_UTILIZATION
