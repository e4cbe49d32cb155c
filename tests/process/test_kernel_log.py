"""A real kill by the kernel's OOM killer, in a memory cgroup of its own, and what is said of it."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import wait_until
from tightrank.diagnose import ExitInfo, diagnose
from tightrank.generation import Generation
from tightrank.readers.kernel import KernelLog
from tightrank.records import Line, WorkerReading, WorkerSpec

GROWS = "import sys; sys.stdin.readline(); b = bytearray(200 << 20); b[::4096] = b'x' * len(b[::4096])"


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 40 MiB, of either version."""
    root = Path("/sys/fs/cgroup")
    first = root / "memory" if (root / "memory").is_dir() else root
    path = first / f"tightrank-test-{os.getpid()}"
    try:
        path.mkdir()
        limit = next(path / name for name in ("memory.limit_in_bytes", "memory.max") if (path / name).exists())
        limit.write_text(str(40 << 20))
    except (OSError, StopIteration) as error:
        pytest.skip(f"no memory cgroup can be made here: {error!r}")
    yield path
    wait_until(lambda: not (path / "cgroup.procs").read_text().strip())
    path.rmdir()


def test_a_kill_in_a_container_is_told_from_the_kernel_s_log(group: Path) -> None:
    log = KernelLog()
    if log.why:
        pytest.skip(log.why)
    process = subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE)
    (group / "cgroup.procs").write_text(str(process.pid))
    process.communicate(b"go\n")
    assert process.returncode == -9
    lines: list[Line] = []
    wait_until(lambda: lines.extend(log.read()) or any(f"pid={process.pid}," in line.text for line in lines))
    ours = diagnose("vllm", lines, ExitInfo(-9, False, pids=frozenset({process.pid})))
    assert (ours.cause, ours.confidence, ours.numbers) == ("killed-by-oom", "certain", {"pid": process.pid})
    assert "CONSTRAINT_MEMCG" in ours.summary
    assert diagnose("vllm", lines, ExitInfo(-9, False, pids=frozenset({os.getpid()}))).cause == "engine-exited"
    log.close()


@pytest.fixture
def generation(tmp_path: Path) -> Iterator[Generation]:
    """Of an engine that sleeps until it is killed."""
    spec = WorkerSpec(
        name="w", engine="vllm", role="both", argv=("sleep", "60"), env={}, host="127.0.0.1", port=1, model="/m",
        served_model="m", tensor_parallel=1, pipeline_parallel=1, devices=(), hooks={}, line=None, context_tokens=None,
        schedule=(), drain_seconds=1, start_stall_seconds=1, api_key=None, generation=1, run_directory=str(tmp_path / "w-1"))
    started = Generation(spec, os.environ, 0, lambda *_: None, time.monotonic())
    yield started
    started.launched.process.kill()
    started.launched.process.wait()
    started.close()


def killed(generation: Generation) -> None:
    generation.launched.process.kill()
    generation.launched.process.wait()
    generation.observe(WorkerReading("w", 1, generation.launched.main, (), (), (), ()), None, time.monotonic())


def test_a_generation_keeps_what_is_about_its_own_processes(generation: Generation) -> None:
    def kill_of(pid: int) -> Line:
        return Line(time.monotonic(), 0.0, "kernel", f"oom-kill:constraint=CONSTRAINT_NONE,task=sleep,pid={pid},uid=0")

    generation.hear_kernel([kill_of(os.getpid())])
    assert not generation.lines
    generation.hear_kernel([kill_of(generation.launched.main.pid)])
    killed(generation)
    assert generation.post_mortem(True).cause == "killed-by-oom"


def test_a_generation_remembers_the_memory_of_the_last_minute(generation: Generation) -> None:
    now = time.monotonic()
    generation.clues.remember_memory(1 << 20, None, now - 70)      # too long ago
    generation.clues.remember_memory(9 << 30, 5 << 30, now - 1)
    generation.clues.remember_memory(None, 5 << 30, now)           # the guard's lowest is an old one
    killed(generation)
    assert generation.post_mortem(True).cause == "unknown"
    generation.clues.remember_memory(8 << 30, 90 << 20, now)       # it fell between two looks of ours
    found = generation.post_mortem(True)
    assert (found.cause, found.confidence, found.numbers) == ("killed-by-oom", "likely", {"lowest_available_bytes": 90 << 20})
