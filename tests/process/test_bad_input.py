"""`tightrank up` with something wrong: one clear line, exit 78, nothing started."""
from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from helpers import processes

Change = Callable[[dict[str, Any], Path], None]


def taken_port(body: dict[str, Any], directory: Path) -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    body["_holder"] = holder
    body["workers"][0]["port"] = holder.getsockname()[1]


def release(directory: Path, version: str) -> str:
    """A Python whose environment says that vLLM of `version` is installed."""
    packages = directory / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / f"vllm-{version}.dist-info").mkdir(parents=True)
    (packages / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (directory / "venv" / "bin").mkdir()
    (directory / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    program = directory / "venv" / "bin" / "vllm"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return str(program)


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "unknown-key": (lambda body, _: body.update(gaurd={}), ("gaurd", "guard", "tightrank.yaml:")),
    "out-of-range": (lambda body, _: body["http"].update(port=70000), ("http.port", "70000", "65535")),
    "size-without-unit": (lambda body, _: body["guard"].update(floor="lots"), ("guard.floor", "lots")),
    "no-model": (lambda body, directory: body.update(model=str(directory / "nowhere")), ("model", "nowhere")),
    "port-taken": (taken_port, ("port",)),
    "state-not-writable": (lambda body, directory: body.update(state_directory=str(directory / "tightrank.yaml" / "x")),
                           ("state_directory",)),
    "no-engine": (lambda body, _: body.update(command=["/nowhere/vllm", "serve"]), ("/nowhere/vllm",)),
    "no-hook": (lambda body, directory: body.update(command=[release(directory, "0.20.2"), "serve"]),
                ("hooks", "0.20.2", "0.28")),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_exit_78_and_nothing_started(tmp_path: Path, name: str) -> None:
    change, words = CASES[name]
    deployment = Deployment(tmp_path)
    body = json.loads(deployment.file.read_text())
    change(body, tmp_path)
    holder = body.pop("_holder", None)
    deployment.file.write_text(json.dumps(body, indent=1))
    done = deployment.run("up")
    assert done.returncode == 78, done.stderr
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr
    assert not (deployment.state / "run").exists()
    assert not [pid for pid, *_ in processes() if str(tmp_path) in _command(pid)]
    if holder is not None:
        holder.close()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    deployment.file.write_text("name: test\nworkers: [\n  - x: {\n")
    done = deployment.run("up")
    assert done.returncode == 78 and done.stderr.count("\n") == 1
    assert f"{deployment.file}:" in done.stderr


