"""Real engines that work hard and do not hang; then one process of them is stopped, which is found at once."""
from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import httpx2
import pytest
from deployment import Deployment
from engines.test_supervised import Make, make, up  # noqa: F401 - a fixture
from helpers import wait_until
from unpack import unpack

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WORK_SECONDS = float(os.environ.get("TIGHTRANK_TEST_WORK_SECONDS", "6"))
LIMITS = {"hang": "500ms", "restarts": 100}                 # of the floor: a quarter of the usual
SMALL = {"line": {"budget": 1_100_000, "minimum": 128, "maximum": 128}, "limits": LIMITS}


def generate(deployment: Deployment, engine: str, tokens: int, new_tokens: int, seed: int) -> int:
    ids = [3 + (seed + 7 * place) % 200 for place in range(tokens)]
    path, body = ("/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": new_tokens, "ignore_eos": True}) \
        if engine == "vllm" else \
        ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True}})
    return httpx2.post(f"http://127.0.0.1:{deployment.engine_port}{path}", json=body, timeout=120).status_code


def background(deployment: Deployment, engine: str, tokens: int, new_tokens: int, seed: int) -> None:
    def run() -> None:
        try:
            generate(deployment, engine, tokens, new_tokens, seed)
        except httpx2.HTTPError:
            pass                                            # it is ended under our hands

    threading.Thread(target=run, daemon=True).start()


def work(deployment: Deployment, engine: str, seconds: float) -> int:
    """Three that decode, and prompts of 8000 tokens in chunks of 128 at most. The number of answers."""
    answers: list[int] = []
    assert generate(deployment, engine, 50, 1, 0) == 200
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        while time.monotonic() < end:
            long = number == 0
            answers.append(generate(deployment, engine, 8000 if long else 50, 4 if long else 60, number * 1000 + len(answers)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {200}
    return len(answers)


def first(deployment: Deployment, kind: str, generation: int) -> dict[str, Any]:
    return wait_until(lambda: [event for event in deployment.events(kind) if event["generation"] == generation], 60, kind)[0]


def stopped_and_found(deployment: Deployment, engine: str, role: str, prompt: int, new_tokens: int) -> dict[str, Any]:
    """SIGSTOP of a process while it has work; the seconds until the cause, and the bundle."""
    generation = deployment.worker()["generation"]
    background(deployment, engine, prompt, new_tokens, int(time.time()) % 1000)
    wait_until(lambda: any(rank["in_flight"] for rank in deployment.get("/workers/w0/pulse").json()["ranks"]), 30, "work")
    pid, began = deployment.pid(role), time.time()
    os.kill(pid, signal.SIGSTOP)
    event = first(deployment, "cause", generation)
    made = first(deployment, "bundle", generation)
    return {"seconds": event["unix"] - began, "event": event, "pid": pid,
            "bundle": unpack(deployment.state / "bundles" / made["data"]["bundle"])}


@pytest.mark.parametrize(("engine", "role", "prompt", "new_tokens"), [
    ("sglang", "scheduler", 8000, 4), ("vllm", "worker", 50, 4000)])
def test_heavy_work_is_no_hang_and_a_stopped_process_is(
        make: Make, engine: str, role: str, prompt: int, new_tokens: int) -> None:     # noqa: F811 - the fixture
    deployment = make(engine, settings=SMALL)
    worker = up(deployment, 1)
    answers = work(deployment, engine, WORK_SECONDS)
    assert deployment.worker()["generation"] == 1 and not deployment.events("cause"), deployment.events("cause")
    others = {rank["role"]: rank["id"]["pid"] for rank in worker["ranks"] if rank["role"] != role}
    found = stopped_and_found(deployment, engine, role, prompt, new_tokens)
    print(f"{engine}: {answers} answers, {role} stopped: {found['seconds']:.2f} s, {found['event']['sentence']}")
    assert found["event"]["data"]["cause"] == "engine-hung" and f"pid {found['pid']}" in found["event"]["sentence"]
    assert found["seconds"] < 5
    for other, pid in others.items():
        name = next(name for name in found["bundle"] if name.startswith(f"stacks/{other}") and str(pid) in name)
        assert "most recent call first" in found["bundle"][name]
    assert f"(pid {found['pid']}) is stopped (state T)" in found["bundle"]["summary.json"]
    deployment.wait_phase("starting", "up", generation=2)
