"""NVIDIA devices of this host, and whether they can do what was asked for. `pynvml` is imported late; without it: unknown."""
from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.config.flags import FLAGS, has, value
from tightrank.records import WorkerSpec

_CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
_BFLOAT16 = (8, 0)           # vLLM platforms/cuda.py:649


@dataclass(frozen=True, slots=True)
class Device:
    """`total_bytes` None: it has no memory of its own (unified memory)."""
    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    devices: tuple[Device, ...] = ()
    why: str = ""                      # there are none that can be seen, and why

    @property
    def unified(self) -> bool:
        return any(device.total_bytes is None for device in self.devices)


def read() -> DeviceFacts:
    """Never raises."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return DeviceFacts(why="nvidia-ml-py is not installed (pip install 'tightrank[nvidia]')")
    try:
        nvml.nvmlInit()
        return DeviceFacts(tuple(_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())))
    except nvml.NVMLError as error:
        return DeviceFacts(why=f"NVML: {error}")


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total: int | None = None
    free: int | None = None
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    except nvml.NVMLError_NotSupported:
        pass
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(index, str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle)), (major, minor), total, free)


def on_cpu(spec: WorkerSpec, environment: Mapping[str, str], release: str) -> bool:
    """Whether the engine computes on the CPU: told so, or built for nothing else."""
    theirs = {**environment, **spec.env}
    told = any(theirs.get(name) == text for name, text in _CPU_VARIABLES.items())
    return told or value(spec.argv, "--device") == "cpu" or "cpu" in release.partition("+")[2]


def candidates(facts: DeviceFacts, spec: WorkerSpec, environment: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices that the worker may use: those named, and all where a name does not tell (MIG, numbers of unlike devices,
    which CUDA counts by speed)."""
    theirs = {**environment, **spec.env}
    named = spec.devices or tuple(filter(None, theirs.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    alike = len({device.name for device in facts.devices}) == 1 or theirs.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found = [next((device for device in facts.devices if device.uuid.startswith(name) or (alike and str(device.index) == name)),
                  None) for name in named]
    whole = tuple(device for device in found if device is not None)
    return whole if named and len(whole) == len(named) else facts.devices


def local_ranks(spec: WorkerSpec) -> int:
    """How many of its ranks run on this host, at least: several nodes share them, and Ray puts them where it likes."""
    if value(spec.argv, *FLAGS["vllm"]["executor"]) == "ray" or has(spec.argv, "--use-ray"):
        return 1
    nodes = value(spec.argv, "--nnodes", "-n") or "1"
    return max(1, spec.tensor_parallel * spec.pipeline_parallel // (int(nodes) if re.fullmatch(r"[1-9]\d{0,5}", nodes) else 1))


def weakest(facts: DeviceFacts, spec: WorkerSpec, environment: Mapping[str, str]) -> tuple[int, int]:
    """The compute capability of the weakest device that it must use, at best. There are devices."""
    found = sorted((device.capability for device in candidates(facts, spec, environment)), reverse=True)
    return found[:local_ranks(spec)][-1]


def items(facts: DeviceFacts, spec: WorkerSpec, environment: Mapping[str, str], cpu: bool) -> Iterator[Item]:
    ranks = local_ranks(spec)
    if cpu:
        yield passed("devices", f"{spec.engine} computes on the CPU here")
        return
    if not facts.devices:
        yield unknown("devices", f"they and what data types they take cannot be told ({facts.why or 'no NVIDIA device'})")
        return
    found = candidates(facts, spec, environment)
    if len(found) < ranks:
        yield failed("devices", "arguments-invalid", f"{ranks} ranks, and {len(found)} devices for them",
                     "lower tensor_parallel or pipeline_parallel, or name more devices")
        return
    names = sorted({device.name for device in found})
    yield passed("devices", f"{ranks} ranks on {len(found)} devices ({', '.join(names)})")
    yield _data_type(spec, weakest(facts, spec, environment))


def _data_type(spec: WorkerSpec, capability: tuple[int, int]) -> Item:
    item, shown = "data type", f"compute capability {capability[0]}.{capability[1]}"
    asked = value(spec.argv, "--dtype")
    if asked in ("bfloat16", "bf16") and capability < _BFLOAT16 and spec.engine == "sglang":
        return warned(item, f"--dtype {asked} on {shown}: SGLang takes float16 there", "use --dtype half to say so")
    if asked in ("bfloat16", "bf16") and capability < _BFLOAT16:
        return failed(item, "dtype-unsupported", f"--dtype {asked} needs compute capability 8.0, and the device has "
                      f"{capability[0]}.{capability[1]}", "use --dtype half")
    return passed(item, f"{asked or 'dtype auto'} on {shown}")
