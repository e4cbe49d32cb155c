"""Fake P/D engines and a gateway over them, for tests and benches: each a real process, all ended with `close`."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from deployment import Deployment
from helpers import ROOT, SUPERVISOR, free_ports, wait_until

PEER = ROOT / "tests" / "fakes" / "peer.py"
_MAIN = "import sys; from tightrank.cli import main; sys.exit(main())"
Json = dict[str, Any]


def clean_env() -> dict[str, str]:
    """Ours without settings of tightrank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIGHTRANK_")}
    return {**kept, "PYTHONPATH": str(SUPERVISOR)}


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Ends a process that may be stopped, and waits for it."""
    if process is not None and process.poll() is None:
        process.kill()
        process.wait(15)


@dataclass
class FakePeer:
    """One fake engine. Its process lives on its own or, `supervised`, under a supervisor that starts it again."""
    engine: str
    name: str
    role: str
    flags: tuple[str, ...] = ()
    supervised: bool = False
    port: int = 0
    transfer_port: int = 0
    control_port: int = 0
    known_pid: int = 0                     # of a supervised one: it cannot be asked while it is stopped
    process: subprocess.Popen[bytes] | None = None
    client: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=10, trust_env=False, verify=False))

    def __post_init__(self) -> None:
        if not self.port:
            self.port, self.transfer_port, self.control_port = free_ports(3)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def argv(self) -> list[str]:
        return [sys.executable, str(PEER), "--engine", self.engine, "--role", self.role, "--name", self.name, "--port",
                str(self.port), "--transfer-port", str(self.transfer_port), "--control-port", str(self.control_port),
                "--load-seconds", "0", *self.flags]

    def entry(self) -> Json:
        """Its entry of gateway.workers."""
        return {"name": self.name, "url": self.url, "engine": self.engine, "role": self.role, "model": "tiny",
                "transfer_port": self.transfer_port}

    def start(self) -> FakePeer:
        self.process = subprocess.Popen(self.argv(), env=clean_env(), stderr=subprocess.DEVNULL)
        return self

    def ready(self) -> bool:
        try:
            return self.client.get(f"{self.url}/health").status_code == 200
        except httpx2.HTTPError:
            return False

    def pid(self) -> int:
        if self.process is not None:
            return self.process.pid
        return int(self.control().json()["pid"])

    def control(self, path: str = "/", body: Json | None = None) -> httpx2.Response:
        url = f"http://127.0.0.1:{self.control_port}{path}"
        response = self.client.get(url) if body is None else self.client.post(url, json=body)
        assert response.status_code == 200, response.text
        return response

    def fault(self, kind: str, **fields: Any) -> None:
        self.control("/fault", {"kind": kind, **fields})

    def reset(self) -> None:
        self.control("/reset", {})

    def log(self, *events: str, since: float = 0.0) -> list[Json]:
        """Its events of these kinds (all), oldest first, health checks and the like left out; none of one that is dead or
        stopped."""
        try:
            response = self.client.get(f"http://127.0.0.1:{self.control_port}/log", timeout=2)
        except httpx2.TransportError:
            return []
        found = [event for event in response.json() if event["at"] >= since]
        return [event for event in found if (not events or event["event"] in events) and
                event.get("path") not in ("/health", "/v1/models", "/tokenize")]

    def kill(self) -> None:
        """SIGKILL; a supervised one is only sent it."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(15)

    def send(self, number: int) -> None:
        os.kill(self.known_pid or self.pid(), number)

    def close(self) -> None:
        end(self.process)
        self.client.close()


class Fleet:
    """Fakes of one engine: p0.., d0.. (a pair needs one of each), w0.. (serve alone)."""

    def __init__(self, engine: str, prefills: int = 2, decodes: int = 2, alone: int = 0, flags: Sequence[str] = ()) -> None:
        counts = (("p", "prefill", prefills), ("d", "decode", decodes), ("w", "both", alone))
        self.engine = engine
        self.peers = [FakePeer(engine, f"{letter}{i}", role, tuple(flags))
                      for letter, role, count in counts for i in range(count)]

    def start(self) -> Fleet:
        for peer in self.peers:
            peer.start()
        for peer in self.peers:
            wait_until(peer.ready, what=f"{peer.name} ready")
        return self

    def __getitem__(self, name: str) -> FakePeer:
        return next(peer for peer in self.peers if peer.name == name)

    def role(self, role: str) -> list[FakePeer]:
        return [peer for peer in self.peers if peer.role == role]

    def log(self, *events: str, since: float = 0.0) -> list[Json]:
        """The events of all, in their order of time, each with its "peer"."""
        found = [{**event, "peer": peer.name} for peer in self.peers for event in peer.log(*events, since=since)]
        return sorted(found, key=lambda event: float(event["at"]))

    def recover(self) -> None:
        """All alive, awake and without faults."""
        for peer in self.peers:
            if peer.process is None or peer.process.poll() is not None:
                peer.start()
            peer.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        for peer in self.peers:
            wait_until(peer.ready, what=f"{peer.name} ready")
            peer.reset()

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


class Supervised(Fleet):
    """The same fakes as the workers of one real `tightrank up`."""

    def __init__(self, directory: Path, engine: str, prefills: int = 2, decodes: int = 2, alone: int = 0,
                 flags: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(engine, prefills, decodes, alone, flags)
        for peer in self.peers:
            peer.supervised = True
        limits = {"restarts": 100, "backoff_longest": "300ms", "hang": "0s"}      # they die often; the frozen are the gateway's
        self.deployment = Deployment(
            directory, engine=engine, command=[sys.executable, str(PEER), "--engine", engine],
            settings={"workers": [self._worker(peer) for peer in self.peers], "limits": limits, **settings})

    def _worker(self, peer: FakePeer) -> Json:
        worker: Json = {"name": peer.name, "role": peer.role, "port": peer.port,
                        "args": ["--name", peer.name, "--control-port", str(peer.control_port), *peer.flags]}
        transfers = peer.role == "prefill" or (peer.role == "decode" and self.engine == "vllm")
        return worker | ({"transfer_port": peer.transfer_port} if transfers else {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.deployment.port}"

    def workers(self) -> dict[str, Json]:
        return {worker["name"]: worker for worker in self.deployment.status().get("workers", ())}

    def all_up(self) -> bool:
        return bool(self.workers()) and all(worker["phase"] == "up" for worker in self.workers().values())

    def start(self) -> Supervised:
        self.deployment.up()
        return self.wait_up()

    def wait_up(self) -> Supervised:
        wait_until(self.all_up, 60, "all workers up")
        for peer in self.peers:
            peer.known_pid = peer.pid()
        return self

    def rank(self, name: str) -> int:
        """The process of its first rank."""
        return int(next(rank["id"]["pid"] for rank in self.workers()[name]["ranks"] if rank["rank"] == 0))

    def recover(self) -> None:
        for worker in self.workers().values():
            for process in worker["processes"]:
                signal_to(process["id"]["pid"], signal.SIGCONT)
        self.wait_up()
        for peer in self.peers:
            peer.reset()

    def close(self) -> None:
        for peer in self.peers:
            peer.client.close()
        self.deployment.close()


def signal_to(pid: int, number: int) -> None:
    """Sends it; nothing when the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class GatewayProcess:
    """`tightrank gateway` over `workers` (entries of gateway.workers) or `supervisors` (URLs)."""

    def __init__(self, directory: Path, workers: Sequence[Json] = (), supervisors: Sequence[str] = (), **settings: Any) -> None:
        self.port, self.log_file = free_ports(1)[0], directory / "gateway.log"
        self.file = directory / "gateway.yaml"
        section = {"host": "127.0.0.1", "port": self.port, "workers": list(workers), "supervisors": list(supervisors)}
        self.file.write_text(json.dumps({"gateway": {**section, **settings}}))
        self.client = httpx2.Client(base_url=self.url, timeout=60, trust_env=False, verify=False)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, ready: bool = True) -> GatewayProcess:
        with open(self.log_file, "ab") as log:
            argv = [sys.executable, "-P", "-c", _MAIN, "gateway", "-c", str(self.file)]
            self.process = subprocess.Popen(argv, env=clean_env(), stdout=log, stderr=subprocess.STDOUT)
        wait_until(lambda: self.answers("/readyz" if ready else "/livez"), what=f"the gateway; its log:\n{self.output}")
        return self

    def answers(self, path: str) -> bool:
        """Whether this path says 200. Raises AssertionError when the process has ended."""
        assert self.process is not None and self.process.poll() is None, self.output
        try:
            return self.client.get(path).status_code == 200
        except httpx2.TransportError:
            return False

    @property
    def output(self) -> str:
        return self.log_file.read_text(errors="replace")[-6000:] if self.log_file.exists() else ""

    def status(self) -> Json:
        return dict(self.client.get("/status").json())

    def post(self, path: str, body: Any, **keywords: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **keywords)

    def stop(self) -> int:
        """SIGTERM: its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        end(self.process)
        self.client.close()


def digest(prompt: str) -> str:
    """The first word of an answer: only a prefill side can tell it."""
    return hashlib.sha256(repr(list(prompt.encode())).encode()).hexdigest()[:8]


def completion(prompt: str = "hello", tokens: int = 4, **more: Any) -> Json:
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **more}


def chat(text: str = "hello", tokens: int = 4, **more: Any) -> Json:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


def events(response: httpx2.Response) -> Iterator[tuple[float, str]]:
    """(time, data) of each SSE event of a streamed answer."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield time.monotonic(), line[6:]
