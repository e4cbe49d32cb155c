"""The levels before the floor, under real memory pressure and with a real supervisor over the fake engine."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx2
import pytest
from deployment import Deployment, Make
from helpers import ROOT, wait_until
from memory import MemAvailable

MIB = 1 << 20
HOG = [sys.executable, str(ROOT / "tests" / "fakes" / "hog.py")]
ALWAYS = "1000GiB"          # a threshold that no memory is over: in force from the start, whatever else this host does
LINE = {"budget": 2_000_000, "minimum": 64, "maximum": 1024}
FLOOR_BUDGET = 64 * (2_000_000 // 64)      # line.minimum x the longest request that the line allows


def level(threshold: str = ALWAYS, mode: str = "act", **changes: str) -> dict[str, str]:
    return {"mode": mode, "threshold": threshold, "duration": "500ms", "pause": "1s", "hysteresis": "64MiB", **changes}


def guard(**levels: dict[str, str]) -> dict[str, Any]:
    """The settings of a floor that is far, and of these levels; the others are off."""
    off = {name: {"mode": "off"} for name in ("tighten", "shed", "abort")}
    return {"guard": {"floor": "64MiB", "margin": "64MiB", **off, **levels}}


def said(deployment: Deployment, kind: str) -> list[str]:
    return [event["sentence"] for event in deployment.events(kind)]


def fired(deployment: Deployment) -> list[str]:
    """The levels that have fired, each once, in order."""
    return list(dict.fromkeys(event["data"]["level"] for event in deployment.events("level")
                              if event["data"]["state"] == "fires"))


def complete(deployment: Deployment, tokens: int = 64) -> None:
    answer = httpx2.post(f"http://127.0.0.1:{deployment.engine_port}/v1/completions", timeout=20,
                         json={"model": "tiny", "prompt": [1] * tokens, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def budgets(deployment: Deployment) -> list[int]:
    return [step["budget"] for step in deployment.get("/steps?worker=w0").json()["steps"]]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tighten_reaches_the_engine_and_its_next_generation(make: Make, engine: str) -> None:
    """vLLM reads it from the page, SGLang is asked; the next chunk keeps it."""
    context = {"context": 16384}           # under what the line allows, so that there is something to lower
    deployment = make(engine=engine, settings={**guard(tighten=level()), "line": {**LINE, **context}}).up()
    deployment.wait_phase("up")
    lowest = 64 * 16384
    wait_until(lambda: [event for event in deployment.events("decision") if event["data"]["action"] == "tighten"], 10)

    def told() -> bool:
        complete(deployment)
        return budgets(deployment)[-1] == lowest
    wait_until(told, 10, "a chunk with the lowest budget")
    if engine == "sglang":
        wait_until(lambda: deployment.worker()["line_budget"] == lowest, 10, "the ranks say so")
    assert f"to {lowest:,} token²: host: " in " ".join(said(deployment, "decision"))
    shown = {row["level"]: row for row in deployment.status()["levels"]}
    assert shown["tighten"]["in_force"] and not shown["shed"]["in_force"] and shown["stop"]["mode"] == "act"
    assert 'tightrank_guard_level{action="tighten",mode="act",reason="host"} 1' in deployment.get("/metrics").text
    assert deployment.run("restart", "w0").returncode == 0
    deployment.wait_phase("up", generation=2)
    wait_until(told, 10, "the next generation has it too")


def test_a_dry_run_says_it_and_changes_nothing(make: Make) -> None:
    levels = {name: level(mode="dry-run") for name in ("tighten", "shed", "abort")}
    deployment = make(settings={**guard(**levels), "line": {**LINE, "context": 16384}}).up()
    deployment.wait_phase("up")
    wait_until(lambda: len(set(fired(deployment))) == 3, 10)
    complete(deployment)
    assert set(budgets(deployment)) == {LINE["budget"]}
    assert deployment.post("/admission", {"prompt_tokens": 16000}).status_code == 200
    assert all("dry run: would" in text for text in said(deployment, "level"))
    wait_until(lambda: any("dry run: refusing prompts" in text for text in said(deployment, "dry-run")), 5)
    assert {event["data"]["action"] for event in deployment.events("decision")} == {"start", "admit"}
    assert "(dry run)" in deployment.run("status").stdout


def test_shed_refuses_long_prompts_and_takes_short_ones(make: Make) -> None:
    deployment = make(settings={**guard(shed=level(pause="7s")), "line": {**LINE, "context": 16384}}).up()
    deployment.wait_phase("up")
    answer = wait_until(lambda: (found := deployment.post("/admission", {"prompt_tokens": 16000})).status_code == 429 and found)
    error = answer.json()["error"]
    assert (error["code"], error["type"], answer.headers["retry-after"]) == ("memory_pressure", "rate_limit_error", "7")
    longest = error["largest_prompt_tokens"]
    assert deployment.post("/admission", {"prompt_tokens": longest}).status_code == 200
    assert deployment.post("/admission", {"prompt_tokens": longest + 1}).status_code == 429
    assert deployment.post("/admission", {"prompt_tokens": 20000}).status_code == 400, "what never fits need not come back"
    assert deployment.get("/readyz").status_code == 200, "short prompts are served"


def test_a_hog_that_stops_is_met_in_order_the_server_lives_and_all_goes_back(make: Make) -> None:
    """It takes some 2 GiB at 100 MiB/s and stops 700 MiB over the floor."""
    floor = MemAvailable().read(0) - 3000 * MIB
    levels = {"tighten": level("2000MiB"), "shed": level("1300MiB"), "abort": level("64MiB", duration="1s")}
    settings = {"guard": {"floor": f"{floor}B", "margin": "64MiB", **levels}, "line": {**LINE, "context": 16384}}
    deployment = make(settings=settings).up()
    deployment.wait_phase("up")
    with subprocess.Popen([*HOG, "--bytes", str(6000 * MIB), "--bytes-per-second", str(100 * MIB), "--threads", "1",
                           "--leave-bytes", str(floor + 700 * MIB), "--seconds", "40"], stdout=subprocess.DEVNULL) as hog:
        try:
            wait_until(lambda: "shed" in fired(deployment), 38)
            assert deployment.post("/admission", {"prompt_tokens": 16000}).status_code == 429
            complete(deployment)
            wait_until(lambda: MemAvailable().read(0) < floor + 760 * MIB or hog.poll() is not None, 40)
            complete(deployment)
        finally:
            hog.kill()
    wait_until(lambda: not any(row["in_force"] for row in deployment.status()["levels"]), 30, "all has gone back")
    status = deployment.status()
    assert fired(deployment) == ["tighten", "shed"] and status["workers"][0]["generation"] == 1
    assert status["workers"][0]["line_budget"] == LINE["budget"] and status["guard"]["stops"] == 0
    assert status["guard"]["lowest_available_bytes"] > floor
    assert deployment.post("/admission", {"prompt_tokens": 16000}).status_code == 200
    complete(deployment)
    raised = [text for text in said(deployment, "decision") if text.startswith("raising")]
    assert len(raised) == 4, raised


def test_a_hog_that_goes_on_meets_all_levels_before_the_guard(make: Make) -> None:
    floor = MemAvailable().read(0) - 2500 * MIB
    levels = {"tighten": level("1500MiB"), "shed": level("1000MiB"), "abort": level("500MiB")}
    deployment = make(settings={"guard": {"floor": f"{floor}B", "margin": "64MiB", **levels}}).up()
    deployment.wait_phase("up")
    with subprocess.Popen([*HOG, "--bytes", str(6000 * MIB), "--bytes-per-second", str(200 * MIB), "--threads", "1",
                           "--seconds", "30"], stdout=subprocess.DEVNULL) as hog:
        try:
            wait_until(lambda: deployment.status().get("guard", {}).get("stops"), 28, "the guard acted")
        finally:
            hog.kill()
    stopped = next(event["unix"] for event in deployment.events("cause") if event["data"]["cause"] == "guard-floor")
    times = [next(event["unix"] for event in deployment.events("level") if event["data"]["level"] == name)
             for name in ("tighten", "shed", "abort")]
    assert times == sorted(times) and times[2] < stopped
    assert any("the floor in" in text for text in said(deployment, "level")), said(deployment, "level")
    under = floor - deployment.status()["guard"]["lowest_available_bytes"]
    print(f"{under / MIB:.0f} MiB under the floor at the lowest")
    assert under < 256 * MIB
    deployment.wait_phase("up", generation=2)


def test_a_daemon_that_was_stopped_meanwhile_draws_no_conclusion_from_it(make: Make) -> None:
    """What lay between two samples is not known: the duration begins anew."""
    deployment = make(settings=guard(tighten=level(duration="3s"))).up()
    deployment.wait_phase("up")
    daemon = deployment.status()["guard"]["daemon_pid"]
    os.kill(daemon, signal.SIGSTOP)
    time.sleep(4)
    os.kill(daemon, signal.SIGCONT)
    wait_until(lambda: fired(deployment) == ["tighten"], 10)
