"""A real engine started by hand with the adapter and no supervisor: its hellos, records and answers."""
from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import INJECT, kill, session_pids, wait_until
from tightrank_adapter import pages, wire

CACHE = Path(os.environ.get("TIGHTRANK_CACHE", Path.home() / ".cache" / "tightrank"))
READY_SECONDS = 240  # vLLM imports for 20 s on quiet cores, 65 s on busy ones
ADAPTER_VARIABLES = ("TIGHTRANK_ADAPTER", "TIGHTRANK_RUN", "PYTHONPATH")


def interpreter(engine: str) -> str:
    """The Python of the engine's environment as scripts/setup makes it."""
    return str(CACHE / "envs" / engine / "bin" / "python")


def with_settings(path: Path, change: str, argv: Sequence[str]) -> Path:
    """A program at `path` that changes the adapter's settings, then becomes `argv`: `change` edits `settings` (a dict)."""
    path.write_text("#!/bin/sh\n"
                    f"{interpreter('sglang')} -I - <<'END'\n"
                    "import json, os\n"
                    "path = os.environ['TIGHTRANK_ADAPTER'] + '/settings.json'\n"
                    "settings = json.load(open(path))\n"
                    f"{change}\n"
                    "json.dump(settings, open(path, 'w'))\nEND\n"
                    f'exec {" ".join(argv)} "$@"\n')
    path.chmod(0o700)
    return path


class RawEngine:
    """One engine process tree in its own session, and the far end of its adapter.

    `settings` None starts it without the adapter. `python_path` goes behind adapter/inject.
    """

    def __init__(self, directory: Path, argv: Sequence[str], port: int, settings: wire.Settings | None, *,
                 env: Mapping[str, str] | None = None, python_path: str = "") -> None:
        self.directory, self.port = directory, port
        self.records: list[Any] = []
        self.control: pages.ControlWriter | None = None
        directory.mkdir(mode=0o700)
        environment = {key: value for key, value in os.environ.items() if key not in ADAPTER_VARIABLES}
        path = [python_path] if python_path else []
        if settings is not None:
            self._listen(settings)
            path.insert(0, str(INJECT))
            environment |= {"TIGHTRANK_ADAPTER": str(directory), "TIGHTRANK_RUN": "test", "SPT_NOENV": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **(env or {})}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(list(argv), env=environment, stdout=log, stderr=subprocess.STDOUT,
                                            cwd=directory, start_new_session=True)

    @property
    def log(self) -> Path:
        return self.directory / "engine.log"

    def _listen(self, settings: wire.Settings) -> None:
        wire.write_settings(str(self.directory), settings)
        if "line" in settings.hooks:
            self.control = pages.ControlWriter(str(self.directory))
            self.control.publish(settings.line["budget"])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        descriptor = os.open(self.directory, os.O_PATH)
        self._socket.bind(wire.socket_address(str(self.directory), descriptor))
        os.close(descriptor)
        self._socket.settimeout(0.5)
        threading.Thread(target=self._receive, args=(self._socket,), daemon=True).start()

    def _receive(self, receiver: socket.socket) -> None:
        while True:
            try:
                self.records.append(wire.decode(receiver.recv(65536)))
            except TimeoutError:
                continue
            except OSError:  # closed by stop
                return

    def wait_ready(self) -> RawEngine:
        wait_until(lambda: self.process.poll() is not None or self._healthy(), READY_SECONDS, f"{self.log} ready")
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return self

    def _healthy(self) -> bool:
        try:
            return self.request("GET", "/health", timeout=30)[0] == 200
        except OSError:
            time.sleep(0.2)
            return False

    def request(self, method: str, path: str, body: Any = None, timeout: float = 180) -> tuple[int, Any]:
        """Status and the JSON or text of one HTTP exchange."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def hellos(self) -> list[wire.Hello]:
        return [wire.read_json(str(path), wire.Hello) for path in sorted(self.directory.glob("hello-*.json"))]

    def hello(self, role: str) -> wire.Hello:
        """The one hello of `role`."""
        found = [each for each in self.hellos() if each.role == role]
        assert len(found) == 1, f"{role}: {self.hellos()}"
        return found[0]

    def steps(self) -> list[wire.Step]:
        return [record for record in list(self.records) if isinstance(record, wire.Step)]

    def faults(self) -> list[wire.Fault]:
        return [record for record in list(self.records) if isinstance(record, wire.Fault)]

    def steps_until(self, before: int, tokens: int, rank: int = 0) -> list[wire.Step]:
        """The steps of `rank` after the first `before` of them, as soon as they hold `tokens` new tokens."""
        def enough() -> list[wire.Step]:
            found = [step for step in self.steps() if step.rank == rank][before:]
            return found if sum(step.rows for step in found) >= tokens else []
        return wait_until(enough, 30, f"records of {tokens} tokens")

    def stop(self) -> None:
        """Ends the whole session and the record thread."""
        for pid in session_pids(self.process.pid):
            kill(pid)
        self.process.wait(timeout=30)
        wait_until(lambda: not session_pids(self.process.pid), 30, "the session is gone")
        if hasattr(self, "_socket"):
            self._socket.close()
            if self.control is not None:
                self.control.close()
