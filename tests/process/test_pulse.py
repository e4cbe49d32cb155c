"""What a gateway reads of a supervisor that runs: events, then the status; the pulse of a worker that stands still."""
from __future__ import annotations

import os
import signal
import threading
from typing import Any

import httpx2
import pytest
from deployment import Deployment, Make
from helpers import wait_until


def pulse(deployment: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = deployment.get("/workers/w0/pulse").json()
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_pulse_of_a_rank_that_is_stopped(make: Make, engine: str) -> None:
    deployment = make(engine=engine, settings={"limits": {"hang": "0s"}}).up()     # or the supervisor would end it
    deployment.wait_phase("up")
    deployment.get("/steps?worker=w0")
    before = pulse(deployment)
    assert (before["worker"], before["generation"], before["phase"], before["stopped"]) == ("w0", 1, "up", [])
    assert before["longest_step_seconds"] > 0          # the canary's prefill
    role = "scheduler" if engine == "sglang" else "worker"
    pid = deployment.pid(role)
    wait_until(lambda: next(rank for rank in pulse(deployment)["ranks"] if rank["role"] == role)["loops"] >
               next(rank for rank in before["ranks"] if rank["role"] == role)["loops"], what="its loop turns")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: pulse(deployment)["stopped"] == [pid], 5, "the pulse tells of it")
        wait_until(lambda: next(rank for rank in pulse(deployment)["ranks"] if rank["role"] == role)["beat_age_seconds"] > 1,
                   10, "its beat grows old")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pulse(deployment)["stopped"] == [], 5, "it goes on")


def test_whoever_hears_of_a_phase_reads_it_in_the_status(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("up")
    last = deployment.get("/events?limit=1").json()["last"]
    seen: list[tuple[str, str]] = []

    def follow() -> None:
        url = f"http://127.0.0.1:{deployment.port}/events?since={last}&beat=0.25"
        with httpx2.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=30) as response:
            opened.set()
            for row in response.iter_lines():
                if row.startswith("event: phase"):
                    seen.append((deployment.worker()["phase"], row))
                if len(seen) >= 2:
                    return

    opened = threading.Event()
    follower = threading.Thread(target=follow)
    follower.start()
    assert opened.wait(10)
    deployment.post("/workers/w0/drain")
    deployment.wait_phase("draining")
    deployment.post("/workers/w0/resume")
    follower.join(20)
    assert [phase for phase, _ in seen] == ["draining", "up"]
