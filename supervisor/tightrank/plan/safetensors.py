"""The header of a safetensors file: what is in it, and whether the file is whole. No weight is read.

The format (github.com/huggingface/safetensors): 8 bytes with the header's length, little endian; JSON, name -> dtype, shape and
data_offsets; the data, without holes.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_HEADER_BYTES = 100_000_000           # the format's own limit
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header. `shape`: of the tensor as stored, the slowest dimension first."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class Broken(ValueError):
    """The file is not whole; the message completes "FILE ..."."""


def read(path: Path) -> tuple[Tensor, ...]:
    """The tensors of a file. Raises Broken, OSError."""
    size = path.stat().st_size
    if size == 0:
        raise Broken("is empty (0 bytes)")
    with open(path, "rb") as file:
        head = file.read(len(LFS_POINTER))
        if head == LFS_POINTER:
            raise Broken(f"is a git-lfs pointer of {size} bytes and not the weights (git lfs pull)")
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER_BYTES):
            raise Broken(f"is no safetensors file or cut off in its header ({size} bytes, header of {length} bytes)")
        file.seek(8)
        tensors, end = _parse(file.read(length))
    if 8 + length + end != size:
        what = "is cut off" if 8 + length + end > size else "does not end where its header says"
        raise Broken(f"{what}: {size} bytes, and its header says {8 + length + end}")
    return tensors


def _parse(text: bytes) -> tuple[tuple[Tensor, ...], int]:
    """(tensors, where their data ends). Raises Broken."""
    try:
        header = json.loads(text)
        if not isinstance(header, Mapping):
            raise Broken("has a header that holds no object")
        found = tuple(_tensors(header))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        return found, max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise error if isinstance(error, Broken) else Broken(f"has a header that cannot be read ({error})") from None


def _tensors(header: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (int(offset) for offset in entry["data_offsets"])
            if not 0 <= start <= end:
                raise Broken(f"has a tensor {name} that ends before it starts")
            yield Tensor(name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), end - start)
