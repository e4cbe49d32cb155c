"""Free memory of NVIDIA devices that have memory of their own. `pynvml` is imported late; without it: unknown, and why."""
from __future__ import annotations

import importlib
from typing import Any


class NvidiaReader:
    """Answers by PCI bus id. A device without memory of its own (unified memory) has no free bytes: the host's count."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._why = ""

    def free_bytes(self, pci_id: str) -> tuple[int | None, str]:
        """(bytes, "") or (None, why)."""
        if not self._load():
            return None, self._why
        try:
            handle = self._nvml.nvmlDeviceGetHandleByPciBusId(pci_id.encode())
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free), ""
        except self._nvml.NVMLError_NotSupported:
            return None, ""
        except self._nvml.NVMLError as error:
            return None, f"NVML, device {pci_id}: {error}"

    def devices(self) -> tuple[str, ...]:
        """PCI bus ids of all that are seen, as torch writes them."""
        if not self._load():
            return ()
        try:
            found = [self._nvml.nvmlDeviceGetPciInfo(self._nvml.nvmlDeviceGetHandleByIndex(index))
                     for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError:
            return ()
        return tuple(f"{each.domain:04x}:{each.bus:02x}:{each.device:02x}.0" for each in found)

    def holders(self, pci_id: str) -> dict[int, int]:
        """Bytes of each process that computes there, by its pid; empty where the driver does not tell (in a container)."""
        if not self._load():
            return {}
        try:
            handle = self._nvml.nvmlDeviceGetHandleByPciBusId(pci_id.encode())
            return {each.pid: int(each.usedGpuMemory or 0) for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except self._nvml.NVMLError:
            return {}

    def _load(self) -> bool:
        if self._nvml is None and not self._why:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                self._why = "nvidia-ml-py is not installed (pip install 'tightrank[nvidia]')"
                return False
            try:
                nvml.nvmlInit()
                self._nvml = nvml
            except nvml.NVMLError as error:
                self._why = f"NVML: {error}"
        return self._nvml is not None
