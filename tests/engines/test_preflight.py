"""The preflight of real vLLM and SGLang: a good configuration has no failure; what cannot start is told and not started."""
from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from helpers import tightrank
from preflight import write_safetensors
from raw_engine import CACHE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "16384")}
UP_SECONDS, CHECK_SECONDS = 20, 150        # 1 s, and 5 to 15 s where the parser is asked, on quiet cores
Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path, dense_model: str) -> Make:
    """A deployment that is not started, with a model of its own to spoil."""
    def build(engine: str, args: tuple[str, ...] = (), env: dict[str, str] | None = None, **options: Any) -> Deployment:
        shutil.copytree(dense_model, tmp_path / "own")
        head, *rest = COMMANDS[engine]
        return Deployment(tmp_path, engine=engine, model=tmp_path / "own", command=[str(CACHE / "envs" / engine / head), *rest],
                          args=(*ARGUMENTS[engine], *args), env={**ENVIRONMENTS[engine], **(env or {})}, **options)
    return build


def refused(deployment: Deployment) -> str:
    """What `up` says; nothing was started, and not for long."""
    started = time.monotonic()
    done = tightrank("up", "-c", str(deployment.file))
    assert done.returncode == 78 and not deployment.state.exists(), done.stderr
    assert time.monotonic() - started < UP_SECONDS
    return done.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_good_configuration_has_no_failure(make: Make, engine: str) -> None:
    deployment = make(engine)
    started = time.monotonic()
    done = tightrank("check", "--json", "-c", str(deployment.file), timeout=CHECK_SECONDS)
    told = json.loads(done.stdout)
    items = {item["item"]: item for item in told["items"]}
    assert done.returncode == 0 and told["ok"], [item for item in told["items"] if item["status"] == "fail"]
    assert time.monotonic() - started < CHECK_SECONDS
    for name in ("model weights", "tokenizer", "engine package", "architecture", "tensor parallel", "flags",
                 "memory of the host"):
        assert items[name]["status"] == "pass", items[name]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_shard_that_is_missing_or_cut_off(make: Make, engine: str) -> None:
    deployment = make(engine)
    path = deployment.directory / "own" / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    assert "model-unreadable: " in refused(deployment)
    path.rename(path.with_name("model-00001-of-00002.safetensors"))
    write_safetensors(path.with_name("model-00001-of-00002.safetensors"), {"a": ("BF16", [2])})
    assert "lacks model-00002-of-00002.safetensors" in refused(deployment)


def test_three_ranks_of_two_kv_heads(make: Make) -> None:
    said = refused(make("vllm", tensor_parallel=3))
    assert "tensor-parallel-invalid: " in said
    assert "tensor_parallel 3 does not divide 4 attention heads, 2 KV heads; use one of 1, 2, 4" in said


def test_more_kv_than_there_is_memory(make: Make) -> None:
    assert "host-memory-too-small: " in refused(make("vllm", env={"VLLM_CPU_KVCACHE_SPACE": "100000"}))


def test_a_taken_port(make: Make) -> None:
    deployment = make("vllm")
    with socket.create_server(("127.0.0.1", deployment.engine_port)):
        assert "port-taken" in refused(deployment)


@pytest.mark.parametrize(("engine", "flag", "near"), [("vllm", "--max-modle-len", "--max-model-len"),
                                                      ("sglang", "--chunked-prefil-sise", "--chunked-prefill-size")])
def test_a_mistyped_flag_is_refused_by_the_engines_own_parser(make: Make, engine: str, flag: str, near: str) -> None:
    done = tightrank("up", "-c", str(make(engine, (flag, "64")).file), timeout=CHECK_SECONDS)
    assert done.returncode == 78
    assert "arguments-invalid: " in done.stderr and f"unrecognized arguments: {flag}" in done.stderr
    assert f"did you mean {near}?" in done.stderr
