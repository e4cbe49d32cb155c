"""compose.yaml with compose.cpu.yaml as one project, and what it says of itself."""
from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import docker_daemon
import pytest
from helpers import free_ports, wait_until

FILES = ("compose.yaml", "compose.cpu.yaml")
PROJECT = "tightrank-test"
START_SECONDS = 480           # two engines at once on two busy cores; 25 s on quiet ones
T = TypeVar("T")


class Stack:
    """The project. `more`: compose files over ours for one call."""

    def __init__(self, base: str, wheels: str, engine: str = "sglang") -> None:
        self.environment = {"COMPOSE_PROJECT_NAME": PROJECT, "ENGINE": engine, "BASE": base, "GATEWAY_BASE": base,
                            "WHEELS": wheels}
        self.compose("build")
        self.port, *others = free_ports(4)               # after the build, which takes minutes
        names = ("WORKER_PORT", "PREFILL_PORT", "DECODE_PORT")
        self.environment |= {"PORT": str(self.port), **dict(zip(names, map(str, others), strict=True))}

    def compose(self, *words: str, more: tuple[Path, ...] = (), ok: bool = True, timeout: float = 900) -> str:
        files = [word for file in (*FILES, *map(str, more)) for word in ("-f", file)]
        return docker_daemon.run(docker_daemon.COMPOSE, *files, *words, env=self.environment, ok=ok, timeout=timeout).stdout

    def down(self) -> None:
        """Nothing is left but the images."""
        self.compose("--profile", "worker", "--profile", "pd", "down", "-v", "-t", "10", ok=False)

    def running(self) -> set[str]:
        """The services that have a running container."""
        return set(docker_daemon.run("docker", "ps", "--filter", f"label=com.docker.compose.project={PROJECT}", "--format",
                                     '{{.Label "com.docker.compose.service"}}').stdout.split())

    def inspect(self, service: str) -> dict[str, Any]:
        name = docker_daemon.run("docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}",
                          "--filter", f"label=com.docker.compose.service={service}").stdout.strip()
        found: dict[str, Any] = json.loads(docker_daemon.run("docker", "inspect", name).stdout)[0]
        return found

    def state(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = self.inspect(service)["State"]
        return found

    def run_in(self, service: str, *argv: str, ok: bool = True) -> str:
        return docker_daemon.run("docker", "exec", self.inspect(service)["Id"], *argv, ok=ok).stdout

    def wait(self, predicate: Callable[[], T], seconds: float, what: str) -> T:
        """As wait_until; a failure shows what gateway and containers say."""
        def calm() -> T:
            time.sleep(0.3)
            return predicate()
        try:
            return wait_until(calm, seconds, what)
        except pytest.fail.Exception as error:
            raise AssertionError(f"{error}\n{self.gateway('/status')}\n{self.logs()}") from None

    def wait_healthy(self, *services: str) -> None:
        """As Docker sees it."""
        self.wait(lambda: all(self.state(service).get("Health", {}).get("Status") == "healthy" for service in services),
                  START_SECONDS, f"{services} are healthy")

    def wait_cause(self, cause: str) -> dict[str, Any]:
        """The worker as the gateway shows it, once it has that cause."""
        def found() -> dict[str, Any] | None:
            workers = (self.gateway("/status")[1] or {}).get("workers", [])
            return next((worker for worker in workers if worker["cause"] == cause), None)
        worker = self.wait(found, START_SECONDS, f"{cause} at the gateway")
        assert worker is not None
        return worker

    def logs(self) -> str:
        return self.compose("logs", "--tail", "40", ok=False)[-6000:]

    def supervisor(self, service: str, path: str) -> Any:
        """What a supervisor answers, asked from within its container."""
        code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9470{path}').read().decode())"
        return json.loads(self.run_in(service, "/opt/tightrank/bin/python", "-c", code))

    # --- as a client of the gateway -----------------------------------------------------------------------------------

    def gateway(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON; (0, None) when nobody answers."""
        try:
            with self.send("GET" if body is None else "POST", path, body) as response:
                return response.status, json.loads(response.read())
        except OSError:
            return 0, None

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def chat(self) -> tuple[int, Any]:
        return self.gateway("/v1/chat/completions", {"model": "model", "max_tokens": 4,
                                                     "messages": [{"role": "user", "content": "hello"}]})
