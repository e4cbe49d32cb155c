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
