"""A worker that hangs is found, its stacks are taken and it starts again; one that is only slow is left alone."""
from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment, Make
from helpers import FAKE_ENGINE, wait_until
from unpack import unpack

QUICK = {"hang": "1s", "hang_busy": "4s", "hang_factor": 2, "restarts": 1000, "start_stall": "20s"}
ROLE = {"vllm": "worker", "sglang": "scheduler"}


def ask(deployment: Deployment, tokens: int = 200, new_tokens: int = 4) -> None:
    """One request straight to the engine; whatever becomes of it."""
    try:
        httpx2.post(f"http://127.0.0.1:{deployment.engine_port}/v1/completions", timeout=60,
                    json={"model": "tiny", "prompt": [7] * tokens, "max_tokens": new_tokens})
    except httpx2.HTTPError:
        pass


def in_background(deployment: Deployment, **options: int) -> None:
    threading.Thread(target=ask, args=(deployment,), kwargs=options, daemon=True).start()


def cause(deployment: Deployment, timeout: float = 30) -> dict[str, Any]:
    """The event of the first hang."""
    return wait_until(lambda: next((event for event in deployment.events("cause") if event["data"].get("evidence") is not None),
                                   None), timeout, "a cause")


def bundles(deployment: Deployment, count: int = 1) -> list[dict[str, str]]:
    found = wait_until(lambda: (paths := sorted((deployment.state / "bundles").glob("*.tar.gz")))[count - 1:] and paths, 30)
    return [unpack(path) for path in found]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rank_that_is_stopped_is_found_idle_or_not_and_the_others_stacks_are_kept(make: Make, engine: str) -> None:
    deployment = make(engine=engine, settings={"limits": QUICK}).up()
    deployment.wait_phase("up")
    pid = deployment.pid(ROLE[engine])
    os.kill(pid, signal.SIGSTOP)
    event = cause(deployment)
    assert event["data"]["cause"] == "engine-hung" and f"pid {pid}" in event["sentence"] and "state T" in event["sentence"]
    deployment.wait_phase("up", generation=2)
    assert not Path(f"/proc/{pid}").exists()
    found = bundles(deployment)[0]
    other = "engine-core" if engine == "vllm" else "detokenizer"
    stack = next(text for name, text in found.items() if name.startswith(f"stacks/{other}"))
    assert "most recent call first" in stack and "fakes/engine.py" in stack
    assert f"(pid {pid}) is stopped (state T) and cannot write its stacks" in found["summary.json"]
    assert not any(str(pid) in name for name in found if name.startswith("stacks/"))
    named = next(event for event in deployment.events("bundle"))
    wait_until(lambda: deployment.worker()["bundle"] == named["data"]["bundle"], 10, "its name in the status")
    assert named["sentence"] == f"bundle {named['data']['bundle']}" and named["generation"] == 1


def test_a_main_process_that_is_stopped_before_it_says_hello_is_found(make: Make) -> None:
    late = ["sh", "-c", 'sleep 2; exec "$@"', "sh", sys.executable, str(FAKE_ENGINE), "--engine", "vllm"]
    deployment = make(command=late, settings={"limits": QUICK}).up()
    main = wait_until(lambda: next((each["id"]["pid"] for each in deployment.worker().get("processes", ())), None), 10)
    os.kill(main, signal.SIGSTOP)
    event = cause(deployment)
    assert event["data"]["cause"] == "engine-hung" and f"main (pid {main})" in event["sentence"]
    deployment.wait_phase("up", generation=2)


def test_a_step_that_never_ends_is_found_and_the_stack_shows_where(make: Make) -> None:
    deployment = make(engine="sglang", args=("--stick-at-step", "4"), settings={"limits": QUICK}).up()
    deployment.wait_phase("up")
    ask(deployment, 64, 1)
    for _ in range(3):
        in_background(deployment, tokens=70)
    event = cause(deployment)
    assert event["data"]["cause"] == "engine-hung" and "sleeps" in event["sentence"]
    assert event["data"]["numbers"]["in_flight"] >= 1
    found = bundles(deployment)[0]
    assert "in stick" in next(text for name, text in found.items() if name.startswith("stacks/scheduler-0-"))
    deployment.wait_phase("up", generation=2)


@pytest.mark.parametrize("how", ["spin", "compile"])
def test_a_step_that_computes_without_end_has_the_longer_limits(make: Make, how: str) -> None:
    limits = {**QUICK, "start_stall": "7s"}
    deployment = make(engine="sglang", args=("--stick-at-step", "3", "--stick-how", how), settings={"limits": limits}).up()
    deployment.wait_phase("up")
    ask(deployment, 64)
    asked = time.time()
    in_background(deployment, tokens=64)
    event = cause(deployment, 60)
    assert event["data"]["cause"] == "engine-hung"
    assert ("computes without end" if how == "spin" else "waits for what it compiles") in event["sentence"]
    assert event["unix"] - asked >= (4 if how == "spin" else 7)


@pytest.mark.parametrize(("engine", "args"), [
    ("sglang", ("--stick-at-step", "3", "--stick-how", "spin", "--stick-seconds", "2.5")),
    ("vllm", ("--stick-at-step", "4", "--stick-how", "compile", "--stick-seconds", "5")),
    ("sglang", ("--step-seconds", "1.5")),
    ("vllm", ("--stick-at-step", "1", "--stick-seconds", "3"))])
def test_slow_work_is_no_hang(make: Make, engine: str, args: tuple[str, ...]) -> None:
    """A spin that ends, a kernel that is compiled, long steps all along, a canary that takes longer than the limit."""
    deployment = make(engine=engine, args=args, settings={"limits": QUICK}).up()
    deployment.wait_phase("up")
    for tokens in (64, 70, 300):
        ask(deployment, tokens, 3)
    assert deployment.worker()["generation"] == 1 and deployment.worker()["phase"] == "up"
    assert not deployment.events("cause")


def test_an_idle_worker_may_be_silent_for_as_long_as_it_likes(make: Make) -> None:
    """Its loop sleeps without a beat, as vLLM's does; 20 limits pass."""
    deployment = make(engine="vllm", args=("--silent-idle",), settings={"limits": {**QUICK, "hang": "200ms"}}).up()
    deployment.wait_phase("up")
    time.sleep(4)
    ask(deployment)
    assert deployment.worker()["generation"] == 1 and not deployment.events("cause")


def test_with_the_limit_off_nothing_is_judged(make: Make) -> None:
    deployment = make(engine="sglang", settings={"limits": {**QUICK, "hang": "0s"}}).up()
    deployment.wait_phase("up")
    pid = deployment.pid("scheduler")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)
    assert deployment.worker()["generation"] == 1 and not deployment.events("cause")


def test_a_supervisor_that_was_paused_with_its_engine_blames_nobody(make: Make) -> None:
    """As docker pause: all of them stand still, and when they go on every heartbeat is old."""
    deployment = make(engine="sglang", args=("--step-seconds", "0.2"), settings={"limits": QUICK}).up()
    deployment.wait_phase("up")
    in_background(deployment, tokens=64, new_tokens=64)
    wait_until(lambda: any(rank["in_flight"] for rank in deployment.worker()["ranks"]), 20)
    assert deployment.process is not None
    daemon = deployment.status()["guard"]["daemon_pid"]
    pids = [deployment.process.pid, daemon, *deployment.tree()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    time.sleep(2)
    assert not [event for event in deployment.events("cause") if event["data"].get("cause") == "engine-hung"]


def test_freezes_at_random_moments_are_all_found(make: Make) -> None:
    """Under load, with SIGSTOP of a random process; each time it comes back, with the right cause and a bundle."""
    deployment = make(engine="sglang", args=("--step-seconds", "0.02"), settings={"limits": QUICK}).up()
    chosen, rounds = random.Random(5), 5
    for generation in range(1, rounds + 1):
        worker = deployment.wait_phase("up", generation=generation)
        for _ in range(3):
            in_background(deployment, tokens=chosen.randrange(10, 3000), new_tokens=20)
        time.sleep(chosen.uniform(0, 0.5))
        os.kill(chosen.choice(worker["ranks"])["id"]["pid"], signal.SIGSTOP)
    deployment.wait_phase("up", generation=rounds + 1)
    causes = [event["data"]["cause"] for event in deployment.events("cause") if event["data"].get("evidence") is not None]
    assert causes == ["engine-hung"] * rounds
    assert len(bundles(deployment, rounds)) == rounds


def test_the_daemon_goes_on_while_stacks_are_taken_by_a_py_spy_that_never_ends(make: Make, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho \"looked at $4\"\nexec sleep 600\n")
    program.chmod(0o755)
    deployment = make(engine="sglang", settings={"limits": QUICK})
    deployment.env["PATH"] = f"{program.parent}:{deployment.env['PATH']}"
    deployment.up().wait_phase("up")
    pid = deployment.pid("scheduler")
    os.kill(pid, signal.SIGSTOP)
    deployment.wait_phase("stopping")
    ages = []
    while deployment.worker()["phase"] == "stopping":
        ages.append(deployment.status()["updated_age_seconds"])
        time.sleep(0.1)
    assert max(ages) < 2.0
    found = bundles(deployment)[0]
    assert "py-spy took too long" in found["summary.json"]
    assert found[f"stacks/scheduler-0-pyspy-{pid}.txt"] == f"looked at {pid}\n"
    deployment.wait_phase("up", generation=2)
