"""ATOM's hooks on stand-ins for its modules (tests/fakes/atom_stand_in). Real: the processes of the ranks, torch's gloo
between them, sitecustomize in each. The memory of a device is told."""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import INJECT, ROOT, Proves, free_ports, run_command
from raw_engine import interpreter
from tightrank_adapter import wire
from tightrank_adapter.atom import steps
from tightrank_adapter.atom.indexer import VARIABLE

STAND_IN = ROOT / "tests" / "fakes" / "atom_stand_in"
FORMS = ("v0.1.2", "2026-07-21", "head")
TOTAL = 10_000       # MiB; utilization 0.9 and 2 % give 8800 MiB for what is held and for KV
LIGHT = {"free": 5000, "peak": 4000, "reserved": 4200}       # the engine's own: 8800 - 4000 [- 800 outside torch]
HEAVY = {"free": 2000, "peak": 4000, "reserved": 4200}       # of the published kind: 3800 MiB outside torch


class Sized:
    """What each rank answered ("answer", blocks of 1 MiB) or raised ("error", text), and its hello."""

    def __init__(self, answers: list[Any], hellos: dict[int, wire.Hello], output: str) -> None:
        self.output = output
        self.hellos = hellos
        self.blocks = [value["num_kvcache_blocks"] if isinstance(value, dict) else value
                       for kind, value in answers if kind == "answer"]
        self.errors = [value for kind, value in answers if kind == "error"]


def size(directory: Path, ranks: list[dict[str, int]], *, form: str = "head", values: dict[str, Any] | None = None,
         drill: dict[str, Any] | None = None, requests: int = 0, **case: Any) -> Sized:
    """`values`: of the hook headroom; None: without the adapter."""
    env = {"STAND_IN_ATOM": form, "STAND_IN_CASE": json.dumps({"total": TOTAL, "ranks": ranks, **case}),
           "PYTHONPATH": f"{INJECT}{os.pathsep}{STAND_IN}"}
    if values is not None:
        directory.chmod(0o700)
        hooks = {"ranks": {}, "headroom": {"ranks": len(ranks), **values}}
        wire.write_settings(str(directory), wire.Settings("w", 1, "atom", hooks, drill))
        env["TIGHTRANK_ADAPTER"] = str(directory)
    done = run_command([interpreter("vllm"), STAND_IN / "size.py", str(len(ranks)), str(free_ports(1)[0]), str(requests)],
                       env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    hellos = [wire.read_json(str(path), wire.Hello) for path in directory.glob("hello-*.json")]
    return Sized(json.loads(done.stdout), {hello.rank or 0: hello for hello in hellos if hello.role == "runner"}, done.stderr)


FRACTION = {"fraction": 0.08}        # 800 MiB of TOTAL


@pytest.mark.parametrize(("form", "own"), [("v0.1.2", [4800, 2000, 4800]), ("2026-07-21", [4000, 1000, 4000]),
                                           ("head", [4000, 1000, 4000])])
def test_the_tightest_rank_decides_for_all_and_rank_0_says_so(tmp_path: Path, form: str, own: list[int],
                                                              proves: Proves) -> None:
    """Without the hook, rank 0's number goes to a rank that cannot hold it."""
    if form == "head":
        assert size(tmp_path, [LIGHT, HEAVY, LIGHT], form=form).blocks == own
    tightest = min(own[1], 2000 - 800)
    found = size(tmp_path, [LIGHT, HEAVY, LIGHT], form=form, values=FRACTION)
    assert found.blocks == [tightest] * 3, found.output
    assert [found.hellos[rank].hooks["headroom"]["state"] for rank in range(3)] == [wire.IN_FORCE] * 3
    facts = found.hellos[1].facts["headroom"]
    assert (facts["own_bytes"] >> 20, facts["free_bytes"] >> 20, facts["headroom_bytes"] >> 20) == (own[1], 2000, 800)
    assert "rank 1 is the tightest" in found.output
    proves("atom", "*", "headroom", by="stand-in")


@pytest.mark.parametrize("form", FORMS)
def test_balanced_ranks_keep_the_engines_own_number(tmp_path: Path, form: str) -> None:
    found = size(tmp_path, [LIGHT, LIGHT], form=form, values={"fraction": 0.02}, graphs=100)
    own = 8800 - 4000 - 100 - (0 if form == "v0.1.2" else 800)
    assert found.blocks == [own] * 2, found.output
    assert all(hello.hooks["headroom"]["state"] == wire.IN_FORCE for hello in found.hellos.values())


def test_a_rank_of_its_own_size(tmp_path: Path) -> None:
    found = size(tmp_path, [LIGHT, LIGHT], values={"bytes": [100 << 20, 3500 << 20]})
    assert found.blocks == [1500] * 2


@pytest.mark.parametrize("form", ["v0.1.2", "head"])
def test_a_rank_that_fails_in_the_hook_fails_all_alike(tmp_path: Path, form: str) -> None:
    """Law 7: nobody waits for a rank that cannot tell its numbers."""
    found = size(tmp_path, [LIGHT, LIGHT], form=form, values=FRACTION,
                 drill={"where": "ModelRunner.get_num_blocks", "ranks": [1]})
    assert found.blocks == []
    assert len(set(found.errors)) == 1
    assert "hook headroom failed on rank 1" in found.errors[0]
    assert found.hellos[1].facts["faults"][0]["replicated"]


def test_a_rank_whose_engine_fails_before_the_ranks_agree_says_its_own_error(tmp_path: Path) -> None:
    found = size(tmp_path, [LIGHT, LIGHT, LIGHT], values=FRACTION, fails=1)
    assert found.blocks == []
    assert found.errors[1] == "ZeroDivisionError: the estimate of this rank fails"
    assert found.errors[0] == found.errors[2] and "failed on rank 1" in found.errors[0]


def test_what_cannot_fit_is_said_alike_on_all_ranks(tmp_path: Path) -> None:
    """ATOM's own words, with the number that the ranks agreed on: without the hook only the heavy rank's requests overflow."""
    found = size(tmp_path, [LIGHT, HEAVY], values=FRACTION, state=10, requests=128)
    assert found.blocks == []
    assert len({error.partition("--gpu")[0] for error in found.errors}) == 1
    assert "(1.25GB for 128 slots) exceeds available KV budget (0.98GB)" in found.errors[0]


def test_a_headroom_that_leaves_nothing_is_said(tmp_path: Path) -> None:
    found = size(tmp_path, [LIGHT, LIGHT], values={"bytes": [6000 << 20]})
    assert len(set(found.errors)) == 1 and "headroom leaves no memory for the KV cache" in found.errors[0]


def test_observed_it_tells_and_changes_nothing(tmp_path: Path) -> None:
    found = size(tmp_path, [LIGHT, HEAVY], values={**FRACTION, wire.OBSERVE: True})
    assert found.blocks == [4000, 1000]
    assert found.hellos[0].hooks["headroom"]["state"] == wire.OBSERVING
    assert "rank 1 is the tightest" in found.output


def test_another_sum_is_not_guessed_at(tmp_path: Path) -> None:
    found = size(tmp_path, [LIGHT, HEAVY], form="later", values=FRACTION)
    assert found.blocks == [5000, 2000]
    state = found.hellos[0].hooks["headroom"]
    assert state["state"] == wire.FAILED and "memory_stats" in state["wanted"] and "another sum" in state["found"]


# --- what needs no torch ----------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from types import SimpleNamespace as Bag
from atom.config import Config
from atom.model_engine.model_runner import ModelRunner
config = Config("tiny", 2)
config.parallel_config.pipeline_parallel_rank = 1
runner = ModelRunner(1, config)
for prefill in (8, 0, 8):
    runner.forward(Bag(is_dummy_run=False, total_tokens_num_prefill=prefill, total_seqs_num_prefill=1, num_cached_tokens=[64],
                       num_scheduled_tokens=[8]))
"""


def run(directory: Path, hooks: dict[str, dict[str, Any]], form: str = "head", engine: str = "atom",
        variable: str = "256", **case: Any) -> wire.Hello | None:
    directory.chmod(0o700)
    wire.write_settings(str(directory), wire.Settings("w", 1, engine, hooks))
    done = run_command([sys.executable, "-c", PROGRAM], env={
        "STAND_IN_ATOM": form, "STAND_IN_CASE": json.dumps(case), "PYTHONPATH": f"{INJECT}{os.pathsep}{STAND_IN}",
        "TIGHTRANK_ADAPTER": str(directory),
        VARIABLE: variable})
    assert done.returncode == 0, done.stderr
    found = list(directory.glob("hello-*.json"))
    return wire.read_json(str(found[0]), wire.Hello) if found else None


def test_a_runner_says_who_it_is(tmp_path: Path, proves: Proves) -> None:
    hello = run(tmp_path, {"ranks": {}})
    assert hello is not None
    assert (hello.role, hello.rank, hello.tp_rank, hello.pp_rank) == ("runner", 3, 1, 1)
    assert hello.hooks["ranks"]["state"] == wire.IN_FORCE
    assert hello.facts.get("faults") is None
    proves("atom", "*", "ranks", by="stand-in")


def test_a_plugin_of_another_engine_is_left_alone(tmp_path: Path) -> None:
    """vLLM and SGLang load ATOM's modules where it is their plugin."""
    assert run(tmp_path, {"ranks": {}}, engine="vllm") is None


@pytest.mark.parametrize(("form", "variable", "state", "found"), [
    ("head", "256", wire.IN_FORCE, ""), ("head", "2048", wire.FAILED, "2147483648 in atom.utils.envs"),
    ("v0.1.2", "256", wire.FAILED, "no such variable in ATOM")])
def test_the_indexers_budget_is_read_back(tmp_path: Path, form: str, variable: str, state: str, found: str,
                                          proves: Proves) -> None:
    hello = run(tmp_path, {"ranks": {}, "indexer": {"budget_bytes": 256 << 20}}, form, variable=variable)
    assert hello is not None
    assert hello.hooks["indexer"]["state"] == state and found in hello.hooks["indexer"]["found"]
    proves("atom", "*", "indexer", by="stand-in")


def test_a_model_without_an_indexer_is_none_to_bound(tmp_path: Path) -> None:
    hello = run(tmp_path, {"ranks": {}, "indexer": {"budget_bytes": 256 << 20}}, model={"kv_lora_rank": 512})
    assert hello is not None
    assert hello.hooks["indexer"]["state"] == wire.FAILED
    assert "a model with an indexer" in hello.hooks["indexer"]["wanted"]


def test_an_observed_indexer_tells_the_engines_own_budget(tmp_path: Path) -> None:
    hello = run(tmp_path, {"ranks": {}, "indexer": {"budget_bytes": 256 << 20, wire.OBSERVE: True}}, variable="2048")
    assert hello is not None
    assert hello.hooks["indexer"]["state"] == wire.OBSERVING and hello.facts["indexer"] == {VARIABLE: 2 << 30}
    assert hello.facts["indexer_wanted"] == {VARIABLE: 256 << 20}


def test_memory_goes_back_after_prefill_batches_only(tmp_path: Path, proves: Proves) -> None:
    """The warm-up, a dummy, comes before KV sizing; the batch between the two prefills is a decode."""
    hello = run(tmp_path, {"ranks": {}, "empty-cache": {"when": "every-chunk", "mark_bytes": 0}})
    assert hello is not None
    assert hello.hooks["empty-cache"]["state"] == wire.IN_FORCE and hello.facts["cache_releases"] >= 1
    proves("atom", "*", "empty-cache", by="stand-in")


@pytest.mark.parametrize(("dummy", "prefill", "expected"), [(True, 8, False), (False, 0, False), (False, 8, True)])
def test_which_batches_are_prefill(dummy: bool, prefill: int, expected: bool) -> None:
    assert steps.is_prefill(SimpleNamespace(is_dummy_run=dummy, total_tokens_num_prefill=prefill)) is expected
