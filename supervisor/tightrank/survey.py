"""What a memory plan is asked about, read once: the ranks' memory, the model's files, what was measured here before."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tightrank import breaker, engines, host
from tightrank.calibration import WORKER, flat, pace_of
from tightrank.calibration.store import Calibration
from tightrank.check import devices, model
from tightrank.config import Config
from tightrank.config.units import Reserve
from tightrank.engines import installed
from tightrank.errors import ConfigError
from tightrank.inputs import Inputs
from tightrank.plan.answers import predicted
from tightrank.plan.budget import memory_plan
from tightrank.plan.case import Case
from tightrank.plan.safetensors import Tensor
from tightrank.plan.terms import ASSUMED, READ, Memory
from tightrank.readers.memory import MemoryReader
from tightrank.records import MemoryReading, WorkerSpec


@dataclass(frozen=True, slots=True)
class Facts:
    """Of this host, whatever is planned on it. `state`: the deployment's state directory."""
    host: host.HostFacts
    memory: MemoryReading
    devices: devices.DeviceFacts
    tensors: tuple[Tensor, ...]
    state: Path


def read(config: Config) -> Facts:
    """One look. Raises nothing for what is not there."""
    return Facts(host.read(), MemoryReader().read(0.0), devices.read(), model.read(Path(config.model)).tensors,
                 Path(config.state_directory))


@dataclass(frozen=True, slots=True)
class Given:
    """Memory that is not read here. `text`: a size for each rank, or one for all; `unified`: it is that of hosts with one
    rank each, whose devices have none of their own."""
    text: str
    unified: bool = False


def cases(config: Config, specs: Sequence[WorkerSpec], inputs: Inputs, facts: Facts, given: Given | None) -> list[Case]:
    """One for each worker. Raises ConfigError for memory that is no size."""
    engine_release = release(specs[0], inputs.environment)              # one engine for all workers
    on_cpu = [devices.on_cpu(spec, inputs.environment, engine_release or "") for spec in specs]
    sharing = sum(devices.local_ranks(spec) for spec, cpu in zip(specs, on_cpu, strict=True) if cpu or facts.devices.unified)
    store = Calibration(facts.state / "calibration.json", breaker.facts(facts.host, engine_release))
    found = []
    for spec, cpu in zip(specs, on_cpu, strict=True):
        measured = store.nearest(store.identity(spec, ""))
        memory = _given(given, spec, cpu) if given else _memory(facts, spec, inputs.environment, cpu, sharing)
        found.append(Case(config, spec, inputs.model, facts.tensors, memory, inputs.environment, cpu, flat(measured),
                          pace_of(measured.get(WORKER, {}))))
    return found


def expecting(config: Config, specs: Sequence[WorkerSpec], inputs: Inputs) -> tuple[WorkerSpec, ...]:
    """`specs`, each with what its start should measure, as far as that is certain. Raises ConfigError."""
    found = cases(config, specs, inputs, read(config), None)
    return tuple(replace(case.spec, predicted=predicted(memory_plan(case))) for case in found)


def release(spec: WorkerSpec, environment: Mapping[str, str]) -> str | None:
    """Of the engine, as it is installed where `spec` runs it; None where that cannot be told."""
    path = {**environment, **spec.env}.get("PATH", os.defpath)
    return installed.release(spec.argv, engines.get(spec.engine).distribution, path)


def _given(given: Given, spec: WorkerSpec, cpu: bool) -> Memory:
    ranks = spec.tensor_parallel * spec.pipeline_parallel
    try:
        sizes = Reserve().parse(given.text)
    except ValueError:
        sizes = "nothing"
    if not isinstance(sizes, tuple) or len(sizes) not in (1, ranks):
        more = f", or {ranks} joined by +" if ranks > 1 else ""
        raise ConfigError(f"--memory {given.text}: must be a size for each rank (80GiB){more}")
    each = sizes if len(sizes) == ranks else sizes * ranks
    return Memory(each, each, 1 if given.unified or cpu else 0, ASSUMED, "--memory")


def _memory(facts: Facts, spec: WorkerSpec, environment: Mapping[str, str], cpu: bool, sharing: int) -> Memory | None:
    ranks = spec.tensor_parallel * spec.pipeline_parallel
    if cpu or facts.devices.unified:
        reading = facts.memory
        if reading.available_bytes is None or reading.mem_total_bytes is None:
            return None
        total = min(reading.mem_total_bytes, reading.cgroup_limit_bytes or reading.mem_total_bytes)
        return Memory((total,) * ranks, (reading.available_bytes,) * ranks, sharing, READ,
                      "/proc/meminfo and the memory cgroup")
    mine = devices.candidates(facts.devices, spec, environment)[:ranks]
    if len(mine) < ranks:
        return None
    return Memory(tuple(device.total_bytes or 0 for device in mine), tuple(device.free_bytes or 0 for device in mine), 0, READ,
                  "NVML")
