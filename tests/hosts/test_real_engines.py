"""A real engine whose two ranks live on two hosts: they serve, die and come back together."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import wait_until
from hosts_net import Hosts
from raw_engine import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

NODES, START_SECONDS = 2, 300
COMMANDS = {"vllm": ["bin/vllm", "serve"], "sglang": ["bin/python", "-m", "sglang.launch_server"]}
NETWORK = {"GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "4096"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                        "--sleep-on-idle", "--max-total-tokens", "8192", "--context-length", "4096")}
MakeHosts = Callable[..., Hosts]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_they_serve_die_and_come_back_together(hosts: MakeHosts, engine: str, dense_model: str) -> None:
    head, *rest = COMMANDS[engine]
    two = hosts(engine=engine, nodes=NODES, model=Path(dense_model), command=[str(CACHE / "envs" / engine / head), *rest],
                args=ARGUMENTS[engine], env=ENVIRONMENTS[engine] | NETWORK)
    two.start()
    last = two.wait_up(timeout=START_SECONDS)
    assert two.ask() == 200
    for node in range(NODES):
        pids, victim = two.engine_pids(), next(rank for rank in two.all[node].worker()["ranks"] if rank["rank"] == node)
        os.kill(two.all[node].pid_here(victim["id"]["pid"]), signal.SIGKILL)
        began = time.monotonic()
        wait_until(two.ranks_gone(pids), 20, "the ranks of both hosts are gone")
        assert time.monotonic() - began < 3
        last = two.wait_up(last, START_SECONDS)
        assert two.ask() == 200
        assert two.causes(0)[-1] == "rank-died"
