"""What a fake engine leaves when it is killed, and that nothing of it is there in the next generation or at the end."""
from __future__ import annotations

import os
import signal
import time
import zlib
from pathlib import Path

import pytest
from deployment import Deployment, Make
from helpers import wait_until

SHM = Path("/dev/shm")


def left(deployment: Deployment, prefix: str) -> list[str]:
    """Names in /dev/shm and files in TMPDIR of this deployment's engines."""
    base = Path(deployment.env["TMPDIR"])
    return [path.name for path in SHM.iterdir() if path.name.startswith(prefix)] + [path.name for path in base.iterdir()]


def sysv(prefix: str) -> set[str]:
    """The System V segments of its engines, as tests/fakes/fake_ranks.py makes them."""
    size = str(4096 * (1 + zlib.crc32(prefix.encode()) % 4096))
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:] if line.split()[3] == size}


@pytest.fixture
def prefix() -> str:
    """Not of the names that engines give: it is known by who maps it."""
    return f"of_a_library_{os.getpid()}_"


@pytest.fixture
def littering(make: Make, prefix: str, tmp_path: Path) -> Deployment:
    deployment = make(args=("--litter", prefix, "--children", "2", "--orphan"), tensor_parallel=2)
    base = Path(f"/tmp/h{os.getpid()}")            # a socket's path is short
    base.mkdir(exist_ok=True)
    deployment.env["TMPDIR"] = str(base)
    yield deployment
    deployment.close()
    assert list(base.iterdir()) == []
    base.rmdir()


def up(deployment: Deployment, prefix: str, generation: int) -> list[str]:
    """Its litter, once it was looked at."""
    deployment.wait_phase("up", generation=generation)
    time.sleep(2.5)
    found = left(deployment, prefix)
    assert len(found) == 3, found                  # two ranks' segments, one temporary directory
    return found


@pytest.mark.parametrize("victim", ["main", "worker", "daemon"])
def test_nothing_of_a_generation_that_was_killed_is_there_in_the_next(littering: Deployment, prefix: str, victim: str) -> None:
    littering.up()
    first = up(littering, prefix, 1)
    segments = sysv(prefix)
    assert len(segments) == 2
    if victim == "daemon":
        os.kill(littering.status()["guard"]["daemon_pid"], signal.SIGKILL)
    else:
        os.kill(littering.pid(victim), signal.SIGKILL)
    second = up(littering, prefix, 2)
    assert not set(first) & set(second) and len(sysv(prefix) - segments) == len(sysv(prefix)) == 2
    assert littering.terminate() == 0
    assert left(littering, prefix) == [] and sysv(prefix) == set()
    sentences = [event["sentence"] for event in littering.events("hygiene")]
    assert len([each for each in sentences if each.count(prefix) == 2 and "2 System V" in each]) == 2, sentences


def test_guard_and_daemon_die_together_and_the_next_supervisor_removes_it(littering: Deployment, prefix: str) -> None:
    littering.up()
    first = up(littering, prefix, 1)
    daemon = littering.status()["guard"]["daemon_pid"]
    os.kill(daemon, signal.SIGSTOP)
    assert littering.process is not None
    littering.process.kill()
    os.kill(daemon, signal.SIGKILL)
    littering.process.wait(10)
    littering.up()
    second = up(littering, prefix, 2)
    assert not set(first) & set(second)
    assert littering.terminate() == 0 and left(littering, prefix) == []


def test_the_guards_death_leaves_nothing(littering: Deployment, prefix: str) -> None:
    littering.up()
    up(littering, prefix, 1)
    assert littering.process is not None
    littering.process.kill()
    wait_until(lambda: left(littering, prefix) == [], 30)


def test_a_segment_that_another_process_holds_stays(littering: Deployment, prefix: str) -> None:
    littering.up()
    up(littering, prefix, 1)
    name = next(path for path in SHM.iterdir() if path.name.startswith(prefix))
    with name.open("rb"):
        assert littering.terminate() == 0
        assert name.exists()
    assert any("left alone" in event["sentence"] and name.name in event["sentence"] for event in littering.events("hygiene"))
    name.unlink()
