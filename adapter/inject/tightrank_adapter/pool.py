"""How much of a rank's KV cache nobody has written yet: such pages count as available memory and are promised already.

Engines ask for the whole cache at the start; the kernel gives a page when it is first written.
"""
import ctypes
import mmap
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set

from . import memory

PROBES = 256  # pages that are asked for, over the whole cache: 1 us each
_ENGINES = ("sglang.", "vllm.", "atom.")  # objects of theirs are looked into, others are not
_DEPTH = 4
_mincore: Any = None


class Piece(NamedTuple):
    """One storage of the cache."""
    address: int
    size_bytes: int
    on_device: bool


_pieces: Optional[List[Piece]] = None  # of this process; None: nobody has said


def watch(*roots: Any) -> None:
    """These hold the KV cache, or objects and tables that do."""
    global _pieces
    found: Dict[int, Piece] = {}
    for root in roots:
        for tensor in _tensors(root, _DEPTH, set()):
            storage = tensor.untyped_storage()
            if storage.nbytes() and tensor.device.type in ("cpu", "cuda"):
                found[storage.data_ptr()] = Piece(storage.data_ptr(), storage.nbytes(), tensor.device.type == "cuda")
    _pieces = list(found.values()) or None


def untouched_bytes() -> Optional[int]:
    """None: not known. On an integrated device nobody tells what has been written, so all of it counts as untouched."""
    if _pieces is None:
        return None
    device, host = [sum(piece.size_bytes for piece in _pieces if piece.on_device is place) for place in (True, False)]
    cuda = memory.device()
    integrated = bool(device) and cuda is not None and memory.integrated(cuda)
    missing = _missing_bytes([piece for piece in _pieces if not piece.on_device], host) if host else 0
    return None if missing is None else missing + (device if integrated else 0)


def _missing_bytes(pieces: List[Piece], total: int) -> Optional[int]:
    """Of pages that are looked at in regular steps, those that are not there, as bytes. None: the kernel does not tell."""
    missing = 0
    for piece in pieces:
        pages = max(piece.size_bytes // mmap.PAGESIZE, 1)
        count = min(max(PROBES * piece.size_bytes // total, 1), pages)
        there = [_resident(piece.address + pages * number // count * mmap.PAGESIZE) for number in range(count)]
        if None in there:
            return None
        missing += piece.size_bytes * there.count(False) // count
    return missing


def _resident(address: int) -> Optional[bool]:
    """mincore(2) of the page that holds `address`; of anonymous memory it tells whether the page has been written."""
    global _mincore
    if _mincore is None:
        _mincore = ctypes.CDLL(None, use_errno=True).mincore
        _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    found = ctypes.create_string_buffer(1)
    if _mincore(address // mmap.PAGESIZE * mmap.PAGESIZE, mmap.PAGESIZE, found) != 0:
        return None
    return bool(found.raw[0] & 1)


def _tensors(root: Any, depth: int, seen: Set[int]) -> Iterator[Any]:
    """All tensors that `root` is, holds, or has for attributes."""
    if id(root) in seen or depth < 0:
        return
    seen.add(id(root))
    if hasattr(root, "untyped_storage"):
        yield root
    elif isinstance(root, (list, tuple)):
        for item in root:
            yield from _tensors(item, depth - 1, seen)
    elif isinstance(root, dict):
        for item in root.values():
            yield from _tensors(item, depth - 1, seen)
    elif type(root).__module__.startswith(_ENGINES) and hasattr(root, "__dict__"):
        for item in vars(root).values():
            yield from _tensors(item, depth - 1, seen)
