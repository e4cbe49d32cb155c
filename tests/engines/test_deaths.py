"""Deaths that no flag makes: in the middle of a start, on a full disk, and by faults of the engines' own. `--full`."""
from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, gone
from engines.test_supervised import ROLES, START_SECONDS, Make, found, held_by_nobody, make, traces, up  # noqa: F401 - a fixture
from helpers import ROOT, wait_until
from raw_engine import CACHE, RawEngine, interpreter
from tightrank import diagnose
from tightrank.records import Line

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]
needs_amx = pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="needs a processor with AMX")
needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root may")
MIB = 1 << 20


def events(deployment: Deployment, kind: str) -> list[dict[str, Any]]:
    return deployment.events(kind) if (deployment.state / "journal.jsonl").exists() else []


@pytest.mark.parametrize("step", ["loading", "sizing"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_killed_while_it_starts(make: Make, engine: str, step: str) -> None:     # noqa: F811 - the fixture
    """The process that loads and sizes: told within a second, nothing left, and the next generation comes up."""
    before = set(os.listdir("/dev/shm"))
    deployment = make(engine)
    role = ROLES[engine][1]
    kind, sentence = ("hello", f"{role}") if step == "loading" else ("phase", "starting: sizing")
    wait_until(lambda: any(event["sentence"].startswith(sentence) for event in events(deployment, kind)), START_SECONDS, step)
    tree, pid = deployment.tree(), deployment.pid(role)
    began = os.times().elapsed
    os.kill(pid, signal.SIGKILL)
    cause = wait_until(lambda: deployment.events("cause"), 5, "a cause")[0]
    assert os.times().elapsed - began < 1.0
    assert cause["data"]["cause"] in ("rank-died", "engine-exited"), cause
    assert role.replace("-", " ") in cause["sentence"].replace("-", " "), cause
    wait_until(gone(tree), 10, "an empty tree")
    up(deployment, 2)
    assert deployment.terminate() == 0
    wait_until(lambda: not held_by_nobody(before), 30, "no shared memory that nobody holds")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MiB where the state directory will be."""
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


@needs_mount
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_disk_fills_while_it_serves(disk: Path, make: Make, engine: str) -> None:     # noqa: F811 - the fixture
    """It serves on. Killed, it cannot start, and says why; with room again it does, and nothing is left of the old one."""
    deployment = make(engine, settings={"limits": {"restarts": 20, "backoff_first": "1s", "backoff_longest": "2s"}})
    up(deployment, 1)
    left = traces(deployment, 1)
    filler = fill(disk)
    assert deployment.post("/admission", {"prompt_tokens": 10}).status_code == 200
    assert deployment.get("/readyz").status_code == 200
    tree = deployment.tree()
    os.kill(deployment.pid(ROLES[engine][1]), signal.SIGKILL)
    wait_until(gone(tree), 10, "an empty tree")
    wait_until(lambda: deployment.worker()["phase"] == "backing-off"
               and deployment.worker()["diagnosis"]["cause"] == "disk-full", 30, f"disk-full; {deployment.worker()}")
    body = deployment.get("/readyz").json()["workers"]["w0"]
    assert "No space left" in str(body) and "df -h" in body["change"], body
    filler.unlink()
    deployment.wait_phase("up", timeout=START_SECONDS)
    assert not [path for path in left if path.exists()]
    assert deployment.terminate() == 0


@needs_mount
def test_a_full_or_read_only_disk_starts_no_engine(disk: Path, make: Make) -> None:     # noqa: F811 - the fixture
    filler = fill(disk)
    deployment = make("vllm")
    assert deployment.process is not None and deployment.process.wait(60) == 78
    assert "journal and logs do not fit" in deployment.output
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    deployment.up()
    assert deployment.process.wait(60) == 78
    assert "state_directory" in deployment.output and "is not writable" in deployment.output


def diagnosed(engine: str, log: Path, status: int) -> diagnose.Diagnosis:
    lines = [Line(0.0, 0.0, "stdout", text) for text in log.read_text(errors="replace").splitlines()]
    return diagnose.diagnose(engine, lines, diagnose.ExitInfo(status, False))


@needs_amx
def test_vllms_index_error_of_a_sliver(tmp_path: Path) -> None:
    """Its DeepSeek-V4 on a CPU dies of a step with a long prefill and less than 4 tokens of another request."""
    argv = [interpreter("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(CACHE / "models" / "deepseek-v4"),
            "--host", "127.0.0.1", "--port", "32520", "--served-model-name", "tiny", "--load-format", "dummy",
            "--kv-cache-dtype", "fp8", "--max-model-len", "16384", "--max-num-batched-tokens", "2048",
            "--max-num-seqs", "4", "--enforce-eager"]
    plugin = str(ROOT / "scripts" / "cpu" / "deepseek_v4" / "plugin")
    engine = RawEngine(tmp_path / "run", argv, 32520, None, python_path=plugin, env={
                           "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"})

    def ask(tokens: int) -> int:
        return engine.request("POST", "/v1/completions", {"model": "tiny", "prompt": [(index + tokens) ** 2 % 250 for index in
                                                                                      range(tokens)], "max_tokens": 2})[0]
    try:
        engine.wait_ready()
        with ThreadPoolExecutor(2) as pool:
            assert 500 in list(pool.map(ask, (3 * 2048 - 3, 3000)))
        status = engine.process.wait(60)
    finally:
        engine.stop()
    cause = diagnosed("vllm", engine.log, status)
    assert (cause.cause, cause.restart_helps) == ("engine-error", True), cause
    assert "index 2 is out of bounds" in str(cause.evidence)


@needs_amx
def test_vllms_illegal_instruction_of_a_first_request_with_remote_kv(tmp_path: Path, dense_model: str) -> None:
    """A decode worker that never had an ordinary prompt (ours are asked one before they are up)."""
    def started(role: str, port: int, side: int) -> RawEngine:
        transfer = {"kv_connector": "NixlConnector", "kv_role": f"kv_{'producer' if role == 'prefill' else 'consumer'}"}
        argv = [interpreter("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", dense_model, "--host", "127.0.0.1", "--port",
                str(port), "--served-model-name", "tiny", "--enforce-eager", "--max-num-seqs", "4",
                "--kv-transfer-config", json.dumps(transfer)]
        return RawEngine(tmp_path / role, argv, port, None, python_path=str(ROOT / "scripts" / "cpu" / "vllm_pd"), env={
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "UCX_TLS": "tcp,self",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)})

    def ask(engine: RawEngine, transfer: object) -> tuple[int, Any]:
        return engine.request("POST", "/v1/completions", {"model": "tiny", "prompt": list(range(5, 205)), "max_tokens": 2,
                                                          "kv_transfer_params": transfer})
    prefill, decode = started("prefill", 32530, 32531), started("decode", 32532, 32533)
    try:
        prefill.wait_ready()
        decode.wait_ready()
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(
            ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))}
        assert ask(decode, ask(prefill, wanted)[1]["kv_transfer_params"])[0] == 500
        status = decode.process.wait(60)
    finally:
        prefill.stop()
        decode.stop()
    cause = diagnosed("vllm", decode.log, status)
    assert (cause.cause, cause.restart_helps) == ("rank-died", True) and "VllmWorker-0" in str(cause), cause
