"""`tightrank verify` on real engines: a short ramp, and the answers with the adapter against those without."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployment import Deployment
from raw_engine import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1200)]

START_SECONDS = 240        # on busy cores
COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4", "--dtype", "float32"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                        "--sleep-on-idle", "--max-total-tokens", "16384", "--dtype", "float32")}
BUDGET = 2_000_000
Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path, dense_model: str) -> Iterator[Make]:
    made: list[Deployment] = []

    def build(engine: str) -> Deployment:
        head, *rest = COMMANDS[engine]
        off = {name: {"mode": "off"} for name in ("tighten", "shed", "abort")}
        deployment = Deployment(
            tmp_path, engine=engine, model=Path(dense_model), command=[str(CACHE / "envs" / engine / head), *rest],
            args=ARGUMENTS[engine], env=ENVIRONMENTS[engine],
            settings={"guard": {"floor": "64MiB", "margin": "64MiB", **off}, "limits": {"drain": "30s"},
                      "line": {"budget": BUDGET, "minimum": 64, "maximum": 1024, "context": 8192}})
        made.append(deployment)
        return deployment.up()

    yield build
    for deployment in made:
        deployment.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_ramp_and_the_answers_without_the_adapter(make: Make, tmp_path: Path, engine: str) -> None:
    deployment = make(engine)
    deployment.wait_phase("up", timeout=START_SECONDS)
    ramped(deployment, tmp_path / "ramp")
    record = str(tmp_path / "with.json")
    recorded = deployment.run("verify", "parity", "--record", record, "--sizes", "64,3000,6000", "--prompts", "2", timeout=300)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    assert deployment.terminate(120) == 0
    body = json.loads(deployment.file.read_text())
    body["hooks"] = []
    deployment.file.write_text(json.dumps(body))
    deployment.up().wait_phase("up", timeout=START_SECONDS)
    compared = deployment.run("verify", "parity", "--against", record, timeout=300)
    print(compared.stdout)
    assert compared.returncode == 0 and "6 of 6 answers are equal" in compared.stdout, compared.stdout + compared.stderr


def ramped(deployment: Deployment, out: Path) -> None:
    """Each prompt is found whole in the records, nothing of it was cached, every chunk is under the line."""
    done = deployment.run("verify", "ramp", "--sizes", "1k,3k,7k", "--output", str(out), timeout=300)
    print(done.stdout, done.stderr, (out / "report.md").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    for size in json.loads((out / "report.json").read_text())["sizes"]:
        chunks = size["chunks"]
        assert chunks[0]["prefix"] == 0 and sum(chunk["tokens"] for chunk in chunks) == size["tokens"]
        assert all(chunk["tokens"] * (chunk["prefix"] + chunk["tokens"]) <= BUDGET for chunk in chunks)
        assert size["peak_bytes"]["rank 0"] > 1 << 28 and {"host", "guard", "rank 0"} <= size["lowest_bytes"].keys()
        spent = sum(chunk["seconds"] for chunk in chunks)
        assert 0 < spent <= size["seconds"] and size["first_token_seconds"] <= size["seconds"]
