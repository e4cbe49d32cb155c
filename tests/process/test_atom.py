"""ATOM under the real supervisor: a stand-in for its server and processes (tests/fakes/atom_stand_in), the real adapter."""
from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import httpx2
import pytest
from deployment import Deployment, Make, gone
from helpers import ROOT, free_ports, wait_until
from raw_engine import interpreter

STAND_IN = ROOT / "tests" / "fakes" / "atom_stand_in"
MODULE = ["-m", "atom.entrypoints.openai_server"]


def stand_in(make: Make, python: str = sys.executable, tensor_parallel: int = 2, hooks: tuple[str, ...] = ("ranks",),
             args: tuple[str, ...] = (), settings: dict[str, Any] | None = None, **case: Any) -> Deployment:
    env = {"PYTHONPATH": str(STAND_IN), "STAND_IN_CASE": json.dumps(case)}
    return make(engine="atom", command=[python, *MODULE], env=env, tensor_parallel=tensor_parallel,
                args=("--port", str(free_ports(1)[0]), *args), settings={"hooks": list(hooks), **(settings or {})})


def test_it_is_up_when_a_real_request_was_served_and_not_when_its_health_says_so(make: Make) -> None:
    deployment = stand_in(make, hooks=("ranks", "indexer", "empty-cache"), late=4.0).up()
    health = f"http://127.0.0.1:{deployment.engine_port}/health"

    def well() -> bool:
        try:
            return httpx2.get(health, timeout=5).status_code == 200
        except httpx2.HTTPError:
            return False

    wait_until(well, 30, "the stand-in's health")
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        assert deployment.worker()["phase"] == "starting" and deployment.get("/readyz").status_code == 503
        time.sleep(0.2)
    worker = deployment.wait_phase("up")
    roles = sorted((rank["role"], rank["rank"]) for rank in worker["ranks"] if rank["role"] != "main")
    assert roles == [("engine-core", None), ("runner", 0), ("runner", 1)]
    runners = [rank for rank in worker["ranks"] if rank["role"] == "runner"]
    assert all({hook: state["state"] for hook, state in rank["hooks"].items()} ==
               {"ranks": "in-force", "indexer": "in-force", "empty-cache": "in-force"} for rank in runners)
    assert deployment.get("/steps?worker=w0").json()["steps"], "the canary's prefill was recorded"
    tree = deployment.tree()
    assert deployment.terminate() == 0
    assert gone(tree)()


def test_a_dead_runner_ends_the_generation_although_its_server_says_that_it_is_well(make: Make) -> None:
    """ATOM's own server would keep requests waiting for ever."""
    deployment = stand_in(make).up()
    deployment.wait_phase("up")
    tree = deployment.tree()
    os.kill(deployment.pid("runner"), signal.SIGKILL)
    wait_until(lambda: deployment.get("/readyz").status_code == 503, 1.0, "503 after the death")
    wait_until(gone(tree), 10, "an empty tree")
    deployment.wait_phase("up", generation=2)
    assert deployment.events("cause")[0]["data"]["cause"] == "rank-died"


@pytest.mark.parametrize(("hook", "found"), [("line", "hooks: line is not there for atom"),
                                             ("heads", "hooks: heads is not there for atom")])
def test_a_hook_that_it_does_not_have_is_refused_before_the_start(make: Make, hook: str, found: str) -> None:
    done = stand_in(make, hooks=("ranks", hook)).run("check")
    assert done.returncode == 78 and found in done.stderr


RANKS = [{"free": 5000, "peak": 4000, "reserved": 4200}, {"free": 2000, "peak": 4000, "reserved": 4200}]


def test_a_pool_sized_for_the_tightest_of_real_ranks(make: Make) -> None:
    deployment = stand_in(make, interpreter("vllm"), hooks=("ranks", "headroom"), total=10_000, ranks=RANKS).up()
    worker = deployment.wait_phase("up", timeout=120)
    told = [rank["facts"]["kv_tokens"] for rank in worker["ranks"] if rank["role"] == "engine-core"]
    assert told == [1000 * 16], "blocks of the heavy rank, as tokens"


@pytest.mark.parametrize(("reserve", "change"), [
    ("0.08", "--max-num-seqs 95 at most (now 256)"),
    ("0.15", "--max-num-seqs 47 at most (now 256), or lower headroom.reserve, or free memory on rank 1; a larger share")])
def test_a_request_cache_that_cannot_fit_is_final_and_names_the_flag(make: Make, reserve: str, change: str) -> None:
    """1000 MiB are the heavy rank's own; 2000 are free on it. ATOM's own advice, a higher utilization, is never passed on
    where the headroom was the bound."""
    deployment = stand_in(make, interpreter("vllm"), hooks=("ranks", "headroom"), args=("--max-num-seqs", "256"),
                          settings={"headroom": {"reserve": reserve}}, total=10_000, ranks=RANKS, state=10).up()
    worker = deployment.wait_phase("failed", timeout=120)
    assert worker["diagnosis"]["cause"] == "state-cache-too-small" and worker["restarts"] == 0
    assert change in worker["diagnosis"]["change"]
    assert reserve == "0.08" or "utilization" not in worker["diagnosis"]["change"]
