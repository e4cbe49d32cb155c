"""One worker over three hosts: what ends it ends it everywhere in time, nothing hangs, and it comes back by itself."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from helpers import wait_until
from hosts_net import NODES, Hosts

MakeHosts = Callable[..., Hosts]
DEATH_SECONDS, SILENCE_SECONDS = 3.0, 5.0      # within which all other hosts have ended the generation
pytestmark = pytest.mark.timeout(300)


def ends(three: Hosts, pids: list[int], seconds: float) -> None:
    began = time.monotonic()
    wait_until(three.ranks_gone(pids), seconds + 5, "the ranks are gone")
    assert time.monotonic() - began < seconds
    three.ask()                                # whatever it answers: it does not hang


def test_a_killed_rank_a_lost_host_and_a_cut_link(hosts: MakeHosts) -> None:
    """One of each kind; the others are run by `scripts/test --full`."""
    three = hosts()
    three.start()
    last = three.wait_up()
    assert three.ask() == 200
    pids = three.engine_pids()
    os.kill(three.all[1].engine_pids("Worker")[0], signal.SIGKILL)
    ends(three, pids, DEATH_SECONDS)
    last = three.wait_up(last)
    assert three.causes(0)[-1] == "rank-died"
    pids = three.engine_pids(0, 1)
    three.all[2].kill()
    ends(three, pids, SILENCE_SECONDS)
    three.all[2].start()
    last = three.wait_up(last)
    pids = three.engine_pids()
    three.all[1].cut("INPUT")
    ends(three, pids, SILENCE_SECONDS)
    three.all[1].mend()
    three.wait_up(last)
    assert three.ask() == 200


@pytest.mark.full
@pytest.mark.parametrize("node", range(NODES))
@pytest.mark.parametrize("victim", ["Worker", "guard.json", "tightrank.daemon"])
def test_whatever_is_killed(hosts: MakeHosts, node: int, victim: str) -> None:
    three = hosts()
    three.start()
    last, pids = three.wait_up(), three.engine_pids()
    host = three.all[node]
    os.kill(host.engine_pids(victim)[0] if victim == "Worker" else host.supervisor_pid(victim), signal.SIGKILL)
    ends(three, pids, SILENCE_SECONDS if victim == "guard.json" else DEATH_SECONDS)
    if victim == "guard.json":                 # it was the first process of its host: the host is gone with it
        wait_until(lambda: not host.pids(), 10, "the host is gone")
        host.start()
    three.wait_up(last)
    assert three.ask() == 200


@pytest.mark.full
@pytest.mark.parametrize("node", range(NODES))
def test_a_frozen_host(hosts: MakeHosts, node: int) -> None:
    three = hosts()
    three.start()
    last = three.wait_up()
    others, frozen = three.engine_pids(*(each for each in range(NODES) if each != node)), three.engine_pids(node)
    three.all[node].freeze()
    began = time.monotonic()
    wait_until(lambda: not set(others) & set(three.engine_pids()), 10, "the others have ended their ranks")
    assert time.monotonic() - began < SILENCE_SECONDS
    time.sleep(3)
    three.all[node].thaw()
    wait_until(three.ranks_gone(frozen), 5, "the old ranks are gone")
    three.wait_up(last)
    assert three.ask() == 200


@pytest.mark.full
@pytest.mark.parametrize("chains", [("INPUT",), ("OUTPUT",), ("INPUT", "OUTPUT")])
@pytest.mark.parametrize("node", range(NODES))
def test_a_cut_link_in_each_direction(hosts: MakeHosts, node: int, chains: tuple[str, ...]) -> None:
    three = hosts()
    three.start()
    last, pids = three.wait_up(), three.engine_pids()
    three.all[node].cut(*chains)
    ends_in_time = time.monotonic()
    wait_until(three.ranks_gone(pids), 10, "the ranks are gone")
    assert time.monotonic() - ends_in_time < SILENCE_SECONDS
    time.sleep(2)
    assert not [host.node for host in three.all if host.engine_pids()], "nothing starts while it is cut"
    three.all[node].mend()
    three.wait_up(last)
    assert three.ask() == 200


@pytest.mark.full
def test_a_link_that_loses_a_third(hosts: MakeHosts) -> None:
    """It may end the generation, and nothing hangs; without the loss it serves."""
    three = hosts()
    three.start()
    three.wait_up()
    three.all[2].cut("INPUT", "OUTPUT", share=0.3)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        three.ask()
        time.sleep(0.5)
    three.all[2].mend()
    three.wait_up()
    wait_until(lambda: three.ask() == 200, 30, "it serves")


@pytest.mark.full
def test_started_and_stopped_in_every_order(hosts: MakeHosts) -> None:
    three = hosts()
    last = 0
    for order in permutations(range(NODES)):
        for node in order:
            three.all[node].start()
            time.sleep(0.3)
        last = three.wait_up(last)
        for node in order:
            os.kill(three.all[node].supervisor_pid("guard.json"), signal.SIGTERM)
            wait_until(lambda host=three.all[node]: not host.pids(), 30, "the host has ended")


def test_the_tightest_hosts_memory_decides(hosts: MakeHosts) -> None:
    """Its cgroup's room shrinks; the worker's budget follows, and the status names it."""
    calm = {"mode": "off"}
    tighten = {"threshold": "2GiB", "duration": "500ms", "pause": "500ms"}
    three = hosts(engine="sglang", settings={"guard": {"floor": "64MiB", "margin": "64MiB", "abort": calm, "shed": calm,
                                                       "tighten": tighten}})
    for host in three.all:
        host.limit(6 << 30)
    three.start()
    three.wait_up()
    assert three.all[0].worker()["line_budget"] == 8_000_000
    used = int((three.all[2].groups[0] / "memory.usage_in_bytes").read_text())
    three.all[2].limit(used + (600 << 20))
    began = time.monotonic()
    while three.all[0].worker()["line_budget"] == 8_000_000:
        assert time.monotonic() - began < 5, "the budget follows"      # the level itself takes 0.5 s
        time.sleep(0.2)
    rows: list[dict[str, Any]] = three.all[0].status()["nodes"]
    assert rows[1]["available_bytes"] < 1 << 30 < rows[0]["available_bytes"]
    assert rows[1]["budget"] < rows[0]["budget"] == 8_000_000
    sentences = [event["sentence"] for event in three.all[0].deployment.events("line")]
    assert any("node 2 (10.77.0.3) allows no more" in sentence for sentence in sentences)
