"""`line.budget: auto` on real engines: a real score buffer is found; where nothing grows with the keys it does not bind."""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment
from helpers import ROOT, wait_until
from raw_engine import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
needs_amx = pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(),
                               reason="vLLM's DeepSeek-V4 needs a processor with AMX for chunked prefill")

START_SECONDS, MIB, KIB = 240, 2**20, 2**10
COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                        "--sleep-on-idle", "--max-total-tokens", "32768", "--disable-radix-cache")}
# Buffers under 32 MiB would stay in glibc's heap, where no high-water mark shows them.
DEEPSEEK_ENVIRONMENT = {**ENVIRONMENTS["vllm"], "MALLOC_MMAP_THRESHOLD_": "1048576",
                        "PYTHONPATH": str(ROOT / "scripts" / "cpu" / "deepseek_v4" / "plugin")}
DEEPSEEK_ARGUMENTS = ("--load-format", "dummy", "--kv-cache-dtype", "fp8", "--max-num-seqs", "4", "--enforce-eager",
                      "--no-enable-prefix-caching")
Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Deployment] = []

    def build(engine: str, model: Path, args: tuple[str, ...], env: dict[str, str], line: dict[str, Any]) -> Deployment:
        head, *rest = COMMANDS[engine]
        deployment = Deployment(tmp_path, engine=engine, model=model, args=args, env=env,
                                command=[str(CACHE / "envs" / engine / head), *rest],
                                settings={"line": {"budget": "auto", "minimum": 64, "maximum": 1024, **line}})
        made.append(deployment)
        return deployment.up()

    yield build
    for deployment in made:
        deployment.close()


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(tokens)]


def ask(deployment: Deployment, tokens: int, seed: int = 1) -> None:
    answer = httpx2.post(f"http://127.0.0.1:{deployment.engine_port}/v1/completions", timeout=900, trust_env=False, json={
        "model": "tiny", "prompt": prompt(tokens, seed), "max_tokens": 2, "temperature": 0})
    assert answer.status_code == 200, answer.text


def steps(deployment: Deployment) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = deployment.get("/steps?worker=w0").json()["steps"]
    return found


def fitted(deployment: Deployment) -> dict[str, Any]:
    [rank] = deployment.worker()["line_auto"]["ranks"]
    assert isinstance(rank, dict)
    return rank


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.full)])
def test_on_a_dense_model_the_line_does_not_bind_and_the_chunk_is_full(make: Make, dense_model: str, engine: str) -> None:
    deployment = make(engine, Path(dense_model), ARGUMENTS[engine], ENVIRONMENTS[engine], {"maximum": 1024})
    deployment.wait_phase("up", timeout=START_SECONDS)
    ask(deployment, 7000)
    wait_until(lambda: deployment.worker()["line_auto"]["binds"] is False, 30, "the line does not bind")
    worker = deployment.worker()
    assert "does not bind" in worker["line_auto"]["sentence"]
    taken = [step["rows"] for step in steps(deployment) if step["width"] > 1024]
    assert taken[:-1] == [1024] * (len(taken) - 1) and len(taken) > 4
    rank = fitted(deployment)
    pool = rank["untouched_bytes"]
    assert 0 < pool < rank["available_bytes"]
    ask(deployment, 7000, seed=2)
    assert deployment.terminate() == 0


def deepseek(tmp_path: Path, ratios: list[int], context: int) -> Path:
    """The tiny DeepSeek-V4 with other layers: one of each ratio in `ratios`."""
    model = tmp_path / "deepseek"
    model.mkdir()
    source = CACHE / "models" / "deepseek-v4"
    config = json.loads((source / "config.json").read_text())
    config |= {"compress_ratios": ratios, "num_hidden_layers": len(ratios), "index_n_heads": 1,
               "max_position_embeddings": context}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((source / name).read_bytes())
    return model


@needs_amx
@pytest.mark.full
@pytest.mark.parametrize(("tokens", "tolerance"), [(131_072, 0.05), (65_536, 0.15)])
def test_the_bytes_of_a_real_score_buffer_are_found(make: Make, tmp_path: Path, tokens: int, tolerance: float) -> None:
    """4 bytes against one compressed key for 4 tokens: 1.00 byte for each (row, key)."""
    context = tokens + 1024
    deployment = make("vllm", deepseek(tmp_path, [0, 4], context), (*DEEPSEEK_ARGUMENTS, "--max-model-len", str(context)),
                      DEEPSEEK_ENVIRONMENT, {"maximum": 2048, "minimum": 256, "start": 10**9})
    deployment.wait_phase("up", timeout=START_SECONDS)
    ask(deployment, tokens)
    rank = fitted(deployment)
    print(f"{tokens} tokens: {rank}")
    assert rank["pair_bytes"] == pytest.approx(1.0, rel=tolerance)
