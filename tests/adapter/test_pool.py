"""How much of a KV cache has not been written: real memory behind objects that look like tensors."""
from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tightrank_adapter import memory, peak, pool, rank

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nobody_watches() -> Iterator[None]:
    yield
    pool.watch()


class Tensor:
    """Anonymous memory, as an engine asks for its cache."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.device, self.size = SimpleNamespace(type=device), size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self.size, data_ptr=lambda: self.address)

    def write(self, begin: int, size: int) -> None:
        self.memory[begin:begin + size] = b"\1" * size


def test_nothing_is_known_before_somebody_says_what_the_cache_is() -> None:
    assert pool.untouched_bytes() is None
    pool.watch(None, [], {})
    assert pool.untouched_bytes() is None


def test_what_is_written_is_no_longer_untouched() -> None:
    first, second = Tensor(48 * MIB), Tensor(16 * MIB)
    pool.watch([first, {"layer": (second, first)}])
    assert pool.untouched_bytes() == 64 * MIB
    first.write(0, 24 * MIB)
    assert pool.untouched_bytes() == pytest.approx(40 * MIB, abs=MIB)
    second.write(8 * MIB, 8 * MIB)
    assert pool.untouched_bytes() == pytest.approx(32 * MIB, abs=MIB)
    first.write(0, 48 * MIB)
    second.write(0, 16 * MIB)
    assert pool.untouched_bytes() == 0


def test_a_cache_smaller_than_a_page_and_one_without_bytes() -> None:
    small, empty = Tensor(100), Tensor(100)
    empty.size = 0
    pool.watch([small, empty])
    assert pool.untouched_bytes() == 100
    small.write(0, 1)
    assert pool.untouched_bytes() == 0


def test_objects_of_an_engine_are_looked_into_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.mem_cache.memory_pool")
    holder = type("Pool", (), {"__module__": module.__name__})()
    alien = type("Other", (), {"__module__": "numpy"})()
    holder.k_buffer, holder.inner, alien.tensor = [Tensor(4 * MIB)], holder, Tensor(8 * MIB)
    holder.alien = alien
    pool.watch(holder)
    assert pool.untouched_bytes() == 4 * MIB


def test_on_a_device_the_driver_has_counted_it_and_on_an_integrated_one_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    pool.watch([Tensor(4 * MIB, "cuda")])
    for integrated, expected in ((False, 0), (True, 4 * MIB)):
        cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0,
                               get_device_properties=lambda index, found=integrated: SimpleNamespace(is_integrated=found))
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert pool.untouched_bytes() == expected


def test_a_kernel_that_does_not_tell_makes_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    pool.watch([Tensor(4 * MIB)])
    monkeypatch.setattr(pool, "_mincore", lambda *args: -1)
    assert pool.untouched_bytes() is None


# --- what a step begins with ------------------------------------------------------------------------------------------

def test_a_step_rises_from_what_the_process_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_looked", -1e9)
    peak.reset()
    rest = peak.rest()
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
        pass
    found = peak.read()
    assert rest.held is not None and found is not None and rest.available is not None
    assert found - rest.held == pytest.approx(32 * MIB, abs=2 * MIB)
    assert rest.available == pytest.approx(memory.host().free_bytes, rel=0.2)


def test_available_memory_is_looked_at_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_looked", -1e9)
    peak.reset()
    assert peak.rest().available is not None
    assert peak.rest().available is None and peak.rest().held is not None


def test_a_host_that_does_not_tell_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no /proc")
    monkeypatch.setattr(peak, "_looked", -1e9)
    monkeypatch.setattr(memory, "available", fails)
    assert peak.rest().available is None


def test_what_an_allocator_only_keeps_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_allocated=lambda: 3 * MIB, memory_reserved=lambda: 10 * MIB,
                           current_device=lambda: 0, get_device_properties=lambda index: SimpleNamespace(is_integrated=False),
                           mem_get_info=lambda: (100 * MIB, 200 * MIB))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peak, "_looked", -1e9)
    assert peak.rest() == peak.Rest(3 * MIB, 107 * MIB, None)


@pytest.mark.parametrize("integrated", [True, False])
def test_a_rank_tells_whether_its_device_uses_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, integrated: bool) -> None:
    properties = SimpleNamespace(is_integrated=integrated, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    cuda = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda index: properties)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(rank, "_me", SimpleNamespace(identity={}))
    monkeypatch.setattr(rank, "_facts", {})
    monkeypatch.setattr(rank, "_write", lambda: None)
    rank.weights(5 << 30)
    assert rank._facts == {}, "no device yet"
    rank.locate(0)
    assert rank._facts == {"memory_shared": integrated}
    for garbage in (None, "5", True, 0.0, float("nan"), float("inf")):
        rank.weights(garbage)
    rank.weights(2.5, 1 << 30)
    assert rank._facts.get("weights_bytes") == (None if integrated else 5 << 29), "others use the host's memory meanwhile"
