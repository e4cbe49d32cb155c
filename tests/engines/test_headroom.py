"""The hook headroom on two real ranks of each engine, under the supervisor: the tightest rank sizes the KV cache of both."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from helpers import Proves
from raw_engine import CACHE, with_settings
from tightrank_adapter import headroom, memory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_SECONDS = 240
GIB = 2**30
COMMANDS = {"vllm": ["bin/vllm", "serve"], "sglang": ["bin/python", "-m", "sglang.launch_server"]}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "5", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                           "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                        "--sleep-on-idle", "--mem-fraction-static", "0.3")}
HOLDERS = {"vllm": "worker", "sglang": "scheduler"}
WHERE = {"vllm": "CPUWorker.determine_available_memory", "sglang": "KVCacheConfigurator._profile_available_bytes"}
UNIT_BYTES = {"vllm": 65536, "sglang": 512}            # of a rank's block of tokens, and of a token, in the tiny model
Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path, dense_model: str) -> Iterator[Make]:
    made: list[Deployment] = []

    def build(engine: str, reserve: str, command: list[str] | None = None, observe: tuple[str, ...] = ()) -> Deployment:
        head, *rest = COMMANDS[engine]
        deployment = Deployment(
            tmp_path, engine=engine, model=Path(dense_model), command=command or [str(CACHE / "envs" / engine / head), *rest],
            args=ARGUMENTS[engine], env=ENVIRONMENTS[engine], tensor_parallel=2,
            settings={"hooks": ["ranks", "headroom"], "observe": list(observe), "headroom": {"reserve": reserve},
                      "limits": {"drain": "30s", "restarts": 0}})
        made.append(deployment)
        return deployment.up()

    yield build
    for deployment in made:
        deployment.close()


def holders(worker: dict[str, Any]) -> list[dict[str, Any]]:
    return [rank for rank in worker["ranks"] if rank["role"] == HOLDERS[worker["engine"]]]


def count(worker: dict[str, Any]) -> int:
    """What each rank made of its share, alike on both: SGLang's schedulers say tokens, vLLM's workers blocks."""
    name = {"vllm": "kv_blocks", "sglang": "kv_tokens"}[worker["engine"]]
    [found] = {rank["facts"][name] for rank in holders(worker)}
    return int(found)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_tightest_rank_sizes_the_kv_cache_of_both(make: Make, engine: str, proves: Proves) -> None:
    # What the engine itself takes up to sizing, about 1.5 GiB a rank, comes off these 4 GiB; its own number is over 4 GiB.
    keep = memory.host().free_bytes // 2 - 4 * GIB
    deployment = make(engine, f"{GIB}B+{keep}B")
    worker = deployment.wait_phase("up", timeout=START_SECONDS)
    found = worker["headroom"]
    rows = [headroom.Terms(**row) for row in found["ranks"]]
    assert [row.rank for row in rows] == [0, 1] and (rows[0].bound, rows[1].bound) == ("engine", "headroom")
    assert (found["tightest_rank"], found["bound"]) == (1, "headroom") and rows[1].headroom_bytes == keep
    assert found["available_bytes"] == rows[1].free_bytes - keep < rows[0].available_bytes
    assert count(worker) == found["available_bytes"] // UNIT_BYTES[engine]
    assert "rank 1 is the tightest" in found["sentence"] and "free - " in found["sentence"]
    assert all(rank["hooks"]["headroom"]["state"] == "in-force" for rank in holders(worker))
    assert any(found["sentence"] in event["sentence"] for event in deployment.events("hello"))
    assert deployment.terminate() == 0
    proves(engine, worker["engine_version"], "headroom", by="server")


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm"])       # SGLang's in test_supervised.py
def test_balanced_ranks_keep_the_engines_own_number(make: Make, engine: str) -> None:
    worker = make(engine, "0.08").wait_phase("up", timeout=START_SECONDS)
    found = worker["headroom"]
    rows = [headroom.Terms(**row) for row in found["ranks"]]
    assert found["bound"] == "engine" and {row.own_bytes for row in rows} == {found["available_bytes"]}
    assert count(worker) == found["available_bytes"] // UNIT_BYTES[engine]
    assert all(row.headroom_bytes == int(0.08 * (memory.host().total_bytes // 2)) for row in rows)


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.full), "sglang"])
def test_one_rank_that_fails_inside_the_hook_ends_all_with_one_cause(make: Make, tmp_path: Path, engine: str) -> None:
    head, *rest = COMMANDS[engine]
    program = CACHE / "envs" / engine / head
    drill = json.dumps({"where": WHERE[engine], "ranks": [1]})
    command = with_settings(tmp_path / "wrapped", f"settings['drill'] = {drill}", [str(program), *rest])
    deployment = make(engine, "0.08", [str(command)])
    worker = deployment.wait_phase("failed", timeout=START_SECONDS)
    assert worker["diagnosis"]["cause"] == "adapter-fault" and "rank 1" in worker["diagnosis"]["summary"]
    assert worker["processes"] == []
    [said] = [event for event in deployment.events("cause") if "raised in" in event["sentence"]]
    assert WHERE[engine] in said["sentence"]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sglang"])
def test_a_headroom_that_leaves_nothing_is_named_and_not_restarted(make: Make, engine: str) -> None:
    deployment = make(engine, f"{GIB}B+{memory.host().total_bytes}B")
    worker = deployment.wait_phase("failed", timeout=START_SECONDS)
    diagnosis = worker["diagnosis"]
    assert diagnosis["cause"] == "kv-pool-too-small" and "rank 1" in diagnosis["summary"]
    assert "headroom.reserve" in diagnosis["change"] and "mem-fraction" not in diagnosis["change"]
    assert worker["generation"] == 1
