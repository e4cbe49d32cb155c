"""The preflight before real starts: what fails starts nothing, what is unknown goes on, --force starts in spite of it."""
from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from deployment import Make, gone
from helpers import tightrank
from preflight import write_safetensors

PREFLIGHT_SECONDS = 15          # 1 s on quiet cores; these are busy


def cut_off(directory: Path) -> None:
    path = directory / "model" / "model.safetensors"
    write_safetensors(path, {"a.weight": ("BF16", [64, 64])})
    os.truncate(path, path.stat().st_size - 1)


def test_what_is_unknown_does_not_keep_a_start_back(make: Make) -> None:
    """The fake engine is a program of its own: of what it reads nothing can be told."""
    deployment = make().up()
    deployment.wait_phase("up")
    said = deployment.output.splitlines()
    assert "tightrank: unknown: engine package, architecture, flags: command is a program of its own: which Python it runs " \
        "cannot be told" in said
    assert any(line.startswith("tightrank: warn: model weights:") and "has no weights" in line for line in said)
    assert not any(line.startswith("tightrank: pass") for line in said)
    assert deployment.terminate() == 0


def test_what_fails_starts_nothing(make: Make, tmp_path: Path) -> None:
    deployment = make()
    cut_off(tmp_path)
    started = time.monotonic()
    done = deployment.run("up")
    assert done.returncode == 78 and time.monotonic() - started < PREFLIGHT_SECONDS
    assert "tightrank: model-unreadable: " in done.stderr and "model.safetensors is cut off: " in done.stderr
    assert not deployment.state.exists()
    assert deployment.run("check").returncode == 78


def test_force_starts_in_spite_of_it(make: Make, tmp_path: Path) -> None:
    deployment = make()
    cut_off(tmp_path)
    deployment.start("up", "--force", "-c", str(deployment.file))
    deployment.wait_phase("up")
    assert "tightrank: model-unreadable: " in deployment.output
    assert deployment.terminate() == 0


def test_force_does_not_bind_a_port_twice(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("starting", "up")
    second = deployment.run("up", "--force", "--set", f"state_directory={deployment.directory}/other")
    assert second.returncode == 78 and "port-taken" in second.stderr


def test_check_tells_of_what_is_left_and_touches_nothing(make: Make) -> None:
    """The supervisor dies whole and leaves an engine: the check names its pids, and the next start ends them."""
    deployment = make(args=("--orphan",)).up()
    deployment.wait_phase("up")
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    os.kill(daemon, signal.SIGSTOP)
    assert deployment.process is not None
    deployment.process.kill()
    os.kill(daemon, signal.SIGKILL)
    deployment.process.wait(10)
    time.sleep(1)               # parent-death signals take all but the orphan
    done = tightrank("check", "--json", "-c", str(deployment.file))
    said = next(item for item in json.loads(done.stdout)["items"] if item["item"] == "processes of an earlier run")
    left = {pid for pid in tree if not gone([pid])()}
    assert said["status"] == "warn" and left == {int(pid) for pid in re.findall(r"\d+", said["sentence"].partition("pid ")[2])}
    deployment.up()
    deployment.wait_phase("up", generation=2)
    assert gone(tree)()
