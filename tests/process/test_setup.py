"""scripts/setup: safe to interrupt and to start twice; the models are what the engines read."""
from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, run_command

SETUP = ROOT / "scripts" / "setup"


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"TIGHTRANK_CACHE": str(tmp_path)}


def made(tmp_path: Path) -> Path:
    return (tmp_path / "models" / "dense").resolve()


def test_models_are_made_once_and_alike(cache: dict[str, str], tmp_path: Path) -> None:
    first = run_command([sys.executable, SETUP, "models"], env=cache)
    assert first.returncode == 0 and "dense: making" in first.stdout
    before = (made(tmp_path) / "model.safetensors").read_bytes()
    again = run_command([sys.executable, SETUP, "models"], env=cache)
    assert again.returncode == 0 and "making" not in again.stdout
    (made(tmp_path) / ".complete").unlink()
    assert "dense: making" in run_command([sys.executable, SETUP, "models"], env=cache).stdout
    assert (made(tmp_path) / "model.safetensors").read_bytes() == before


def test_what_was_interrupted_is_made_anew(cache: dict[str, str], tmp_path: Path) -> None:
    run_command([sys.executable, SETUP, "models"], env=cache)
    directory = made(tmp_path)
    (directory / ".complete").unlink()
    (directory / "model.safetensors").write_bytes(b"half")
    (directory / "left-over").touch()
    assert run_command([sys.executable, SETUP, "models"], env=cache).returncode == 0
    assert (directory / "model.safetensors").stat().st_size > 2_000_000 and not (directory / "left-over").exists()


def test_two_at_once(cache: dict[str, str], tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    both = [spawn([sys.executable, SETUP, "models"], cache, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(b"dense: making" in output for output in outputs) == 1
    assert (made(tmp_path) / ".complete").exists()


@pytest.mark.parametrize(("reached", "given"), [(True, ""), (False, ""), (True, "https://other.example/simple")])
def test_torch_comes_from_its_own_index_where_that_is_reached(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool, given: str) -> None:
    loader = importlib.machinery.SourceFileLoader("setup_script", str(SETUP))
    module: Any = importlib.util.module_from_spec(importlib.util.spec_from_loader("setup_script", loader))   # type: ignore[arg-type]
    loader.exec_module(module)
    calls: list[str] = []
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", given)
    module.run = lambda *argv: calls.append(" ".join(map(str, argv)))
    module.reached = lambda url: reached
    module.make = lambda kind, name, key, build: build(tmp_path)
    module.environment("sglang")
    first = [call for call in calls if f"--index-url {module.TORCH_INDEX} torch==" in call]
    assert len(first) == (reached and not given) and "-r" in calls[-2]
    assert not first or calls.index(first[0]) < len(calls) - 2


def test_an_unknown_part_is_named() -> None:
    done = run_command([sys.executable, SETUP, "vlm"])
    assert done.returncode == 2 and "no part 'vlm'; there are supervisor, vllm, sglang, models, releases, all" in done.stderr


def test_the_weights_fit_the_configuration(cache: dict[str, str], tmp_path: Path) -> None:
    run_command([sys.executable, SETUP, "models"], env=cache)
    config = json.loads((made(tmp_path) / "config.json").read_text())
    data = (made(tmp_path) / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == len(data) - 8 - size
    vocabulary = json.loads((made(tmp_path) / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))
