"""A whole deployment for tests: writes tightrank.yaml, runs the real `tightrank up`, asks its HTTP."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers import FAKE_ENGINE, free_ports, tightrank, wait_until

_MAIN = "import sys; from tightrank.cli import main; sys.exit(main())"


class Deployment:
    """One tightrank.yaml in `directory` and the supervisor that runs it. `stop` or the end of the test ends its tree."""

    def __init__(self, directory: Path, *, engine: str = "vllm", model: Path | None = None, command: list[str] | None = None,
                 args: tuple[str, ...] = (), settings: dict[str, Any] | None = None, env: dict[str, str] | None = None,
                 tensor_parallel: int = 1) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.port, self.engine_port = free_ports(2)
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith("TIGHTRANK_")}}
        self.process: subprocess.Popen[str] | None = None
        self.file = directory / "tightrank.yaml"
        model = model or fake_model(directory)
        command = command or [sys.executable, str(FAKE_ENGINE), "--engine", engine]
        body = {"name": "test", "engine": engine, "model": str(model), "command": command, "served_model": "tiny",
                "state_directory": str(self.state), "http": {"port": self.port}, "guard": {"floor": "64MiB", "margin": "64MiB"},
                "limits": {"backoff_first": "200ms", "drain": "5s"},
                "line": {"budget": 2_000_000, "minimum": 64, "maximum": 1024},
                "workers": [{"name": "w0", "port": self.engine_port, "args": list(args), "env": env or {},
                             "tensor_parallel": tensor_parallel}]}
        for key, value in (settings or {}).items():
            if isinstance(value, dict) and isinstance(body.get(key), dict):
                body[key].update(value)
            else:
                body[key] = value
        self.file.write_text(json.dumps(body))

    def up(self, output: int | None = None) -> Deployment:
        return self.start("up", "-c", str(self.file), output=output)

    def start(self, *words: str, output: int | None = None) -> Deployment:
        """`output`: a descriptor that takes what it prints, in place of up.log."""
        argv = [sys.executable, "-P", "-c", _MAIN, *words]
        with open(self.directory / "up.log", "a") as log:
            self.process = subprocess.Popen(argv, env=self.env, text=True, stdout=log if output is None else output,
                                            stderr=subprocess.STDOUT, start_new_session=True)
        return self

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return tightrank(*words, "-c", str(self.file), timeout=timeout)

    @property
    def output(self) -> str:
        return (self.directory / "up.log").read_text(errors="replace")

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"http://127.0.0.1:{self.port}{path}", timeout=10)

    def post(self, path: str, body: Any = None) -> httpx2.Response:
        return httpx2.post(f"http://127.0.0.1:{self.port}{path}", json={} if body is None else body,
                           headers={"X-Tightrank": "1"}, timeout=10)

    def status(self) -> dict[str, Any]:
        try:
            response = self.get("/status")
        except httpx2.HTTPError:
            return {}
        return response.json() if response.status_code == 200 else {}

    def worker(self) -> dict[str, Any]:
        status = self.status()
        return status["workers"][0] if status else {}

    def wait_phase(self, *phases: str, timeout: float = 30, generation: int | None = None) -> dict[str, Any]:
        """The worker's status once its phase is one of `phases` (in that generation, when given)."""
        def there() -> dict[str, Any] | None:
            assert self.process is not None
            if self.process.poll() is not None:
                pytest.fail(f"tightrank ended with {self.process.returncode}")
            time.sleep(0.1)         # the supervisor has better things to do than to answer us
            worker = self.worker()
            right = worker and worker["phase"] in phases and generation in (None, worker["generation"])
            return worker if right else None
        try:
            return wait_until(there, timeout)
        except pytest.fail.Exception as error:
            raise AssertionError(f"{error}; status {self.worker()}\n{self.output[-6000:]}") from None

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = (self.state / "journal.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
        return [event for event in found if kind in (None, event["kind"])]

    def pid(self, role: str) -> int:
        return next(rank["id"]["pid"] for rank in self.worker()["ranks"] if rank["role"] == role)

    def tree(self) -> list[int]:
        """Every process of the engine that the last reading knew."""
        return [process["id"]["pid"] for process in self.worker()["processes"]]

    def terminate(self, timeout: float = 60) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            for _ in range(2):
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(15)


Make = Callable[..., Deployment]


def fake_model(directory: Path) -> Path:
    path = directory / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"],
                                                  "max_position_embeddings": 32768}))
    return path


def gone(pids: list[int]) -> Callable[[], bool]:
    """Whether none of `pids` is there any more (a zombie counts as gone)."""
    def check() -> bool:
        return not any(_alive(pid) for pid in pids)
    return check


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
