"""The hook empty-cache: when it gives memory back, where in an engine's loop, and what it does not do."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT
from tightrank_adapter import cache, memory, wire

# A stand-in for a scheduler with overlap and for torch.cuda's allocator: what a chunk held stays in the cache until it is
# emptied. The order of events is what counts.
LOOP = """
import json, sys, types
from types import SimpleNamespace as Bag
from tightrank_adapter import rank, memory
engine, settings = sys.argv[1], json.loads(sys.argv[2])
rank.settings(settings["directory"])
events, free = [], settings["free"]

class Cuda:
    cached = 0
    def is_initialized(self): return True
    def current_device(self): return 0
    def get_device_properties(self, index): return Bag(is_integrated=False)
    def memory_reserved(self): return 10**9 + self.cached
    def memory_allocated(self): return 10**9
    def mem_get_info(self): events.append("asked"); return free - self.cached, 10**10
    def empty_cache(self):
        if settings.get("broken"): raise RuntimeError("device is lost")
        events.append("emptied"); self.cached = 0

cuda = Cuda()
sys.modules["torch"] = Bag(cuda=cuda)
mode = lambda extend: Bag(is_extend=lambda: extend)

class Scheduler:  # SGLang's, and vLLM's Worker by another name of the method
    def run_batch(self, batch, pp_proxy_tensors=None):
        events.append("launch %d" % batch.number)
        cuda.cached += settings["held"] * batch.forward_mode.is_extend()
        return batch.number
    def execute_model(self, scheduler_output):
        events.append("launch %d" % scheduler_output.number)
        cuda.cached += settings["held"] * bool(scheduler_output.scheduled_new_reqs)
        return scheduler_output.number

if engine == "sglang":
    from tightrank_adapter.sglang import empty_cache
    empty_cache.install(Bag(Scheduler=Scheduler))
    rank.hello("scheduler", rank=0)
    run = lambda number, extend: Scheduler().run_batch(Bag(number=number, forward_mode=mode(extend)))
else:
    from tightrank_adapter.vllm import empty_cache
    empty_cache.install(Bag(Worker=Scheduler))
    rank.hello("worker", rank=0)
    cached = Bag(req_ids=[], num_computed_tokens=[], num_output_tokens=[])
    def run(number, extend):
        new = [Bag(req_id="a", num_computed_tokens=0)] if extend else []
        return Scheduler().execute_model(Bag(number=number, scheduled_new_reqs=new, scheduled_cached_reqs=cached,
                                             num_scheduled_tokens={"a": 64} if extend else {}, total_num_scheduled_tokens=64,
                                             scheduled_spec_decode_tokens={}))
results = []
for number, extend in enumerate([True, True, False, True]):
    results.append(run(number, extend))
    events.append("result %d" % (number - 1) if number else "none")  # overlap: the last batch's result, one launch later
print(json.dumps({"events": events, "results": results}))
"""
GIB = 2**30


def drive(directory: Path, program: str, engine: str, values: dict[str, Any], **more: Any) -> tuple[Any, wire.Hello]:
    directory.chmod(0o700)
    hooks = {"ranks": {}, "empty-cache": values}
    wire.write_settings(str(directory), wire.Settings("w", 1, engine, hooks, more.pop("drill", None)))
    arguments = [engine, json.dumps({"directory": str(directory), **more})]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": str(INJECT)})
    assert done.returncode == 0, done.stderr
    [path] = directory.glob("hello-*.json")
    return json.loads(done.stdout), wire.read_json(str(path), wire.Hello)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_under_pressure_each_chunk_ends_before_the_next_is_launched(tmp_path: Path, engine: str) -> None:
    found, hello = drive(tmp_path, LOOP, engine, {"when": "pressure", "mark_bytes": 4 * GIB}, free=5 * GIB, held=2 * GIB)
    kept = [event for event in found["events"] if event.startswith(("launch", "emptied"))]
    assert kept == ["launch 0", "emptied", "launch 1", "emptied", "launch 2", "launch 3", "emptied"]
    assert found["results"] == [0, 1, 2, 3]
    assert hello.hooks["empty-cache"]["state"] == wire.IN_FORCE and hello.facts["cache_releases"] >= 1


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_without_pressure_nothing_is_given_back(tmp_path: Path, engine: str) -> None:
    found, hello = drive(tmp_path, LOOP, engine, {"when": "pressure", "mark_bytes": 4 * GIB}, free=90 * GIB, held=GIB)
    assert "emptied" not in found["events"] and "cache_releases" not in hello.facts


@pytest.mark.parametrize(("values", "held", "asked", "emptied"), [
    ({"when": "every-chunk", "mark_bytes": 0}, GIB, 0, 3),
    ({"when": "never", "mark_bytes": 2**50}, GIB, 0, 0),
    # too little in the allocator's cache to be worth a wait: the device is not even asked
    ({"when": "pressure", "mark_bytes": 2**50}, 1 << 20, 0, 0),
    ({"when": "every-chunk", "mark_bytes": 0}, 1 << 20, 0, 0),
    ({"when": "pressure", "mark_bytes": 2**50, "observe": True}, GIB, 3, 0)])
def test_when(tmp_path: Path, values: dict[str, Any], held: int, asked: int, emptied: int) -> None:
    found, hello = drive(tmp_path, LOOP, "sglang", values, free=90 * GIB, held=held)
    assert [found["events"].count("asked"), found["events"].count("emptied")] == [asked, emptied]
    observed = "observe" in values
    assert hello.hooks["empty-cache"]["state"] == (wire.OBSERVING if observed else wire.IN_FORCE)
    assert ("cache_releases" in hello.facts) == (emptied > 0 or observed)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_release_that_fails_changes_nothing_for_the_engine(tmp_path: Path, engine: str) -> None:
    found, hello = drive(tmp_path, LOOP, engine, {"when": "every-chunk", "mark_bytes": 0}, free=GIB, held=GIB, broken=True)
    assert found["results"] == [0, 1, 2, 3]
    assert "device is lost" in hello.facts["faults"][0]["error"] and not hello.facts["faults"][0]["replicated"]


@pytest.mark.parametrize(("engine", "where"), [("sglang", "Scheduler.run_batch"), ("vllm", "Scheduler.execute_model")])
def test_a_part_of_ours_that_raises_changes_nothing_for_the_engine(tmp_path: Path, engine: str, where: str) -> None:
    found, hello = drive(tmp_path, LOOP, engine, {"when": "every-chunk", "mark_bytes": 0}, free=GIB, held=GIB,
                         drill={"where": where})
    assert found["results"] == [0, 1, 2, 3] and "emptied" not in found["events"]
    assert {fault["hook"] for fault in hello.facts["faults"]} == {"empty-cache"}


@pytest.mark.parametrize(("free", "shared", "seconds"), [
    (90 * GIB, True, 1.0), (5 * GIB, True, 0.5), (4 * GIB + (1 << 20), True, 0.05),
    (90 * GIB, False, 0.05)])                                   # a device: one launch may take all that it has
def test_it_looks_again_before_half_of_what_is_spare_can_be_filled(
        monkeypatch: pytest.MonkeyPatch, free: int, shared: bool, seconds: float) -> None:
    monkeypatch.setattr(cache, "FILL_BYTES_PER_SECOND", GIB)
    assert cache._calm_seconds(memory.Memory(free, 100 * GIB, shared), 4 * GIB) == pytest.approx(seconds)


# On a CPU the cache is the heap of the C library: blocks under its mmap threshold that were freed stay in it.
HEAP = """
import ctypes, json, sys
from tightrank_adapter import cache, rank
rank.settings(json.loads(sys.argv[2])["directory"])
rank.hello("worker", rank=0)
assert cache.begin()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = rss()
blocks = [libc.malloc(100 << 10) for _ in range(3000)]
for block in blocks:
    ctypes.memset(block, 1, 100 << 10)
for block in blocks[:-1]:
    libc.free(block)
held = rss() - before
cache.chunk_ended()
print(json.dumps({"held": held, "left": rss() - before}))
"""


def test_on_a_cpu_the_heap_goes_back(tmp_path: Path) -> None:
    found, _ = drive(tmp_path, HEAP, "vllm", {"when": "pressure", "mark_bytes": 2**50})
    assert found["held"] > 250 << 20 and found["left"] < 30 << 20


def test_on_a_cpu_without_pressure_the_heap_stays(tmp_path: Path) -> None:
    found, _ = drive(tmp_path, HEAP, "vllm", {"when": "pressure", "mark_bytes": 0})
    assert found["left"] > 250 << 20
