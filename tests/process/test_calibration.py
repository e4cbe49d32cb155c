"""What a real supervisor measures of the fake engine: its pace, what is kept for the next start, and what is said then."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment, Make
from helpers import wait_until
from samples import rank
from tightrank.adapter import wire
from tightrank.generation import Generation
from tightrank.records import ProcessId, WorkerReading, WorkerSpec

STEP_SECONDS = 0.01


def complete(deployment: Deployment, tokens: int) -> None:
    answer = httpx2.post(f"http://127.0.0.1:{deployment.engine_port}/v1/completions", timeout=20,
                         json={"model": "tiny", "prompt": [1] * tokens, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def kept(deployment: Deployment) -> dict[str, dict[str, float]]:
    entry, = json.loads((deployment.state / "calibration.json").read_text())["entries"].values()
    terms: dict[str, dict[str, float]] = entry["terms"]
    return terms


def sized(directory: Path, tokens: int) -> tuple[str, ...]:
    """The fake's arguments. The file is no part of them, so that another size is the same configuration."""
    (directory / "kv").write_text(str(tokens))
    return (f"--kv-tokens-file={directory / 'kv'}", "--step-seconds", str(STEP_SECONDS))


def test_a_pace_is_measured_shown_and_kept_and_another_size_is_said(make: Make, tmp_path: Path) -> None:
    deployment = make(args=sized(tmp_path, 65536)).up()
    assert deployment.wait_phase("up")["pace"] is None
    for tokens in (8000, 64, 300, 700, 1000, 5000, 32, 150, 8000, 450):
        complete(deployment, tokens)
    pace: dict[str, Any] = wait_until(lambda: deployment.worker()["pace"], 30)
    assert pace["longest_tokens"] == 8000 and pace["samples"] >= 16
    # a chunk of the fake takes the same time whatever its size
    for tokens, prefix in ((1000, 0), (250, 7000)):
        seconds = pace["row_seconds"] * tokens + pace["pair_seconds"] * tokens * (prefix + tokens / 2) + pace["step_seconds"]
        assert STEP_SECONDS * 0.8 < seconds < STEP_SECONDS * 5
    wait_until(lambda: "pace_tokens" in kept(deployment)["worker"], 30)
    assert kept(deployment)["worker"]["kv_tokens"] == 65536 and kept(deployment)["0"]["available_bytes"] > 0
    assert deployment.worker()["comparisons"] == [] and "us a token" in deployment.run("status").stdout
    deployment.terminate()

    sized(tmp_path, 32768)
    deployment.up().wait_phase("up", generation=2)
    row, = wait_until(lambda: deployment.worker()["comparisons"], 30)
    assert (row["term"], row["predicted"], row["measured"], row["agrees"]) == ("kv_tokens", 65536, 32768, False)
    event, = deployment.events("calibration")
    assert "kv_tokens: 65,536 expected (as it was last measured here), 32,768 measured (-50.0%)" in event["sentence"]
    assert event["worker"] == "w0"
    assert "differs  kv_tokens: 65,536 at the last start, 32,768 now" in deployment.run("status").stdout
    assert event["sentence"] in (deployment.directory / "up.log").read_text()


@pytest.mark.parametrize("garbage", [b"", b'{"schema": 2, "entries": {}}', b"\0" * (2 << 20)])
def test_garbage_never_blocks_a_start(make: Make, tmp_path: Path, garbage: bytes) -> None:
    deployment = make(args=sized(tmp_path, 4096))
    deployment.state.mkdir(mode=0o700)
    (deployment.state / "calibration.json").write_bytes(garbage)
    deployment.up().wait_phase("up")
    broken = deployment.state / "calibration.json.broken"
    wait_until(lambda: broken.exists() and (deployment.state / "calibration.json").exists(), 10)
    assert broken.read_bytes() == garbage
    assert kept(deployment)["worker"] == {"kv_tokens": 4096}
    event, = deployment.events("calibration")
    assert "calibration.json: not readable" in event["sentence"] and event["worker"] is None


@pytest.mark.parametrize(("engine", "device", "samples"), [
    ("sglang", None, 40), ("sglang", "0000:01:00.0", 40), ("vllm", None, 40),
    ("vllm", "0000:01:00.0", 38)])         # there a step ends when the prompt's next chunk starts: each prompt's last has none
def test_one_rank_of_a_group_tells_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, device: str | None,
                                            samples: int) -> None:
    spec = WorkerSpec(
        name="w", engine=engine, role="both", argv=("sleep", "60"), env={}, host="127.0.0.1", port=1, model="/m",
        served_model="m", tensor_parallel=2, pipeline_parallel=1, devices=(), hooks={}, line=None, context_tokens=None,
        schedule=(), drain_seconds=1, start_stall_seconds=1, generation=1, run_directory=str(tmp_path / "w-1"))
    generation = Generation(spec, os.environ, 0, lambda *_: None, 0.0)
    try:
        ranks = tuple(rank(id=ProcessId(10 + number, 1), rank=number, alive=False, device=device) for number in range(2))
        generation.observe(WorkerReading("w", 1, None, (), ranks, (), ()), None, 1.0)
        steps = [wire.Step(1, 10 + number, 1 + at, number, (1 + at) * 10**8, 64, 64 * (at % 20 + 1), 0, False, 100.0, None,
                           [[64 * (at % 20), 64]]) for at in range(40) for number in range(2)]
        monkeypatch.setattr(generation.launched.records, "receive", lambda *_: steps)
        generation.receive()
        assert sum(map(len, generation.prefills.meter._cells.values())) <= samples and generation.prefills.meter._new == samples
    finally:
        generation.launched.process.kill()
        generation.launched.process.wait()
        generation.close()
