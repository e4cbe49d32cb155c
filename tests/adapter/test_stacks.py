"""The stacks of a process on demand: whatever it does, and whatever it does with signals and faulthandler itself."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import INJECT, run_command, wait_until

sys.path.insert(0, str(INJECT))
from tightrank_adapter import wire

BEGIN = """
import faulthandler, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from tightrank_adapter import stacks, wire
def waits_for_ever():
    print("ready", flush=True)
    {body}
{before}
stacks.arm(sys.argv[2])
{after}
waits_for_ever()
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(spawn: Start, tmp_path: Path) -> Start:
    def run(body: str, before: str = "", after: str = "") -> subprocess.Popen[bytes]:
        code = BEGIN.format(body=body, before=before, after=after)
        process = spawn([sys.executable, "-I", "-c", code, str(INJECT), str(tmp_path)], stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process
    return run


def dumped(directory: Path, pid: int, times: int = 1) -> str:
    path = Path(wire.stacks_path(str(directory), pid))
    wait_until(lambda: path.read_text().count("most recent call first") >= times, 20, f"{times} stacks in {path}")
    return path.read_text()


@pytest.mark.parametrize("body", [
    "while True: pass", "threading.Lock().acquire() and None; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "time.sleep(3600)", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(3600)"])
def test_a_process_that_hangs_in_python_or_in_the_kernel_writes_its_stacks(start: Start, tmp_path: Path, body: str) -> None:
    process = start(body)
    for times in (1, 2):
        os.kill(process.pid, wire.STACK_SIGNAL)
        assert "waits_for_ever" in dumped(tmp_path, process.pid, times)
    assert process.poll() is None
    assert Path(wire.stacks_path(str(tmp_path), process.pid)).stat().st_mode & 0o777 == 0o600


def test_all_threads_are_there(start: Start, tmp_path: Path) -> None:
    other = "def other(): time.sleep(3600)\nthreading.Thread(target=other, daemon=True).start()"
    process = start("time.sleep(3600)", after=other)
    os.kill(process.pid, wire.STACK_SIGNAL)
    assert "in other" in dumped(tmp_path, process.pid, 2)


def test_a_handler_that_was_there_runs_too(start: Start, tmp_path: Path) -> None:
    theirs = "signal.signal(wire.STACK_SIGNAL, lambda *_: os.write(1, b'theirs\\n'))"
    process = start("while True: time.sleep(0.01)", before=theirs)
    os.kill(process.pid, wire.STACK_SIGNAL)
    assert "waits_for_ever" in dumped(tmp_path, process.pid)
    assert process.stdout is not None and process.stdout.readline() == b"theirs\n"


def test_faulthandlers_own_reports_still_go_where_they_went(start: Start, tmp_path: Path) -> None:
    process = start("signal.raise_signal(signal.SIGSEGV)", before="faulthandler.enable()")
    assert process.wait(20) == -signal.SIGSEGV
    assert process.stderr is not None and b"Segmentation fault" in process.stderr.read()
    assert Path(wire.stacks_path(str(tmp_path), process.pid)).read_text() == ""


def test_a_forked_child_that_arms_itself_has_a_file_of_its_own(start: Start, tmp_path: Path) -> None:
    process = start("time.sleep(3600)", after=f"if os.fork() == 0: stacks.arm({str(tmp_path)!r})")
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"      # the other one of the two
    child, = (pid for path in tmp_path.glob("stacks-*") if (pid := int(path.name[7:])) != process.pid)
    os.kill(child, wire.STACK_SIGNAL)
    dumped(tmp_path, child)
    assert Path(wire.stacks_path(str(tmp_path), process.pid)).read_text() == ""


def test_a_directory_that_takes_no_file_ends_nothing(tmp_path: Path) -> None:
    code = BEGIN.format(body="", before="", after="")
    done = run_command([sys.executable, "-I", "-c", code, INJECT, tmp_path / "none"])
    assert done.returncode == 0 and "stacks cannot be written" in done.stderr
