"""Starts that fail for real on the real engines: what they print is read as it comes, and the cause and the flag are right.

No supervisor and no adapter: `tightrank check` would refuse many of these before the engine is started, and the engine's own
words must be understood all the same. Deaths and freezes of a serving engine: test_supervised.py, test_hang.py.
"""
from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import free_ports, kill, session_pids, wait_until
from raw_engine import CACHE
from tightrank import diagnose
from tightrank.records import Diagnosis, Line

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

START_SECONDS = 240.0
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {"vllm": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1",
                           "PYTHONPATH": str(ROOT / "scripts" / "cpu" / "stubs")}}
COMMANDS = {
    "vllm": ("bin/vllm", "serve", "{model}", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "4096"),
    "sglang": ("bin/python", "-m", "sglang.launch_server", "--model-path", "{model}", "--device", "cpu",
               "--attention-backend", "torch_native", "--max-running-requests", "4", "--sleep-on-idle")}


@dataclass(frozen=True)
class Failure:
    """One way to fail. `args` {port} is a port that is taken; `env` None takes a variable away; `spoil` changes the model's
    copy; `change`: a part of what is to be changed."""
    name: str
    engine: str
    cause: str
    change: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    spoil: Callable[[Path], None] = lambda model: None
    shell: str = ""                             # run before the engine, in a mount namespace of its own

    def __str__(self) -> str:
        return f"{self.engine}-{self.name}"


def configured(**values: object) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return spoil


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def truncated(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])


def without_tokenizer(model: Path) -> None:
    for path in model.glob("*token*"):
        path.unlink()


def garbage_header(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(b"\xff" * 4096 + path.read_bytes()[4096:])


def corrupt_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], ')


POOL = ("--max-total-tokens", "16384")
SMALL_SHM = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
FAILURES = (
    Failure("context", "vllm", "context-exceeds-kv-pool", "--max-model-len", ("--kv-cache-memory-bytes", "800000"),
            {"VLLM_CPU_KVCACHE_SPACE": None}),
    Failure("kv-space", "vllm", "host-memory-too-small", "VLLM_CPU_KVCACHE_SPACE", (), {"VLLM_CPU_KVCACHE_SPACE": "900"}),
    Failure("utilization", "vllm", "host-memory-too-small", "--gpu-memory-utilization 0.",
            ("--gpu-memory-utilization", "1.0"), {"VLLM_CPU_KVCACHE_SPACE": None}),
    Failure("tensor-parallel", "vllm", "tensor-parallel-invalid", "4", ("--tensor-parallel-size", "3")),
    Failure("ranks-and-cores", "vllm", "arguments-invalid", "VLLM_CPU_OMP_THREADS_BIND", ("--tensor-parallel-size", "2"),
            {"VLLM_CPU_OMP_THREADS_BIND": None}),
    Failure("no-weights", "vllm", "model-unreadable", "weights", spoil=without_weights),
    Failure("truncated", "vllm", "model-unreadable", "files", spoil=truncated),
    Failure("garbage", "vllm", "model-unreadable", "files", spoil=garbage_header),
    Failure("architecture", "vllm", "model-unsupported", "", spoil=configured(architectures=["NoSuchForCausalLM"])),
    Failure("config", "vllm", "model-unreadable", "config.json", spoil=corrupt_config),
    Failure("no-tokenizer", "vllm", "model-unreadable", "--tokenizer", spoil=without_tokenizer),
    Failure("quantization", "vllm", "arguments-invalid", "args", ("--quantization", "awq")),
    Failure("dtype", "vllm", "arguments-invalid", "args", ("--dtype", "float17")),
    Failure("flag", "vllm", "arguments-invalid", "args", ("--max-modle-len", "100")),
    Failure("model-length", "vllm", "arguments-invalid", "--max-model-len", ("--max-model-len", "99999999")),
    Failure("batched-tokens", "vllm", "arguments-invalid", "", ("--max-num-batched-tokens", "2")),
    Failure("port", "vllm", "port-taken", "ss -ltnp", ("--port", "{port}")),
    Failure("shared-memory", "vllm", "shared-memory-full", "/dev/shm", ("--tensor-parallel-size", "2"), shell=SMALL_SHM),
    Failure("fraction", "sglang", "kv-pool-too-small", "--mem-fraction-static", ("--mem-fraction-static", "0.0001")),
    Failure("ranks-and-cores", "sglang", "arguments-invalid", "SGLANG_CPU_OMP_THREADS_BIND", (*POOL, "--tp-size", "2")),
    Failure("no-weights", "sglang", "model-unreadable", "weights", POOL, spoil=without_weights),
    Failure("truncated", "sglang", "model-unreadable", "files", POOL, spoil=truncated),
    Failure("architecture", "sglang", "model-unsupported", "", POOL,
            spoil=configured(architectures=["NoSuchForCausalLM"])),
    Failure("config", "sglang", "model-unreadable", "config.json", POOL, spoil=corrupt_config),
    Failure("no-tokenizer", "sglang", "model-unreadable", "--tokenizer-path", POOL, spoil=without_tokenizer),
    Failure("dtype", "sglang", "arguments-invalid", "args", (*POOL, "--dtype", "float17")),
    Failure("flag", "sglang", "arguments-invalid", "args", (*POOL, "--max-totl-tokens", "100")),
    Failure("model-length", "sglang", "arguments-invalid", "--context-length", (*POOL, "--context-length", "99999999")),
    Failure("port", "sglang", "port-taken", "ss -ltnp", (*POOL, "--port", "{port}")),
    Failure("tiny-pool", "sglang", "kv-pool-too-small", "--max-total-tokens", ("--max-total-tokens", "4")),
    Failure("host-cache", "sglang", "host-memory-too-small", "--hicache-size",
            (*POOL, "--enable-hierarchical-cache", "--hicache-size", "900")),
)


class Started:
    """A failing start in a session of its own; its lines are read as they come."""

    def __init__(self, failure: Failure, model: Path, port: int) -> None:
        self.engine, self.lines = failure.engine, list[Line]()
        head, *rest = (*COMMANDS[failure.engine], *failure.args)
        given = () if "--port" in failure.args else ("--port", str(free_ports(1)[0]))
        argv = [str(CACHE / "envs" / failure.engine / head),
                *(word.format(model=model, port=port) for word in (*rest, "--host", "127.0.0.1", *given))]
        if failure.shell:
            argv = ["unshare", "--mount", "sh", "-ec", failure.shell + '; exec "$@"', "sh", *argv]
        env = {**os.environ, **ENVIRONMENTS[failure.engine], "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
               **failure.env}
        self.process = subprocess.Popen(argv, env={key: value for key, value in env.items() if value is not None},
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        start_new_session=True, text=True, errors="replace")
        self.timer = threading.Timer(START_SECONDS, self.kill)
        self.timer.start()

    def verdict(self) -> Diagnosis:
        """Reads to the end, or to the line that decides."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(Line(time.monotonic(), time.time(), "stdout", text.rstrip("\n")))
            decided = diagnose.deciding_line(self.engine, self.lines[-1])
            if decided is not None:
                return decided
        return diagnose.diagnose(self.engine, self.lines, diagnose.ExitInfo(self.process.wait(), True))

    def kill(self) -> None:
        for pid in session_pids(self.process.pid):
            kill(pid)

    def end(self) -> None:
        self.timer.cancel()
        self.kill()
        self.process.wait(timeout=30)
        wait_until(lambda: not session_pids(self.process.pid), 30, "the session is gone")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_a_start_that_fails_is_understood(failure: Failure, dense_model: str, taken: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(dense_model, model)
    failure.spoil(model)
    started = Started(failure, model, taken)
    try:
        found = started.verdict()
    finally:
        started.end()
    said = f"{found}\n" + "\n".join(line.text for line in started.lines[-40:])
    assert found.cause == failure.cause, said
    assert failure.change in found.change, said
    assert found.evidence, said
