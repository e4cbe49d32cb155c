"""The guard's levels and real engines: a lower budget reaches every rank, and an abort ends a request in the engine."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment
from fleet import GatewayProcess
from helpers import wait_until
from raw_engine import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_SECONDS = 240        # on busy cores
COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                        "--sleep-on-idle", "--max-total-tokens", "16384")}
ALWAYS = {"mode": "act", "threshold": "1000GiB", "duration": "500ms", "pause": "1s"}
BUDGET, CONTEXT = 2_000_000, 8192
LOWEST = 64 * CONTEXT      # line.minimum x line.context
Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path, dense_model: str) -> Iterator[Make]:
    made: list[Deployment] = []

    def build(engine: str, **levels: Any) -> Deployment:
        head, *rest = COMMANDS[engine]
        off = {name: {"mode": "off"} for name in ("tighten", "shed", "abort")}
        deployment = Deployment(
            tmp_path, engine=engine, model=Path(dense_model), command=[str(CACHE / "envs" / engine / head), *rest],
            args=ARGUMENTS[engine], env=ENVIRONMENTS[engine],
            settings={"guard": {"floor": "64MiB", "margin": "64MiB", **off, **levels},
                      "line": {"budget": BUDGET, "minimum": 64, "maximum": 1024, "context": CONTEXT}})
        made.append(deployment)
        return deployment.up()

    yield build
    for deployment in made:
        deployment.close()


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.full), "sglang"])
def test_a_lower_budget_reaches_the_scheduler_of_a_real_engine(make: Make, engine: str) -> None:
    """And the chunks of the next prompt keep it; SGLang is asked over HTTP, vLLM reads the page before its next step."""
    deployment = make(engine, tighten=ALWAYS)
    deployment.wait_phase("up", timeout=START_SECONDS)
    body = {"model": "tiny", "prompt": [1 + number % 200 for number in range(3000)], "max_tokens": 1}

    def told() -> bool:
        body["prompt"][0] += 1             # type: ignore[index]  # nothing of it is cached
        answer = httpx2.post(f"http://127.0.0.1:{deployment.engine_port}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return bool(deployment.worker()["line_budget"] == LOWEST)
    wait_until(told, 60, "each rank has the lower budget")
    steps = deployment.get("/steps?worker=w0").json()["steps"]
    kept = [step for step in steps if step["budget"] == LOWEST]
    wait_until(lambda: told() and any(step["budget"] == LOWEST and step["rows"] > 1
                                      for step in deployment.get("/steps?worker=w0").json()["steps"]), 60)
    assert all(step["rows"] * step["width"] <= LOWEST and not step["over"] for step in kept)


def test_an_abort_ends_the_request_in_a_real_sglang(make: Make, tmp_path: Path) -> None:
    """Its engine takes half a minute for what the client asked; the client hears after some seconds, and the engine is free."""
    deployment = make("sglang", abort=ALWAYS)
    deployment.wait_phase("up", timeout=START_SECONDS)
    gateway = GatewayProcess(tmp_path, supervisors=[f"http://127.0.0.1:{deployment.port}"])
    try:
        gateway.start()
        prompt = [[1 + (number + each) % 200 for number in range(7000)] for each in range(24)]
        answer = gateway.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 64})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted_memory_pressure", answer.text
        wait_until(lambda: all(rank["in_flight"] == 0 for rank in deployment.worker()["ranks"]), 20, "the engine has let it go")
        assert deployment.worker()["phase"] == "up"
    finally:
        gateway.close()
