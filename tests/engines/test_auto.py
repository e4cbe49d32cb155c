"""`line.budget: auto` on real engines: a real score buffer is found; where nothing grows with the keys it does not bind."""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

START_SECONDS, MIB = 240, 2**20
KV_BYTES = 56_500_000      # little more than the three prompts: 283 bytes a token
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

    def build(engine: str, model: Path, args: tuple[str, ...], env: dict[str, str], line: dict[str, Any],
              **settings: Any) -> Deployment:
        head, *rest = COMMANDS[engine]
        deployment = Deployment(tmp_path, engine=engine, model=model, args=args, env=env,
                                command=[str(CACHE / "envs" / engine / head), *rest],
                                settings={"line": {"budget": "auto", "minimum": 64, "maximum": 1024, **line},
                                          "limits": {"drain": "30s"}, **settings})
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
    [rank] = wait_until(lambda: (deployment.worker()["line_auto"] or {}).get("ranks"), 20, "a rank tells")
    assert isinstance(rank, dict)
    return rank


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.full)])
def test_on_a_dense_model_the_line_does_not_bind_and_the_chunk_is_full(make: Make, dense_model: str, engine: str) -> None:
    deployment = make(engine, Path(dense_model), ARGUMENTS[engine], ENVIRONMENTS[engine], {"maximum": 1024})
    deployment.wait_phase("up", timeout=START_SECONDS)
    ask(deployment, 7000)
    fitted(deployment)
    wait_until(lambda: deployment.worker()["line_auto"]["binds"] is False, 30, "the line does not bind")
    worker = deployment.worker()
    assert "does not bind" in worker["line_auto"]["sentence"]
    taken = [step["rows"] for step in steps(deployment) if step["width"] > 1024]
    assert taken[:-1] == [1024] * (len(taken) - 1) and len(taken) > 4
    rank = fitted(deployment)
    assert 0 <= rank["untouched_bytes"] < rank["available_bytes"]
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


@needs_amx
@pytest.mark.full
def test_a_buffer_over_the_largest_length_is_told_as_a_term_of_rows(make: Make, tmp_path: Path) -> None:
    """A layer of ratio 128 holds a buffer over the engine's largest length, however short the prompt: 0.15 bytes for each row
    and token of it, with the two heads of this model."""
    found = {}
    for context in (524_288, 1_048_576):
        (tmp_path / str(context)).mkdir()
        deployment = make("vllm", deepseek(tmp_path / str(context), [0, 4, 128], context),
                          (*DEEPSEEK_ARGUMENTS, "--max-model-len", str(context)), DEEPSEEK_ENVIRONMENT,
                          {"maximum": 2048, "minimum": 256, "start": 10**9})
        deployment.wait_phase("up", timeout=START_SECONDS)
        for seed in range(3):
            ask(deployment, 12_000, seed)
        found[context] = fitted(deployment)
        deployment.close()
    print(found)
    few, many = found.values()
    assert many["pair_bytes"] * 12_000 < 0.05 * many["row_bytes"]
    assert many["row_bytes"] - few["row_bytes"] == pytest.approx(0.15 * 524_288, rel=0.15)


LENGTHS = (131_072, 40_000, 12_000)
ROOM = 128 * MIB


@needs_amx
@pytest.mark.full
def test_peaks_stay_within_the_room_with_three_prompts_in_flight_and_a_full_cache(make: Make, tmp_path: Path) -> None:
    """The first start measures what the engine leaves; the margin of the second leaves ROOM of it, more or less: what else runs
    on the host comes and goes, and the budget with it. The KV cache holds little more than the prompts."""
    context = 132_096
    model = deepseek(tmp_path, [0, 4], context)
    arguments = (*DEEPSEEK_ARGUMENTS, "--max-model-len", str(context), "--kv-cache-memory-bytes", str(KV_BYTES))
    line = {"maximum": 1024, "minimum": 256, "start": 40_000_000}
    environment = {name: text for name, text in DEEPSEEK_ENVIRONMENT.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    first = make("vllm", model, arguments, environment, line)
    first.wait_phase("up", timeout=START_SECONDS)
    at_rest = fitted(first)
    tokens = max(rank["facts"].get("kv_tokens", 0) for rank in first.worker()["ranks"])
    assert sum(LENGTHS) > 0.9 * tokens, f"the KV cache holds {tokens} tokens"
    first.close()
    keep = at_rest["available_bytes"] - at_rest["untouched_bytes"] - 64 * MIB - ROOM
    second = make("vllm", model, arguments, environment, line, guard={
        "floor": "64MiB", "margin": f"{keep}B", "tighten": {"mode": "off"}, "shed": {"mode": "off"}, "abort": {"mode": "off"}})
    second.wait_phase("up", timeout=START_SECONDS)
    ask(second, LENGTHS[0], seed=7)
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        list(pool.map(lambda each: ask(second, each[1], seed=each[0]), enumerate(LENGTHS)))
    aim = second.worker()["line_auto"]
    print(aim["sentence"])
    rank = fitted(second)
    taken = [step for step in steps(second) if step["peak_bytes"] and step["rest_bytes"] and step["rows"] > 64]
    spare = [rank["pair_bytes"] * step["budget"] + rank["row_bytes"] * step["rows"] - (step["peak_bytes"] - step["rest_bytes"])
             for step in taken]
    highest = max(step["peak_bytes"] - step["rest_bytes"] for step in taken)
    print(f"highest rise {highest / MIB:.1f} MiB; nearest to its bound {min(spare) / MIB:.1f} MiB under it")
    assert min(spare) > -8 * MIB and not any(step["over"] for step in taken if step["rows"] > 256)
    assert second.status()["guard"]["stops"] == 0
    assert any(step["rows"] < 1024 and step["width"] > 60_000 for step in taken), "the line did not bind"
