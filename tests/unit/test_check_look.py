"""The preflight as a whole: all items of a deployment, what `check` and `up` say of them and their exit codes.

The engine is a package of a few lines in the real one's shape: it has a registry and lists of flags, and is never imported.
"""
from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import free_ports, tightrank
from preflight import GIB, make_config, make_memory, make_spec, write_safetensors
from tightrank import check, host, inputs, plan
from tightrank.check.architecture import ArchitectureFacts
from tightrank.check.devices import DeviceFacts
from tightrank.check.flags import FlagFacts
from tightrank.check.item import Item
from tightrank.check.leftovers import LeftoverFacts
from tightrank.check.machine import MachineFacts
from tightrank.check.model import ModelFacts
from tightrank.check.program import ProgramFacts
from tightrank.check.quantization import QuantizationFacts
from tightrank.config import load
from tightrank.errors import CAUSES

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192,
          "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 64}


@pytest.fixture
def deployment(tmp_path: Path) -> dict[str, Any]:
    """tightrank.yaml as a mapping: a whole model, an engine on the CPU, free ports."""
    files = {"site/vllm/model_executor/models/registry.py": "_MODELS = {'LlamaForCausalLM': 1}", "site/vllm/__init__.py": "",
             "site/vllm/engine/arg_utils.py": "\n".join(f"'{flag}'" for flag in (
                 "--host", "--port", "--max-num-batched-tokens", "--enable-chunked-prefill", "--max-model-len",
                 "--shutdown-timeout", "--distributed-executor-backend", "--tensor-parallel-size", "--served-model-name")),
             "site/vllm-0.32.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n",
             "bin/vllm": f"#!{sys.executable}\n", "model/config.json": json.dumps(CONFIG), "model/tokenizer.json": "{}"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "vllm").chmod(0o755)
    write_safetensors(tmp_path / "model" / "model.safetensors", {"model.layers.0.x.weight": ("BF16", [64, 64])})
    ports = free_ports(2)
    return {"model": "model", "engine": "vllm", "command": [str(tmp_path / "bin" / "vllm"), "serve"],
            "state_directory": "state", "http": {"port": ports[0]}, "guard": {"floor": "1MiB", "margin": "0B"},
            "workers": [{"name": "a", "port": ports[1], "env": {"PYTHONPATH": str(tmp_path / "site")}}]}


def look(directory: Path, deployment: dict[str, Any]) -> list[Item]:
    path = write(directory, deployment)
    config = load(path, {}).config
    read = inputs.read(config, {"PATH": os.environ["PATH"]})
    return check.look(config, plan.build(config, host.read(), read), read, thorough=False)


def write(directory: Path, deployment: dict[str, Any]) -> Path:
    path = directory / "tightrank.yaml"
    path.write_text(yaml.safe_dump(deployment, sort_keys=False))
    return path


def test_a_good_deployment_has_no_failure(tmp_path: Path, deployment: dict[str, Any]) -> None:
    found = {item.item: item for item in look(tmp_path, deployment)}
    assert not [item for item in found.values() if item.status == "fail"]
    for name in ("state directory, program, hooks, ports", "model weights", "tokenizer", "engine package", "architecture",
                 "tensor parallel", "flags", "devices", "settings", "memory of the host"):
        assert found[name].status == "pass", found[name]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("worker", "cause", "said"), [
    ({"tensor_parallel": 3}, "tensor-parallel-invalid", "use one of 1, 2, 4"),
    ({"env": {"VLLM_CPU_KVCACHE_SPACE": "100000"}}, "host-memory-too-small", "lower VLLM_CPU_KVCACHE_SPACE by")])
def test_a_worker_that_cannot_start(tmp_path: Path, deployment: dict[str, Any], worker: dict[str, Any], cause: str,
                                    said: str) -> None:
    own = deployment["workers"][0]
    deployment["workers"] = [{**own, **worker, "env": {**own["env"], **worker.get("env", {})}}]
    (failure,) = [item for item in look(tmp_path, deployment) if item.status == "fail"]
    assert failure.cause == cause and said in failure.text


def test_several_workers_share_what_is_the_same_and_the_hosts_memory(tmp_path: Path, deployment: dict[str, Any]) -> None:
    first = deployment["workers"][0]
    space = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    deployment["workers"] = [{**first, "env": {**first["env"], **space}}, {**first, "name": "b", "port": free_ports(1)[0],
                                                                             "tensor_parallel": 3}]
    found = look(tmp_path, deployment)
    assert len([item for item in found if item.item == "model weights"]) == 1
    first_said, second_said = (item.text for item in found if item.item == "tensor parallel")
    assert first_said == "a: tensor_parallel 1 divides 4 attention heads, 2 KV heads (valid: 1, 2, 4)"
    assert ": workers[1].tensor_parallel: tensor_parallel 3 does not divide" in second_said
    assert "each of 4 ranks takes about 1.00 GiB" in next(item.text for item in found if item.item == "memory of the host")


def test_what_was_refused_before_is_an_item_with_the_same_words(tmp_path: Path, deployment: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        deployment["workers"][0]["port"] = server.getsockname()[1]
        found = look(tmp_path, deployment)
    (failure,) = [item for item in found if item.status == "fail"]
    assert (failure.item, failure.cause) == ("ports", "port-taken")
    assert failure.text.endswith("is in use; end what listens there (ss -ltnp) or give another port")
    assert failure.change == "end what listens there (ss -ltnp) or give another port"
    assert f"by pid {os.getpid()}" in next(item.text for item in found if item.item == "port holders")


def test_where_nothing_can_be_read_nothing_fails() -> None:
    """A model directory, an engine, a machine that do not answer: all is unknown or in order, and up goes on."""
    spec, why = make_spec(tensor_parallel=2), "it did not answer"
    worker = check.WorkerFacts(spec, ProgramFacts(why=why), ArchitectureFacts("vllm", why=why), QuantizationFacts(),
                               FlagFacts(why=why))
    facts = check.Facts(make_config(), {}, {}, (), (worker,), ModelFacts("/m", why=why), DeviceFacts(why=why),
                        make_memory(None), MachineFacts(), LeftoverFacts(), ())
    found = list(check.items(facts))
    assert {item.status for item in found if item.item not in ("settings", "state directory, program, hooks, ports")} == {
        "unknown"}
    assert all(item.sentence for item in found)


# --- the commands -----------------------------------------------------------------------------------------------------


def test_check_for_people_and_machines(tmp_path: Path, deployment: dict[str, Any]) -> None:
    deployment["workers"][0]["tensor_parallel"] = 3
    write(tmp_path, deployment)
    done = tightrank("check", cwd=tmp_path)
    assert done.returncode == 78 and "\033" not in done.stdout
    line = (tmp_path / "tightrank.yaml").read_text().splitlines().index("  tensor_parallel: 3") + 1
    assert done.stderr.startswith(f"tightrank: tensor-parallel-invalid: tightrank.yaml:{line}: workers[0].tensor_parallel: "
                                  "tensor_parallel 3 does not divide 4 attention heads")
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.split()[:1] in (["pass"], ["fail"])]
    assert [status for status, text in rows if text.startswith("tensor parallel")] == ["fail"]
    told = json.loads(tightrank("check", "--json", cwd=tmp_path).stdout)
    assert told["ok"] is False and told["problems"][0]["cause"] == "tensor-parallel-invalid" and told["values"]
    assert {tuple(item) for item in told["items"]} == {("status", "item", "sentence", "change", "cause")}
    assert {item["cause"] for item in told["items"] if item["status"] == "fail"} <= CAUSES.keys()


def test_a_warning_does_not_fail(tmp_path: Path, deployment: dict[str, Any]) -> None:
    deployment["workers"][0]["env"]["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    write(tmp_path, deployment)
    done = tightrank("check", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["ok"] and told["problems"] == []
    assert "warn" in {item["status"] for item in told["items"] if item["item"] == "settings"}


def test_up_starts_nothing_that_cannot_work(tmp_path: Path, deployment: dict[str, Any]) -> None:
    """A truncated file, a size that heads do not allow, more memory than there is: all are told, in the order looked at."""
    deployment["workers"][0]["tensor_parallel"] = 3
    deployment["workers"][0]["env"]["VLLM_CPU_KVCACHE_SPACE"] = "99999"
    path = tmp_path / "model" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    write(tmp_path, deployment)
    done = tightrank("up", cwd=tmp_path)
    causes = [line.split(": ")[1] for line in done.stderr.splitlines()]
    assert done.returncode == 78 and done.stdout == ""
    assert [cause for cause in causes if cause in CAUSES] == ["model-unreadable", "tensor-parallel-invalid",
                                                              "host-memory-too-small"]
    assert set(causes) - CAUSES.keys() <= {"warn", "unknown"}
    assert not (tmp_path / "state").exists()


def test_up_says_one_line_for_what_was_refused_before(tmp_path: Path, deployment: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        deployment["workers"][0] |= {"port": server.getsockname()[1], "tensor_parallel": 3}
        write(tmp_path, deployment)
        done = tightrank("up", cwd=tmp_path)
    assert done.returncode == 78 and done.stderr.count("\n") == 1 and "port-taken" in done.stderr


def test_a_model_larger_than_any_host(tmp_path: Path, deployment: dict[str, Any]) -> None:
    """A sparse file whose header says what it holds: the size is known before a weight is read."""
    path = tmp_path / "model" / "model.safetensors"
    header = json.dumps({"a.weight": {"dtype": "BF16", "shape": [2**40, 1], "data_offsets": [0, 2**41]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**41)
    (failure,) = [item for item in look(tmp_path, deployment) if item.status == "fail"]
    assert failure.cause == "host-memory-too-small" and f"weights {2**41 / GIB:.2f}" in failure.text
