"""What tests of the preflight share: specs, facts of a machine where all is well, and files as engines have them."""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tightrank.check.item import Item
from tightrank.config import Config
from tightrank.config.load import resolve
from tightrank.config.source import Entry
from tightrank.records import MemoryReading, WorkerSpec

GIB = 2**30
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def make_spec(args: Sequence[str] = (), *, engine: str = "vllm", env: Mapping[str, str] | None = None, tensor_parallel: int = 1,
              pipeline_parallel: int = 1, devices: tuple[str, ...] = (), role: str = "both", name: str = "w0", port: int = 8001,
              hooks: Mapping[str, Mapping[str, Any]] | None = None, command: Sequence[str] | None = None) -> WorkerSpec:
    """As the plan would make it, with the arguments given behind the program."""
    programs = {"vllm": ("vllm", "serve", "/m"), "sglang": ("python3", "-m", "sglang.launch_server", "--model-path", "/m"),
                "atom": ("python3", "-m", "atom.entrypoints.openai_server", "--model", "/m")}
    return WorkerSpec(
        name=name, engine=engine, role=role, argv=(*(command or programs[engine]), *args), env=env or {}, host="127.0.0.1",
        port=port, model="/m", served_model="m", tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel,
        devices=devices, hooks=hooks or {}, line=None, context_tokens=None, schedule=(), drain_seconds=1,
        start_stall_seconds=60)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """A whole file: name -> (dtype, shape), filled with zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, dimensions) in tensors.items():
        size = math.prod(dimensions) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(dimensions), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def item_of(name: str, found: Iterable[Item]) -> Item:
    """The only item of this name."""
    items = [item for item in found if item.item == name]
    assert len(items) == 1, items
    return items[0]


def make_config(**changes: Any) -> Config:
    """Of the usual floor (1.5 GiB) and margin (0.5 GiB)."""
    entries = {"model": "/m", "engine": "vllm", "workers[0]": "", "workers[0].name": "w0", **changes}
    return resolve({key: Entry(text, "test", Path("/")) for key, text in entries.items()}, {"HOME": "/"}, "test").config


def make_memory(available_gib: float | None) -> MemoryReading:
    available = None if available_gib is None else int(available_gib * GIB)
    return MemoryReading(0.0, 64 * GIB, available, None, None, available, None, None, "" if available else "meminfo: gone")
