"""One worker over three hosts, which are three loopback addresses here: it lives and dies as one."""
from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment, fake_model, gone
from helpers import free_ports, wait_until

NODES, TOKEN = 3, "spoken-between-hosts"
pytestmark = pytest.mark.timeout(180)


class Hosts:
    """Three supervisors with one configuration, each with a state directory of its own."""

    def __init__(self, directory: Path, engine: str) -> None:
        port, engine_port, meeting = free_ports(3)
        token, model = directory / "token", fake_model(directory)
        token.write_text(TOKEN)
        addresses = [f"127.0.0.{node + 1}" for node in range(NODES)]
        self.all = []
        for node, address in enumerate(addresses):
            place = directory / f"node{node}"
            place.mkdir()
            made = Deployment(place, engine=engine, model=model, tensor_parallel=NODES, settings={
                "http": {"host": address, "port": port},
                "line": {"budget": 8_000_000},
                "nodes": {"addresses": addresses, "port": meeting, "token_file": str(token)}})
            body = json.loads(made.file.read_text())
            body["workers"][0] |= {"host": address, "port": engine_port}
            made.file.write_text(json.dumps(body))
            self.all.append(made)
        self.url = f"http://{addresses[0]}:{engine_port}"

    def start(self, *nodes: int) -> None:
        for node in nodes or range(NODES):
            self.all[node].start("up", "-c", str(self.all[node].file), "--node-rank", str(node))

    def status(self, node: int) -> dict[str, Any]:
        body = json.loads(self.all[node].file.read_text())["http"]
        try:
            return dict(httpx2.get(f"http://{body['host']}:{body['port']}/status", timeout=5).json())
        except httpx2.HTTPError:
            return {}

    def worker(self, node: int) -> dict[str, Any]:
        found = self.status(node)
        return dict(found["workers"][0]) if "workers" in found else {"phase": "unknown", "ranks": [], "generation": 0}

    def phases(self) -> list[str]:
        return [self.worker(node)["phase"] for node in range(NODES)]

    def wait_up(self, timeout: float = 40, over: int = 0) -> int:
        """Until all are up in one generation over `over`; its number."""
        def there() -> int | None:
            time.sleep(0.1)
            workers = [self.worker(node) for node in range(NODES)]
            numbers = {worker["generation"] for worker in workers}
            whole = len(numbers) == 1 and min(numbers) > over and all(worker["phase"] == "up" for worker in workers)
            return numbers.pop() if whole else None
        try:
            return wait_until(there, timeout, "all hosts up in one generation")
        except pytest.fail.Exception as error:
            raise AssertionError(f"{error}\n" + "\n".join(each.output[-3000:] for each in self.all)) from None

    def pids(self, *nodes: int) -> list[int]:
        """Of the ranks and mains on these hosts."""
        return [pid for node in nodes for pid in self.all_pids(node)]

    def all_pids(self, node: int) -> list[int]:
        return [process["id"]["pid"] for process in self.worker(node)["processes"]]

    def ask(self) -> int:
        body = {"model": "tiny", "prompt": list(range(1, 40)), "max_tokens": 2, "temperature": 0}
        return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=10).status_code

    def causes(self, node: int) -> list[str]:
        return [event["data"]["cause"] for event in self.all[node].events("cause") if event["data"].get("cause")]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[str], Hosts]]:
    made: list[Hosts] = []

    def build(engine: str) -> Hosts:
        made.append(Hosts(tmp_path, engine))
        return made[-1]

    yield build
    for each in made:
        for deployment in each.all:
            deployment.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_they_start_serve_and_stop_as_one(hosts: Callable[[str], Hosts], engine: str) -> None:
    three = hosts(engine)
    three.start(0)
    wait_until(lambda: "has not reported yet" in three.worker(0).get("reason", ""), 20, "the leader waits")
    assert three.worker(0)["generation"] == 0
    three.start(1, 2)
    assert three.wait_up() == 1
    assert [[rank["rank"] for rank in three.worker(node)["ranks"] if rank["rank"] is not None] for node in range(NODES)] == \
        [[0], [1], [2]]
    if engine == "vllm":
        assert three.ask() == 200
    rows = three.status(0)["nodes"]
    assert [(row["node"], row["phase"], row["reason"]) for row in rows] == [(1, "up", ""), (2, "up", "")]
    assert "node 2  127.0.0.3  up, generation 1" in three.all[0].run("status", "--node-rank", "0").stdout
    assert three.all[1].run("restart", "w0", "--node-rank", "1").stderr.strip().endswith("ask there for restart")
    pids = three.pids(0, 1, 2)
    codes = [each.terminate() for each in three.all]
    assert codes == [0, 0, 0] and gone(pids)()


@pytest.mark.parametrize("node", [0, 1])
def test_a_dead_rank_ends_the_generation_on_all_hosts_and_all_start_again(hosts: Callable[[str], Hosts], node: int) -> None:
    three = hosts("vllm")
    three.start()
    three.wait_up()
    pids = three.pids(0, 1, 2)
    victim = next(rank["id"]["pid"] for rank in three.worker(node)["ranks"] if rank["role"] == "worker")
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    wait_until(gone(pids), 5, "the ranks of all hosts are gone")
    assert time.monotonic() - began < 3
    assert three.wait_up(over=1) == 2
    assert three.causes(0)[-1] == "rank-died"
    assert [three.causes(other)[-1] for other in (1, 2) if other != node] == ["node-recalled"] * (2 if node == 0 else 1)


@pytest.mark.parametrize("node", [0, 2])
def test_a_supervisor_that_is_gone_ends_the_generation_until_it_is_back(hosts: Callable[[str], Hosts], node: int) -> None:
    three = hosts("vllm")
    three.start()
    three.wait_up()
    pids, process = three.pids(0, 1, 2), three.all[node].process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    began = time.monotonic()
    wait_until(gone(pids), 10, "the ranks of all hosts are gone")
    assert time.monotonic() - began < 5
    others = [other for other in range(NODES) if other != node]
    assert [three.causes(other)[-1] in ("node-lost", "node-recalled") for other in others] == [True, True]
    assert "node-lost" in [three.causes(other)[-1] for other in others]
    process.wait()
    three.start(node)
    three.wait_up(over=1)


def test_a_frozen_host_is_lost_and_ends_its_old_ranks_when_it_wakes(hosts: Callable[[str], Hosts]) -> None:
    three = hosts("vllm")
    three.start()
    three.wait_up()
    others, frozen = three.pids(0, 1), three.pids(2)
    supervisor = three.all[2].process
    assert supervisor is not None
    tree = [*frozen, *_descendants(supervisor.pid)]
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    wait_until(gone(others), 10, "the ranks of the other hosts are gone")
    assert time.monotonic() - began < 5
    wait_until(lambda: three.worker(0)["phase"] == "backing-off", 20, "the leader waits")
    time.sleep(1)
    assert three.worker(0)["phase"] == "backing-off" and "node 2 (127.0.0.3): was last heard of" in three.worker(0)["reason"]
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
    wait_until(gone(frozen), 5, "the old ranks are gone")
    assert three.wait_up(over=1) == 2


def test_hosts_that_differ_do_not_start_and_say_in_what(hosts: Callable[[str], Hosts]) -> None:
    three = hosts("vllm")
    body = json.loads(three.all[1].file.read_text())
    body["line"]["budget"] = 1_000_000
    three.all[1].file.write_text(json.dumps(body))
    three.start()
    wait_until(lambda: "another configuration" in three.worker(0).get("reason", ""), 20, "they disagree")
    assert three.worker(0)["generation"] == 0 and "node 1 (127.0.0.2)" in three.worker(0)["reason"]


def test_the_tightest_host_decides_for_all(hosts: Callable[[str], Hosts]) -> None:
    """Its levels lower its budget and refuse long prompts; the leader, which has memory, does both for the whole worker."""
    three = hosts("sglang")
    body = json.loads(three.all[2].file.read_text())
    body["guard"] |= {"tighten": {"threshold": "1000GiB", "pause": "1s", "duration": "500ms"}, "abort": {"mode": "off"},
                      "shed": {"threshold": "1000GiB", "duration": "500ms"}}
    three.all[2].file.write_text(json.dumps(body))
    three.start()
    three.wait_up()
    wait_until(lambda: three.worker(0)["line_budget"] < 8_000_000, 20, "the leader's ranks have the lower budget")
    wait_until(lambda: three.worker(0)["shed"], 20, "the leader refuses too")
    assert "node 2 (127.0.0.3)" in three.worker(0)["shed"]["why"]
    [told, *_] = [event["sentence"] for event in three.all[0].events("line")]
    assert "node 2 (127.0.0.3) allows no more" in told
    row = three.status(0)["nodes"][1]
    assert row["budget"] < 8_000_000 and row["available_bytes"] > 0
    assert three.status(0)["nodes"][0]["budget"] == 8_000_000


def test_who_does_not_know_the_token_is_told_nothing(hosts: Callable[[str], Hosts]) -> None:
    three = hosts("vllm")
    three.start(0)
    wait_until(lambda: three.status(0), 20, "the leader answers")
    http = json.loads(three.all[0].file.read_text())["http"]
    url = f"http://{http['host']}:{http['port']}/nodes"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx2.post(url, json={}, headers=headers, timeout=5).status_code == 401
    assert httpx2.post(url, json={}, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5).status_code == 400
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in three.all[0].state.rglob("*") if path.is_file())


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found
