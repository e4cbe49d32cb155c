"""The guard's levels at the gateway: long prompts are refused while memory is short, the victim of an abort is told why.

The levels' thresholds are over all memory there is, so they are in force from the start; real pressure: tests/process.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import GatewayProcess, Supervised, completion, digest, events
from helpers import wait_until

OFF = {"mode": "off"}
ON = {"mode": "act", "threshold": "1000GiB", "duration": "500ms", "pause": "1s"}


class Stack:
    def __init__(self, directory: Path, engine: str, pairs: bool, **levels: Any) -> None:
        counts = (1, 1, 0) if pairs else (0, 0, 1)
        guard = {"floor": "64MiB", "margin": "64MiB", **dict.fromkeys(("tighten", "shed", "abort"), OFF), **levels}
        self.fleet = Supervised(directory, engine, *counts, guard=guard)
        self.gateway = GatewayProcess(directory, supervisors=[self.fleet.url])
        self.fleet.start()
        self.gateway.start()

    def close(self) -> None:
        self.gateway.close()
        self.fleet.close()


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Any]:
    made: list[Stack] = []

    def make(engine: str, pairs: bool = False, **levels: Any) -> Stack:
        made.append(Stack(tmp_path, engine, pairs, **levels))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.mark.parametrize(("engine", "pairs"), [("sglang", False), ("sglang", True), ("vllm", False), ("vllm", True)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_victim_of_an_abort_gets_an_error_that_says_why(make_stack: Any, engine: str, pairs: bool, stream: bool) -> None:
    """It is the longest prompt that waits; a short one beside it is served, and nothing is left at the engine."""
    stack = make_stack(engine, pairs, abort=ON)
    prefiller = stack.fleet["p0" if pairs else "w0"]
    prefiller.fault("slow-prefill", seconds=4, count=1)
    with ThreadPoolExecutor(2) as pool:
        started = time.monotonic()
        running = pool.submit(stack.gateway.post, "/v1/completions", completion("x" * 3000, stream=stream))
        wait_until(lambda: prefiller.log("start"), 5)
        short = pool.submit(stack.gateway.post, "/v1/completions", completion())
        answer = running.result(20)
        assert short.result(20).status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["worker"]) == (503, "aborted_memory_pressure", prefiller.name)
    assert "tightrank ended this request" in error["message"] and "MiB available" in error["message"]
    assert error["type"] == "service_unavailable_error" and answer.json()["source"] == "tightrank-gateway"
    assert int(answer.headers["retry-after"]) >= 1 and time.monotonic() - started < 15
    if engine == "sglang":
        aborted = wait_until(lambda: prefiller.log("abort"), 5)
        longest = max(prefiller.log("start"), key=lambda event: event["bytes"])
        assert aborted[0]["rid"] == longest["rid"] and longest["rid"].startswith("tightrank-")
    wait_until(lambda: prefiller.log("gone"), 5, "the engine has let it go")
    workers = {worker["name"]: worker for worker in stack.gateway.status()["workers"]}
    assert workers[prefiller.name]["standing"] == "up", "it is as well as before"
    assert 'leg_failures_total{reason="aborted"} 1' in stack.gateway.client.get("/metrics").text
    decisions = [event for event in stack.fleet.deployment.events("decision") if event["data"]["action"] == "abort"]
    assert decisions and "ending the largest prefill in flight: host: " in decisions[0]["sentence"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_answer_that_has_begun_is_left_alone(make_stack: Any, engine: str) -> None:
    stack = make_stack(engine, abort=ON)
    stack.fleet["w0"].fault("slow", seconds=0.8)
    for _ in range(10):                  # one that has not begun may be ended
        with stack.gateway.client.stream("POST", "/v1/completions", json=completion(tokens=5, stream=True)) as response:
            found = [data for _, data in events(response)] if response.status_code == 200 else []
        if response.status_code == 200:
            break
    assert response.status_code == 200 and found[-1] == "[DONE]", found


def test_long_prompts_are_refused_and_short_ones_served(make_stack: Any) -> None:
    stack = make_stack("sglang", shed={**ON, "pause": "3s"})
    wait_until(lambda: stack.fleet.workers()["w0"]["shed"], 10)
    longest = stack.fleet.workers()["w0"]["shed"]["new_tokens"]

    def refused() -> Any:
        found = stack.gateway.post("/v1/completions", completion("x" * (longest + 1)))
        return found if found.status_code == 429 else None
    answer = wait_until(refused, 5, "the gateway has heard of it")
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("memory_pressure", "prompt", "rate_limit_error")
    assert error["largest_prompt_tokens"] == longest and answer.headers["retry-after"] == "3"
    assert stack.gateway.post("/v1/completions", completion([1] * longest)).status_code == 200
    assert stack.gateway.post("/v1/completions", completion([1] * (longest + 1))).status_code == 429
    served = stack.gateway.post("/v1/completions", completion("x" * longest))
    assert served.status_code == 200 and served.json()["choices"][0]["text"].startswith(digest("x" * longest))
    assert stack.gateway.client.get("/readyz").status_code == 200
