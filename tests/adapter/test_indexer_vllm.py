"""The hook `indexer` on vLLM: its variable as vllm.envs reads it, and what the releases' own functions make of it."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT, Proves
from raw_engine import CACHE, interpreter, wire

MIB = 2**20
WANTED = 16 * MIB
NAME = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
ENVS = f"""
import functools, os
environment_variables = {{"{NAME}": lambda: int(os.getenv("{NAME}", "512"))}}
def __getattr__(name):
    if name in environment_variables: return environment_variables[name]()
    raise AttributeError(name)
def enable_envs_cache():
    global __getattr__
    __getattr__ = functools.cache(__getattr__)
    __getattr__("{NAME}")
"""
WORKER = """
import json, os, sys, types
from types import SimpleNamespace as Bag
from tightrank_adapter import rank
from tightrank_adapter.vllm import indexer
more = json.loads(sys.argv[1])
class Layer: ...
class Model:
    def named_modules(self): return [("", self), (more.get("layer", "layers.0.self_attn.indexer"), Layer())]
class Worker:
    def load_model(self, *, load_dummy_weights=False): ...
    def get_model(self): return Model()
class CPUWorker(Worker): ...
class WorkerWrapperBase:
    def init_worker(self, all_kwargs):
        self.worker = CPUWorker()
def begin():
    rank.settings()
    rank.hello("worker", 0)
    if more.get("raises"):
        owner, _, name = ("indexer." + more["raises"]).rpartition(".")
        setattr(eval(owner), name, lambda *args, **kwargs: 1 // 0)
    from tightrank_adapter import fault
    fault.contained("indexer", "worker", indexer.worker)(Bag(WorkerWrapperBase=WorkerWrapperBase))
    for _ in range(2):
        wrapper = WorkerWrapperBase()
        wrapper.init_worker([])
        wrapper.worker.load_model(load_dummy_weights=True)
"""
STAND = WORKER + """
sys.modules["vllm"], sys.modules["vllm.envs"] = types.ModuleType("vllm"), types.ModuleType("vllm.envs")
exec(%r, vars(sys.modules["vllm.envs"]))
if more.get("unknown"): sys.modules["vllm.envs"].environment_variables.clear()
if more.get("cached"): sys.modules["vllm.envs"].enable_envs_cache()
begin()
print(json.dumps(os.environ.get(indexer.NAME)))
""" % ENVS


def drive(run: Path, program: str, python: str = sys.executable, path: str = "", env: dict[str, str] | None = None,
          drill: str = "", values: dict[str, Any] | None = None, **more: Any) -> tuple[Any, wire.Hello]:
    """What `program` printed last, as JSON, and the hello of its worker. `more` goes to the program."""
    run.chmod(0o700)
    hooks = {"indexer": {"budget_bytes": WANTED, **(values or {})}}
    wire.write_settings(str(run), wire.Settings("w", 1, "vllm", hooks, {"where": drill} if drill else {}))
    done = subprocess.run([python, "-c", program, json.dumps(more)], capture_output=True, text=True, timeout=240, check=False,
                          cwd=run, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(INJECT), path))),
                                        "TIGHTRANK_ADAPTER": str(run), "OMP_NUM_THREADS": "1", **(env or {})})
    assert done.returncode == 0, done.stderr[-4000:]
    [found] = run.glob("hello-*.json")
    return json.loads(done.stdout.splitlines()[-1]), wire.read_json(str(found), wire.Hello)


def test_the_variable_is_set_where_it_is_missing_and_read_back(tmp_path: Path) -> None:
    assert drive(tmp_path, STAND)[0] == "16"


def test_the_supervisors_own_setting_of_it_is_in_force(tmp_path: Path) -> None:
    found, hello = drive(tmp_path, STAND, env={NAME: "16"})
    assert found == "16"
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE
    assert hello.facts["indexer"] == {NAME: WANTED}


@pytest.mark.parametrize(("more", "wanted", "found"), [
    ({"env": {NAME: "512"}}, f"{NAME}=16", "512 in vllm.envs"),
    ({"cached": True}, f"{NAME}=16", "512 in vllm.envs"),
    ({"unknown": True}, NAME, "no such variable in vllm.envs"),
    ({"layer": "layers.0.self_attn"}, "a model with an indexer", "Model has none"),
])
def test_what_is_not_in_force_is_refused_by_name(tmp_path: Path, more: dict[str, Any], wanted: str, found: str) -> None:
    _, hello = drive(tmp_path, STAND, **more)
    state = hello.hooks["indexer"]
    assert state["state"] == wire.FAILED
    assert wanted in state["wanted"] and found in state["found"]


def test_observed_it_reads_and_tells_and_changes_nothing(tmp_path: Path) -> None:
    found, hello = drive(tmp_path, STAND, values={"observe": True})
    assert found is None
    assert hello.hooks["indexer"]["state"] == wire.OBSERVING
    assert (hello.facts["indexer"], hello.facts["indexer_wanted"]) == ({NAME: 512 * MIB}, {NAME: WANTED})


@pytest.mark.parametrize("function", ["worker", "_set", "_made", "_watch", "_finish", "budget_mib", "_wanted_mib",
                                      "arithmetic.has_indexer"])
def test_whichever_of_our_functions_raises_the_engine_goes_on_and_it_is_told(tmp_path: Path, function: str) -> None:
    found, hello = drive(tmp_path, STAND, raises=function)
    assert found in ("16", None)
    assert hello.hooks["indexer"]["state"] != wire.IN_FORCE
    assert {fault["error"] for fault in hello.facts["faults"]} == {"ZeroDivisionError: integer division or modulo by zero"}


@pytest.mark.parametrize("where", ["WorkerWrapperBase.init_worker", "CPUWorker.load_model", "indexer.finish"])
def test_a_drill_leaves_the_engine_as_it_is(tmp_path: Path, where: str) -> None:
    _, hello = drive(tmp_path, STAND, drill=where)
    assert hello.hooks["indexer"]["state"] != wire.IN_FORCE
    assert hello.facts["faults"][0]["error"] == f"Drill: a fault drill at {where}"


# The builder's own line: max_logits_bytes = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 1024 * 1024
RELEASE = WORKER + """
import torch
import vllm
import vllm.envs as envs
from vllm.v1.attention.backends.mla import indexer as builders
split = getattr(builders, "split_indexer_prefill_chunks", None)
if split is None:
    split = builders.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
keys, rows = torch.tensor([3_000, 100_000, 40]), torch.tensor([700, 2048, 40])
def chunks(function=split):
    found = function(keys, rows, 1 << 30, envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 1024 * 1024)
    return [[int(keys[request].sum()), piece.stop - piece.start] for request, piece in found]
before = chunks()
begin()
envs.enable_envs_cache()
del os.environ[indexer.NAME]  # from here on the kept value is what counts
answer = {"release": vllm.__version__, "before": before, "after": chunks()}
try:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUIndexerMetadataBuilder as cpu
    answer["cpu"] = chunks(cpu._split_indexer_prefill_chunks)
except ImportError:
    answer["cpu"] = None
print(json.dumps(answer))
"""


@pytest.mark.engine
@pytest.mark.parametrize("release", ["vllm", "vllm-0.33.0", "vllm-0.28.0"])
def test_a_real_release_splits_its_rows_by_the_budget(tmp_path: Path, release: str, proves: Proves) -> None:
    path = "" if release == "vllm" else str(CACHE / "releases" / release)
    answer, hello = drive(tmp_path, RELEASE, interpreter("vllm"), path, {"CUDA_VISIBLE_DEVICES": ""})
    assert release == "vllm" or answer["release"].partition("+")[0] == release.partition("-")[2]
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE
    assert hello.facts["indexer"] == {NAME: WANTED}
    for budget, found in ((512 * MIB, answer["before"]), (WANTED, answer["after"])):
        assert max(4 * keys * rows for keys, rows in found) <= budget
        assert sum(rows for _, rows in found) == 700 + 2048 + 40, "every row once"
    assert len(answer["after"]) > 10 * len(answer["before"])
    # What the hook cannot bound, and docs/hooks.md says so: one chunk of everything.
    whole = [[3_000 + 100_000 + 40, 700 + 2048 + 40]]
    assert answer["cpu"] == (None if release == "vllm-0.28.0" else whole)
    proves("vllm", answer["release"], "indexer", by="classes")
