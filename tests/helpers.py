"""What tests of all tiers use: commands run to their end, waiting for something to become true, processes, ports."""
from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUPERVISOR, INJECT = ROOT / "supervisor", ROOT / "adapter" / "inject"
FAKE_ENGINE = ROOT / "tests" / "fakes" / "engine.py"
T = TypeVar("T")
Proves = Callable[..., None]        # the fixture `proves` of conftest.py


def wait_until(predicate: Callable[[], T], timeout: float = 30.0, what: str = "") -> T:
    """The first true answer of `predicate`, asked every 10 ms. Fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.01)
    return answer


def run_command(argv: Sequence[str | os.PathLike[str]], *, timeout: float = 60.0, env: Mapping[str, str] | None = None,
                cwd: Path | None = None, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end with `env` laid over ours, its text captured; any exit code is returned."""
    return subprocess.run([os.fspath(part) for part in argv], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})}, cwd=cwd, input=input, check=False)


def tightrank(*arguments: str, timeout: float = 60.0, env: Mapping[str, str] | None = None,
              cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`tightrank ARGUMENTS` of this checkout, run to its end."""
    command = "import sys; from tightrank.cli import main; sys.exit(main())"
    return run_command([sys.executable, "-P", "-c", command, *arguments], timeout=timeout, cwd=cwd,
                       env={"PYTHONPATH": str(SUPERVISOR), **(env or {})})


def free_ports(count: int) -> list[int]:
    """Different free ports, below those of outgoing connections, of which one may come before we listen."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(10000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def session_pids(session: int) -> list[int]:
    """The processes of a session (a process group leader's pid), zombies left out."""
    return [pid for pid, state, _, found in processes() if found == session and state != "Z"]


def processes() -> Iterator[tuple[int, str, int, int]]:
    """(pid, state, parent, session) of all processes that can be seen."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            yield int(entry.name), state, int(parent), int(session)


def kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass
