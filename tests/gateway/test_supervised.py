"""Workers of a real supervisor, with the fake as their engine: what it tells is believed, and what it cannot tell is asked.

With SGLang's protocol; what is measured of deaths and freezes, with both: scripts/bench/faults.
"""
from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import GatewayProcess, Supervised, chat, completion, digest, signal_to
from helpers import wait_until


class Stack:
    def __init__(self, directory: Path, fleet: Supervised) -> None:
        self.fleet, self.gateway = fleet, GatewayProcess(directory, supervisors=[fleet.url])
        self.post = self.gateway.post

    def start(self) -> Stack:
        self.fleet.start()
        self.gateway.start()
        return self

    def well(self) -> bool:
        status = self.gateway.status()
        return all(worker["standing"] == "up" for worker in status["workers"]) and all(p["paired"] for p in status["pairs"])

    def legs(self) -> list[dict[str, Any]]:
        """Those of our requests: the supervisor's have no generation, the gateway's own no user agent."""
        return [event for event in self.fleet.log("start") if "user-agent" in event["headers"] and event["generation"]
                and event["path"] != "/tokenize"]

    def good(self) -> bool:
        answer = self.post("/v1/completions", completion())
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == digest("hello") + " 1 2 3"

    def close(self) -> None:
        self.gateway.close()
        self.fleet.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("supervised")
    stack = Stack(directory, Supervised(directory, "sglang"))
    try:
        yield stack.start()
    finally:
        stack.close()


@pytest.fixture
def stack(shared: Stack) -> Stack:
    shared.fleet.recover()
    wait_until(shared.well, 15, f"the gateway holds all for up: {shared.gateway.status()}")
    for peer in shared.fleet.peers:
        peer.reset()
    return shared


def test_legs_carry_the_generation_and_a_dead_one_is_replaced_by_the_next(stack: Stack) -> None:
    worker, peer = stack.fleet.workers()["p0"], stack.fleet["p0"]
    assert stack.good() and stack.good()
    assert {leg["generation"] for leg in stack.legs() if leg["peer"] == "p0"} == {str(worker["generation"])}
    peer.kill()
    assert all(stack.good() for _ in range(4))
    wait_until(lambda: stack.fleet.workers()["p0"]["generation"] > worker["generation"], 20)
    stack.fleet.wait_up()
    wait_until(lambda: stack.good() and any(leg["peer"] == "p0" for leg in stack.legs()), 10, "the next generation gets work")
    assert {leg["generation"] for leg in stack.legs() if leg["peer"] == "p0"} == {str(worker["generation"] + 1)}


@pytest.mark.parametrize("how", ["main stopped", "rank stopped", "rank blocked"])
def test_a_frozen_prefill_is_seen_and_the_request_goes_elsewhere(stack: Stack, how: str) -> None:
    """A request that is in its hands, with health 200 where only a rank is stuck."""
    before = stack.fleet.workers()["p0"]["generation"]
    for peer in stack.fleet.role("prefill"):
        peer.fault("slow-prefill", seconds=0.5)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(stack.good) for _ in range(4)]
        wait_until(lambda: any(leg["peer"] == "p0" for leg in stack.legs()), 5)
        if how == "rank blocked":
            stack.fleet["p0"].fault("block")
        else:
            signal_to(stack.fleet.rank("p0") if how == "rank stopped" else stack.fleet["p0"].known_pid, signal.SIGSTOP)
        started = time.monotonic()
        assert all(answer.result() for answer in answers) and time.monotonic() - started < 12
    if how == "rank blocked":
        stack.fleet["p0"].kill()
        wait_until(lambda: stack.fleet.workers()["p0"]["generation"] > before, 20)


def test_what_never_fits_is_refused_by_the_supervisors_limit(stack: Stack) -> None:
    """The line's and the engine's own length, as /status tells it, counted by the engine's tokenizer."""
    largest = min(worker["longest_prompt_tokens"] for worker in stack.fleet.workers().values())
    assert stack.post("/v1/completions", completion("x" * largest, tokens=1)).status_code == 200
    refused = stack.post("/v1/completions", completion("x" * (largest + 1), tokens=1))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded") and str(largest) in error["message"]
    told = stack.post("/v1/chat/completions", chat("x" * 2 * largest, stream=True))
    assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert stack.post("/v1/completions", completion([1] * (largest + 1))).status_code == 400      # type: ignore[arg-type]
    assert len(stack.legs()) == 2


def test_a_draining_worker_gets_no_more_and_ends_what_it_has(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        for peer in stack.fleet.role("prefill"):
            peer.fault("slow-prefill", seconds=1, count=1)
        running = pool.submit(stack.good)
        leg = wait_until(lambda: [leg for leg in stack.legs() if leg["peer"][0] == "p"])[0]
        assert stack.fleet.deployment.post(f"/workers/{leg['peer']}/drain").status_code < 300
        assert running.result(10)
    wait_until(lambda: stack.fleet.workers()[leg["peer"]]["phase"] == "draining", 5)
    wait_until(lambda: any(worker["standing"] == "out" for worker in stack.gateway.status()["workers"]), 5)
    count = len([each for each in stack.legs() if each["peer"] == leg["peer"]])
    assert all(stack.good() for _ in range(4))
    assert len([each for each in stack.legs() if each["peer"] == leg["peer"]]) == count
    assert stack.fleet.deployment.post(f"/workers/{leg['peer']}/resume").status_code < 300
    wait_until(stack.well, 10)


def test_a_worker_that_is_stopped_on_request_ends_what_it_has(stack: Stack) -> None:
    """The engine drains on its SIGTERM; its answer is not cut because its supervisor says that it is being ended."""
    for peer in stack.fleet.role("decode"):
        peer.fault("slow", seconds=0.3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.post, "/v1/completions", completion(stream=True, max_tokens=8))
        leg = wait_until(lambda: [leg for leg in stack.legs() if leg["peer"][0] == "d"])[0]
        assert stack.fleet.deployment.post(f"/workers/{leg['peer']}/restart").status_code < 300
        wait_until(lambda: stack.fleet.workers()[leg["peer"]]["drains"], 5)
        text = running.result(20).text
    assert "[DONE]" in text and '"error"' not in text, text
    wait_until(lambda: stack.fleet.workers()[leg["peer"]]["generation"] > int(leg["generation"]), 20)
    stack.fleet.wait_up()


def test_a_supervisor_that_is_not_heard_costs_no_request(stack: Stack) -> None:
    """Its stream is lost, so its workers are suspect; probes say that they are well."""
    daemon = stack.fleet.deployment.status()["guard"]["daemon_pid"]
    signal_to(daemon, signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        while time.monotonic() - stopped < 3:
            assert stack.good()
            time.sleep(0.1)
        assert [each["heard"] for each in stack.gateway.status()["supervisors"]] == [False]
    finally:
        signal_to(daemon, signal.SIGCONT)
    wait_until(lambda: all(each["heard"] for each in stack.gateway.status()["supervisors"]), 10)


def test_a_failed_worker_is_told_with_its_cause(tmp_path: Path) -> None:
    """An engine that cannot start: the client learns why, what to change and where to read on; nothing is asked of it."""
    line = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing"
    fleet = Supervised(tmp_path, "vllm", 0, 0, alone=1, flags=("--die-with-line", line))
    stack = Stack(tmp_path, fleet)
    try:
        fleet.deployment.up()
        stack.gateway.start(ready=False)
        wait_until(lambda: fleet.workers().get("w0", {}).get("phase") == "failed", 20)

        def told() -> Any:
            answer = stack.post("/v1/completions", completion())
            return answer if answer.status_code == 503 and "cause" in answer.json()["error"] else None
        answer = wait_until(told, 5)
        error = answer.json()["error"]
        assert (error["cause"], error["worker"]) == ("kv-pool-too-small", "w0") and error["change"] and error["runbook"]
        assert int(answer.headers["retry-after"]) >= 1
        ready = stack.gateway.client.get("/readyz")
        assert ready.status_code == 503 and "kv-pool-too-small" in ready.text
    finally:
        stack.close()
