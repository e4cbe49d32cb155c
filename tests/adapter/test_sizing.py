"""The hook headroom around an engine's own function: the minimum over all ranks, and how it fails. Threads stand for ranks;
the real collectives are in tests/engines/test_headroom.py."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT
from tightrank_adapter import wire

GIB = 2**30
# Two ranks, each with an engine's object; the gather is a barrier that both must reach, or it times out.
RANKS = """
import json, sys, threading
from tightrank_adapter import memory, rank, sizing
more = json.loads(sys.argv[1])
rank.settings(more["directory"])
rank.hello("scheduler", rank=0)
barrier, sent, entered = threading.Barrier(2, timeout=5), [None, None], []
free = more.get("free", [10 * 2**30, 10 * 2**30])
local = threading.local()
memory.rank_memory = lambda ranks: memory.Memory(free[local.number], 20 * 2**30, False)
rank.number = lambda: local.number  # for drills

def gather(number):
    def call(row):
        entered.append(number)
        sent[number] = row
        barrier.wait()
        return list(sent)
    return call

class Engine:
    def __init__(self, number):
        if not more.get("lost"): self.number = number
    def budget(self, extra=0):
        if more.get("raises") == local.number: raise MemoryError("weights leave nothing")
        return more.get("own", [8 * 2**30, 8 * 2**30])[local.number]

if more.get("broken"):
    owner, _, name = more["broken"].rpartition(".")
    setattr(sys.modules["tightrank_adapter." + owner], name, lambda *args, **kwargs: 1 // 0)
sizing.surround(Engine, "budget", lambda engine: engine.number, lambda engine: gather(engine.number))
answers = [None, None]

def run(number):
    local.number = number
    try:
        answers[number] = Engine(number).budget(extra=1)
    except BaseException as error:
        answers[number] = "%s: %s" % (type(error).__name__, error)

threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"answers": answers, "entered": sorted(entered)}))
"""


def drive(directory: Path, values: dict[str, Any] | None = None, drill: dict[str, Any] | None = None,
          **more: Any) -> tuple[list[Any], wire.Hello]:
    """What each rank's engine was answered, and the hello. Every rank whose engine has a number entered the gather."""
    directory.chmod(0o700)
    hooks = {"ranks": {}, "headroom": {"bytes": [GIB, 3 * GIB], **(values or {})}}
    wire.write_settings(str(directory), wire.Settings("w", 1, "sglang", hooks, drill))
    done = subprocess.run([sys.executable, "-c", RANKS, json.dumps({"directory": str(directory), **more})], text=True,
                          capture_output=True, timeout=60, check=False, env={"PYTHONPATH": str(INJECT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["entered"] == ([] if more.get("lost") else [1] if more.get("raises") == 0 else [0, 1])
    [path] = directory.glob("hello-*.json")
    return found["answers"], wire.read_json(str(path), wire.Hello)


def test_all_ranks_get_the_tightest_ones_number(tmp_path: Path) -> None:
    answers, hello = drive(tmp_path)
    assert answers == [7 * GIB, 7 * GIB]
    assert hello.hooks["headroom"]["state"] == wire.IN_FORCE


def test_balanced_ranks_get_the_engines_own(tmp_path: Path) -> None:
    assert drive(tmp_path, {"bytes": [GIB]})[0] == [8 * GIB, 8 * GIB]


def test_the_engines_own_numbers_may_differ_too(tmp_path: Path) -> None:
    assert drive(tmp_path, {"bytes": [0]}, own=[5 * GIB, 8 * GIB])[0] == [5 * GIB, 5 * GIB]


def test_observed_each_rank_keeps_its_own(tmp_path: Path) -> None:
    answers, hello = drive(tmp_path, {"observe": True}, own=[8 * GIB, 9 * GIB])
    assert answers == [8 * GIB, 9 * GIB] and hello.hooks["headroom"]["state"] == wire.OBSERVING
    assert hello.facts["headroom"]["headroom_bytes"] in (GIB, 3 * GIB)


def test_observed_a_failure_of_ours_stops_nobody(tmp_path: Path) -> None:
    answers, hello = drive(tmp_path, {"observe": True}, broken="memory.rank_memory")
    assert answers == [8 * GIB, 8 * GIB] and hello.facts["faults"] and hello.hooks["headroom"]["state"] == wire.WANTED


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_a_rank_that_fails_makes_all_of_them_raise_alike(tmp_path: Path, ranks: list[int]) -> None:
    answers, hello = drive(tmp_path, drill={"where": "Engine.budget", "ranks": ranks})
    said = (f"HeadroomError: tightrank: hook headroom failed on rank {ranks[0]}: without its numbers no rank can size its KV "
            "cache")
    assert answers == [said, said]
    assert all(fault["replicated"] and fault["where"] == "Engine.budget" for fault in hello.facts["faults"])


@pytest.mark.parametrize("function", ["memory.rank_memory", "headroom.wanted_bytes"])
def test_whichever_of_our_functions_raises_all_ranks_raise_alike(tmp_path: Path, function: str) -> None:
    answers, hello = drive(tmp_path, broken=function)
    assert answers[0] == answers[1] and "hook headroom failed on rank 0" in answers[0]
    assert "ZeroDivisionError" in hello.facts["faults"][0]["error"]


@pytest.mark.parametrize("function", ["headroom.sentence", "rank.fact"])
def test_what_only_tells_stops_nobody(tmp_path: Path, function: str) -> None:
    answers, hello = drive(tmp_path, broken=function)
    assert answers == [7 * GIB, 7 * GIB] and "ZeroDivisionError" in hello.facts["faults"][0]["error"]


def test_what_the_engine_raises_passes_at_once_and_a_gather_that_breaks_is_ours(tmp_path: Path) -> None:
    """Other ranks may be inside a collective of the engine's own: to enter ours then would hang both."""
    answers, hello = drive(tmp_path, raises=0)
    assert answers == ["MemoryError: weights leave nothing",
                       "HeadroomError: tightrank: hook headroom failed on rank 1: it could not ask the other ranks"]
    assert "BrokenBarrierError" in hello.facts["faults"][0]["error"]


def test_observed_a_gather_that_breaks_changes_nothing(tmp_path: Path) -> None:
    answers, hello = drive(tmp_path, {"observe": True}, raises=0)
    assert answers == ["MemoryError: weights leave nothing", 8 * GIB]
    assert not any(fault["replicated"] for fault in hello.facts["faults"])


@pytest.mark.parametrize("observe", [True, False])
def test_a_rank_that_cannot_tell_its_place(tmp_path: Path, observe: bool) -> None:
    """What it asks the engine's object for has another name. Observed, the engine's own number stands."""
    answers, hello = drive(tmp_path, {"observe": True} if observe else {}, lost=True)
    assert "AttributeError" in hello.facts["faults"][0]["error"]
    assert answers == [8 * GIB, 8 * GIB] if observe else all("it cannot tell its place" in answer for answer in answers)


def test_a_rank_that_has_no_number_ends_the_others(tmp_path: Path) -> None:
    """What ATOM's ranks send where the engine failed before they could agree."""
    answers, _ = drive(tmp_path, own=[-1, 8 * GIB])
    said = "HeadroomError: tightrank: the engine failed on rank 0 before it could size its KV cache"
    assert answers == [said, said]


def test_a_headroom_that_leaves_nothing_says_so_on_all_ranks(tmp_path: Path) -> None:
    answers, _ = drive(tmp_path, {"bytes": [GIB, 30 * GIB]})
    assert answers[0] == answers[1] == ("HeadroomError: tightrank: headroom leaves no memory for the KV cache: rank 1 has "
                                        "10.00 GiB free and keeps 30.00 GiB")


def test_an_engine_that_has_nothing_itself_says_it_itself(tmp_path: Path) -> None:
    assert drive(tmp_path, {"bytes": [0]}, own=[-5, 8 * GIB])[0] == [-5, -5]
