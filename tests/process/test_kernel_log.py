"""A real kill by the kernel's OOM killer, in a memory cgroup of its own, and what is said of it."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import wait_until
from tightrank.diagnose import ExitInfo, diagnose
from tightrank.readers.kernel import KernelLog
from tightrank.records import Line

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
