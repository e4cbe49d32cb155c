"""A prefill and a decode worker under one supervisor: pd.restart when one of them dies or is restarted."""
from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from deployment import Deployment, Make
from helpers import free_ports, wait_until


def pair(make: Make, restart: str) -> Deployment:
    ports = free_ports(3)
    workers = [{"name": "p", "role": "prefill", "port": ports[0], "transfer_port": ports[1]},
               {"name": "d", "role": "decode", "port": ports[2]}]
    deployment = make(engine="sglang", settings={"workers": workers, "pd": {"restart": restart}}).up()
    wait_until(lambda: state(deployment) == {"p": ("up", 1), "d": ("up", 1)}, 30, "both are up")
    return deployment


def state(deployment: Deployment) -> dict[str, tuple[str, int]]:
    return {worker["name"]: (worker["phase"], worker["generation"]) for worker in deployment.status().get("workers", ())}


def kill_scheduler(deployment: Deployment, name: str) -> None:
    ranks = next(worker["ranks"] for worker in deployment.status()["workers"] if worker["name"] == name)
    os.kill(next(rank["id"]["pid"] for rank in ranks if rank["role"] == "scheduler"), signal.SIGKILL)


def decisions(deployment: Deployment, name: str) -> list[dict[str, Any]]:
    return [event for event in deployment.events("decision") if event["worker"] == name]


@pytest.mark.parametrize(("victim", "peer"), [("p", "d"), ("d", "p")])
def test_a_pair_is_restarted_together_and_once(make: Make, victim: str, peer: str) -> None:
    deployment = pair(make, "pair")
    kill_scheduler(deployment, victim)
    wait_until(lambda: state(deployment) == {"p": ("up", 2), "d": ("up", 2)}, 30, "both are up again")
    asked = [event["sentence"] for event in decisions(deployment, peer) if event["data"]["reason"] == "peer-restart"]
    assert asked == [f"generation 1 of {victim}, its peer, ends (pd.restart: pair): draining, then the next generation"]
    assert not [event for event in decisions(deployment, victim) if event["data"]["reason"] == "peer-restart"]
    assert not [event for event in deployment.events("cause") if event["worker"] == peer]   # it did not fail
    deployment.post(f"/workers/{victim}/restart")
    wait_until(lambda: state(deployment) == {"p": ("up", 3), "d": ("up", 3)}, 30, "both are up once more")


def test_one_is_restarted_alone(make: Make) -> None:
    deployment = pair(make, "one")
    kill_scheduler(deployment, "p")
    wait_until(lambda: state(deployment) == {"p": ("up", 2), "d": ("up", 1)}, 30, "it is up again")
