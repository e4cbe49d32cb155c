"""What each engine tells us: lengths, granules, start steps, requests of ours, what it cannot do."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tightrank import engines, plan
from tightrank.adapter import wire
from tightrank.config import load
from tightrank.config.command import from_command
from tightrank.config.keys import ENGINES, HOOKS
from tightrank.engines.base import Engine, number
from tightrank.errors import ConfigError
from tightrank.host import HostFacts
from tightrank.inputs import Inputs
from tightrank.records import StartStep, WorkerSpec

HOST = HostFacts(None, None)
MODEL: dict[str, Any] = {"max_position_embeddings": 8192}


def spec(command: str) -> WorkerSpec:
    config = from_command(command.split(), {}, ["guard.floor=0B"]).config
    keys = {"worker": "hush"} if "--api-key" in command else {}
    return plan.build(config, HOST, Inputs({}, MODEL, keys))[0]


def test_every_engine_of_the_configuration_answers() -> None:
    assert tuple(engines.ENGINES) == ENGINES == tuple(wire.HOOK_ROLES)
    for name in ENGINES:
        engine: Engine = engines.get(name)
        assert engine.name == name
        assert set(engine.releases) <= set(HOOKS)
        assert set(engine.releases) == set(wire.HOOK_ROLES[name])


@pytest.mark.parametrize(("engine", "model", "tokens"), [
    ("vllm", {"max_position_embeddings": 8192}, 8192),
    ("vllm", {"text_config": {"max_position_embeddings": 8192}}, 8192),
    ("vllm", {"n_positions": 1024}, 1024),
    ("vllm", {"max_position_embeddings": 8192, "seq_length": 4096}, 4096),
    ("vllm", {"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
    ("vllm", {"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32768),
    ("vllm", {"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192),
    ("vllm", {"max_position_embeddings": 131072, "rope_scaling": {"type": "llama3", "factor": 8.0}}, 131072),
    ("vllm", {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
              "rope_scaling": {"rope_type": "longrope"}}, 4096),
    ("vllm", {}, 2048),
    ("sglang", {"max_position_embeddings": 8192}, 8192),
    ("sglang", {"max_position_embeddings": 8192, "seq_length": 4096}, 4096),
    ("sglang", {"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 4}}, 32768),
    ("sglang", {"max_position_embeddings": 8192, "rope_scaling": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}}, 8192),
    ("sglang", {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 131072),
    ("sglang", {}, 2048),
    ("atom", {"text_config": {"max_position_embeddings": 8192}}, 8192), ("atom", {}, 2048)])
def test_the_models_own_length(engine: str, model: dict[str, Any], tokens: int) -> None:
    assert engines.get(engine).own_context(model) == tokens


@pytest.mark.parametrize(("engine", "args", "model", "granule"), [
    ("vllm", [], {}, 64), ("vllm", ["--block-size", "128"], {}, 128), ("vllm", ["--block-size=48"], {}, 192),
    ("vllm", ["--block-size", "64"], {"model_type": "deepseek_v4"}, 256),
    ("sglang", [], {}, 64), ("sglang", ["--page-size", "128"], {}, 128), ("sglang", [], {"model_type": "deepseek_v4"}, 256),
    ("atom", [], {}, 64), ("atom", ["--block_size", "128"], {}, 128)])
def test_the_granule_holds_pages_and_no_slivers(engine: str, args: list[str], model: dict[str, Any], granule: int) -> None:
    assert engines.get(engine).granule(args, model) == granule


@pytest.mark.parametrize(("engine", "text", "step"), [
    ("vllm", "(EngineCore pid=13838) INFO 11-29 22:28:09 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
     "model='m'", StartStep.LOADING),
    ("vllm", "(Worker pid=14126) INFO 11-29 22:28:20 [default_loader.py:501] Loading weights took 0.07 seconds",
     StartStep.SIZING),
    ("vllm", "(EngineCore pid=20010) INFO 11-29 22:36:20 [kv_cache_utils.py:2327] CPU KV cache size: 1,043,411 tokens, Maximum "
     "concurrency for 11,718 tokens per request: 89.04x", StartStep.SIZING),
    ("vllm", "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  20%|##", StartStep.CAPTURING),
    ("vllm", "(EngineCore pid=13838) INFO 11-29 22:28:22 [core.py:402] init engine (profile, create kv cache, warmup model) "
     "took 0.41 s", StartStep.WARMING),
    ("vllm", "INFO:     Application startup complete.", StartStep.WARMING),
    ("vllm", "INFO 11-29 22:28:09 [__init__.py:216] Automatically detected platform cpu.", None),
    ("sglang", "[2026-11-29 22:30:43 TP1] Load weight begin. avail mem=17.24 GB", StartStep.LOADING),
    ("sglang", "[2026-11-29 22:30:43 TP1] Load weight end. elapsed=0.03 s, type=LlamaForCausalLM, avail mem=17.23 GB, mem "
     "usage=0.01 GB.", StartStep.SIZING),
    ("sglang", "[2026-11-29 22:30:44] Capture decode CUDA graph begin. backend=full", StartStep.CAPTURING),
    ("sglang", "[2026-11-29 22:30:45 TP0] max_total_num_tokens=16384, chunked_prefill_size=1024", StartStep.WARMING),
    ("sglang", "[2026-11-29 22:30:45] The server is fired up and ready to roll!", StartStep.WARMING),
    ("sglang", "[2026-11-29 22:30:45] server_args=ServerArgs(model_path='m')", None),
    ("atom", "[atom 22:30:43] Initializing engine with model m...", StartStep.LOADING),
    ("atom", "[atom 22:30:43] [rank_1] Model load done: m (weights loaded in 12.30s)", StartStep.SIZING),
    ("atom", "[atom 22:30:50] Memory budget: total_gpu=287.98GB, free=120.00GB, utilization=0.9", StartStep.CAPTURING),
    ("atom", "[atom 22:31:00] Engine Core: cudagraph capture[1, 2, 4] cost: 9.50 seconds, pool: 1.20GB", StartStep.WARMING),
    ("atom", "[atom 22:31:00] Starting server on 0.0.0.0:8000 (loop=uvloop)...", StartStep.WARMING),
    ("atom", "[atom 22:30:43] Loading tokenizer from m...", None)])
def test_start_steps_of_real_lines(engine: str, text: str, step: StartStep | None) -> None:
    assert engines.get(engine).start_step(text) == step


def test_requests_to_vllm() -> None:
    vllm = engines.get("vllm")
    one = spec("vllm serve /m --api-key hush --served-model-name tiny")
    assert vllm.health(one).url == "http://127.0.0.1:8000/health"      # it listens on all addresses
    canary = vllm.canary(one)
    assert (canary.method, canary.url) == ("POST", "http://127.0.0.1:8000/v1/completions")
    assert canary.headers == {"Authorization": "Bearer hush"}
    assert canary.body == {"model": "tiny", "prompt": list(range(1, 65)), "max_tokens": 1, "temperature": 0}
    assert vllm.budget(one, 5) is None


def test_requests_to_sglang() -> None:
    sglang = engines.get("sglang")
    both = spec("sglang serve --model-path /m --host ::1")
    assert sglang.canary(both).url == "http://[::1]:30000/generate"
    assert sglang.canary(both).headers == {}
    assert "bootstrap_host" not in (sglang.canary(both).body or {})
    prefill = spec("sglang serve --model-path /m --disaggregation-mode prefill --api-key hush")
    assert (sglang.canary(prefill).body or {})["bootstrap_host"] == "2.2.2.2"
    told = sglang.budget(prefill, 7)
    assert told is not None
    assert (told.method, told.url, told.body) == (
        "POST", "http://127.0.0.1:30000/set_internal_state", {"server_args": {"tightrank_line_budget": 7}})
    assert told.headers == {"Authorization": "Bearer hush"}
    admin = sglang.budget(spec("sglang serve --model-path /m --api-key hush --admin-api-key chief"), 7)
    assert admin is not None
    assert admin.headers == {"Authorization": "Bearer chief"}


@pytest.mark.parametrize(("command", "expected"), [
    ("vllm serve /m", {"engine-core": (1, 1), "worker": (0, 1)}),
    ("vllm serve /m --distributed-executor-backend mp", {"engine-core": (1, 1), "worker": (1, 1)}),
    ("vllm serve /m -tp 2 -pp 2", {"engine-core": (1, 1), "worker": (4, 4)}),
    ("sglang serve --model-path /m --tp 2", {"scheduler": (2, 2), "detokenizer": (1, 1)}),
    ("python3 -m atom.entrypoints.openai_server --model /m -tp 8", {"engine-core": (1, 1), "runner": (8, 8)}),
    ("python3 -m atom.entrypoints.openai_server --model /m -tp 2 -pp 2", {"engine-core": (2, 2), "runner": (4, 4)})])
def test_processes_of_a_whole_worker(command: str, expected: dict[str, tuple[int, int]]) -> None:
    one = spec(command)
    assert {each.role: (each.least, each.most) for each in engines.get(one.engine).processes(one)} == expected


@pytest.mark.parametrize(("text", "value"), [("2048", 2048), ("2k", 2000), ("2K", 2048), ("25.6k", 25600), ("auto", -1)])
def test_numbers_as_the_engines_read_them(text: str, value: int) -> None:
    assert number("vllm", ["--max-model-len", text], "context") == value


def test_a_key_that_sglang_cannot_be_given_safely() -> None:
    import dataclasses

    config = from_command(["sglang", "serve", "--model-path", "/m"], {}).config
    worker = dataclasses.replace(config.workers[0], api_key_file="/key")
    assert "--config FILE" in (engines.get("sglang").refusal(worker, ()) or "")
    assert engines.get("sglang").refusal(dataclasses.replace(worker, args=("--config", "f")), ()) is None


ATOM = "python3 -m atom.entrypoints.openai_server --model /m"


def test_requests_to_atom() -> None:
    """Its health says nothing of the engine, and its prompts are text."""
    atom = engines.get("atom")
    one = spec(ATOM + " --server-port 8010 --port 8006 --served-model-name tiny")
    assert one.hooks.keys() == {"ranks"} and one.line is None
    assert atom.health(one).url == "http://127.0.0.1:8010/health"
    canary = atom.canary(one)
    assert (canary.method, canary.url) == ("POST", "http://127.0.0.1:8010/v1/completions")
    assert (canary.body or {})["model"] == "tiny" and isinstance((canary.body or {})["prompt"], str)


def test_atoms_command_line(tmp_path: Path) -> None:
    built = atom_specs(tmp_path, {"tensor_parallel": 8, "args": ["--kv_cache_dtype", "fp8", "--max-num-seqs", "128"]},
                       hooks=["ranks", "indexer", "headroom"])
    assert built.argv == ("python3", "-m", "atom.entrypoints.openai_server", "--model", str(tmp_path), "--host", "127.0.0.1",
                          "--server-port", "8010", "--tensor-parallel-size", "8", "--served-model-name", "tiny",
                          "--kv_cache_dtype", "fp8", "--max-num-seqs", "128")
    assert built.env["ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB"] == "256"
    assert built.hooks["headroom"]["fraction"] == 0.08
    asked = atom_specs(tmp_path, {"env": {"ATOM_KV_PREFILL_HEADROOM_FRAC": "0.12"}}, hooks=["ranks", "headroom"])
    assert asked.hooks["headroom"]["fraction"] == 0.12


@pytest.mark.parametrize(("worker", "message"), [
    ({"role": "prefill"}, "role prefill: the gateway cannot pair ATOM workers yet"),
    ({"transfer_port": 6301}, "handshake_port in --kv-transfer-config"),
    ({"args": ["-dp", "2"]}, "name one worker per replica"),
    ({"args": ["--enable-dp-attention"]}, "name one worker per replica"),
    ({"args": ["-pcp", "2"]}, "--prefill-context-parallel-size over 1"),
    ({"args": ["--prefill_context_parallel_size", "two"]}, "is no whole number"),
    ({"args": ["--enable-rapidserve"]}, "second set of ranks"),
    ({"args": ["--server-port", "8011"]}, "--server-port has a key of its own; use workers[0].port"),
    ({"args": ["--max-num-b", "2048"]}, "is short for --max-num-batched-tokens")])
def test_what_of_atom_cannot_be_supervised(tmp_path: Path, worker: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        atom_specs(tmp_path, worker)
    assert message in str(caught.value)


@pytest.mark.parametrize("hook", ["line", "heads"])
def test_hooks_that_atom_does_not_have(tmp_path: Path, hook: str) -> None:
    with pytest.raises(ConfigError) as caught:
        atom_specs(tmp_path, {}, hooks=["ranks", hook])
    assert caught.value.cause == "hook-unavailable"
    assert f"hooks: {hook} is not there for atom, whose hooks are ranks, indexer, headroom, empty-cache" in str(caught.value)


def test_a_key_that_atom_does_not_ask_for(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hush")
    with pytest.raises(ConfigError, match="asks for no key"):
        atom_specs(tmp_path, {"api_key_file": str(tmp_path / "key")})


def atom_specs(directory: Path, worker: dict[str, Any], **more: Any) -> WorkerSpec:
    file = directory / "tightrank.yaml"
    file.write_text(json.dumps({"model": str(directory), "engine": "atom", "served_model": "tiny", "guard": {"floor": "0B"},
                                "workers": [{"name": "a", "port": 8010, **worker}], **more}))
    return plan.build(load(file, {}).config, HOST, Inputs({}, MODEL, {}))[0]
