"""The guard as a real process: the tree it keeps, the signals it passes on, the floor under real memory pressure."""
from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from common import UNKNOWN
from helpers import ROOT, SUPERVISOR, kill, wait_until
from memory import MemAvailable
from tightrank_adapter import pages, wire

MIB = 1 << 20
HOG = [sys.executable, str(ROOT / "tests" / "fakes" / "hog.py")]
ROOMS = SUPERVISOR / "tightrank" / "guard"
GUARD = [sys.executable, "-I", "-S", "-B", str(ROOMS)]

# A daemon: writes what happens to it to a log, starts what it is told, ends as it is told.
STAND_IN = """
import json, os, signal, subprocess, sys, time
options = json.loads(sys.argv[1])
def log(text):
    with open(options["log"], "a") as file:
        file.write(text + "\\n")
def heard(number, frame):
    log(signal.Signals(number).name)
    code = options["exits"].get(signal.Signals(number).name)
    if code is not None:
        os._exit(code)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), heard)
for argv in options["engines"]:
    subprocess.Popen(argv, start_new_session=True)
log("started")
while True:            # no signal.pause: stopped in it, continued and signalled at once, it would sleep on
    time.sleep(0.1)
"""
# An engine: a child, an orphan in a session of its own whose parent is gone, and the main process.
TREE = ["sh", "-c", "sleep 1001 & (setsid sleep 1002 &) ; exec sleep 1003"]
TREE_NAMES = ("sleep", "sleep", "sleep")


class Page(NamedTuple):
    """guard.page, in the order of guard/__main__.py's docstring."""
    pid: int
    start_time: int
    monotonic_ns: int
    samples: int
    available_bytes: int
    lowest_available_bytes: int
    floor_bytes: int
    stops: int
    last_stop_monotonic_ns: int
    daemon_pid: int
    daemon_starts: int
    locked: int
    daemon_beat_age_ns: int
    dry_stops: int


class Guarded:
    """One running guard with its directory, its daemon's log and everything below it."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], log: Path, stderr: Path) -> None:
        self.directory, self.process, self.log, self.stderr = directory, process, log, stderr

    def page(self) -> Page:
        def read() -> Page | None:
            try:
                return Page(*pages.Page(str(self.directory / "guard.page"), "14Q", False).read())
            except (OSError, ValueError, wire.WireError):
                return None
        return wait_until(read, what="guard.page is written")

    def tree(self) -> list[psutil.Process]:
        """Living descendants, the daemon among them."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
            return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    def engines(self) -> list[psutil.Process]:
        daemon = self.page().daemon_pid
        return [each for each in self.tree() if each.pid != daemon]

    def wait_for_engines(self, *names: str) -> list[psutil.Process]:
        def there() -> list[psutil.Process]:
            try:
                found = self.engines()
                return found if sorted(each.name() for each in found) == sorted(names) else []
            except psutil.NoSuchProcess:
                return []
        return wait_until(there, what=f"engine processes {names}")

    def wait_for_no_engines(self) -> None:
        wait_until(lambda: not self.engines(), what="no engine process is left")

    def events(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_for_event(self, event: str, count: int = 1) -> None:
        wait_until(lambda: self.events().count(event) >= count, what=f"{event} x {count}")

    def stops(self) -> list[dict[str, Any]]:
        path = self.directory / "guard.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def exit_code(self) -> int:
        return self.process.wait(timeout=60)

    def said(self) -> str:
        return self.stderr.read_text()


Start = Callable[..., Guarded]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts guards. At the end everything that carries their mark in its environment is killed."""
    mark = uuid.uuid4().hex

    def begin(*, engines: tuple[list[str], ...] = (TREE,), exits: dict[str, int] | None = None, floor: int = 0,
              daemon: list[str] | None = None, dry_run: bool = False, rooms: Path = ROOMS, **popen: Any) -> Guarded:
        directory = tmp_path / uuid.uuid4().hex
        directory.mkdir(mode=0o700)
        log = directory / "daemon.log"
        options = {"log": str(log), "engines": engines, "exits": {"SIGTERM": 0, "SIGUSR2": 0, **(exits or {})}}
        orders = write_orders(directory, floor_bytes=floor, dry_run=dry_run,
                              daemon_argv=daemon or [sys.executable, "-S", "-c", STAND_IN, json.dumps(options)])
        with (directory / "stderr").open("wb") as stderr:
            process = subprocess.Popen([*GUARD[:-1], str(rooms), str(orders)], stderr=stderr, start_new_session=True,
                                       env={**os.environ, "GUARD_TEST": mark}, **popen)
        return Guarded(directory, process, log, directory / "stderr")

    yield begin
    for _ in range(3):
        for each in psutil.process_iter():
            try:
                if f"GUARD_TEST={mark}".encode() in Path(f"/proc/{each.pid}/environ").read_bytes():
                    kill(each.pid)
            except OSError:
                continue


def write_orders(directory: Path, **values: Any) -> Path:
    orders = {"schema": 1, "daemon_argv": ["true"], "run_directory": str(directory), "floor_bytes": 0, "priority": 0,
              "lock_descriptor": None, "dry_run": False, **values}
    path = directory / "guard.json"
    path.write_text(json.dumps(orders))
    return path


def available_bytes() -> int:
    return MemAvailable().read(0)


# --- the tree --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [0, 69, 75, 78])
def test_final_exit_code_of_the_daemon_ends_all_and_is_passed_on(start: Start, code: int) -> None:
    guarded = start(exits={"SIGUSR1": code})
    engines = guarded.wait_for_engines(*TREE_NAMES)
    os.kill(guarded.page().daemon_pid, signal.SIGUSR1)
    assert guarded.exit_code() == code
    assert not any(each.is_running() for each in engines)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGUSR1], ids=["killed", "exit-70"])
def test_dead_daemon_takes_the_engines_with_it_and_is_started_again(start: Start, end: int) -> None:
    guarded = start(exits={"SIGUSR1": 70})
    engines = guarded.wait_for_engines(*TREE_NAMES)
    first = guarded.page().daemon_pid
    os.kill(first, end)
    wait_until(lambda: not any(each.is_running() for each in engines), what="engines of the dead daemon are gone")
    guarded.wait_for_event("started", 2)
    again = wait_until(lambda: (page := guarded.page()).daemon_starts == 2 and page)
    assert again.daemon_pid != first
    guarded.wait_for_engines(*TREE_NAMES)


def test_back_off_grows_and_sigterm_in_it_ends_with_75(start: Start) -> None:
    guarded = start(daemon=["sh", "-c", "exit 1"])
    wait_until(lambda: "again in 2 s" in guarded.said())
    assert "again in 0.5 s" in guarded.said() and "again in 1 s" in guarded.said()
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.exit_code() == 75


def test_daemon_that_cannot_be_executed_is_a_configuration_error(start: Start) -> None:
    guarded = start(daemon=["/nonexistent/daemon"])
    assert guarded.exit_code() == 78
    assert "/nonexistent/daemon" in guarded.said()


def test_dead_guard_is_told_to_the_daemon(start: Start) -> None:
    guarded = start()
    guarded.wait_for_event("started")
    guarded.process.kill()
    guarded.wait_for_event("SIGUSR2")


def test_orphans_are_reaped(start: Start) -> None:
    guarded = start(engines=(["sh", "-c", "for i in 1 2 3 4; do (setsid sleep 2 &) ; done; exec sleep 1003"],))
    orphans = guarded.wait_for_engines(*["sleep"] * 5)
    guarded.wait_for_engines("sleep")
    assert sum(each.is_running() for each in orphans) == 1
    guardian = psutil.Process(guarded.process.pid)
    wait_until(lambda: len(guardian.children()) == 1, what="no zombie of the guard is left, only the daemon")


def test_daemon_starts_clean_of_what_the_guard_has(start: Start) -> None:
    guarded = start()
    guarded.wait_for_event("started")
    daemon = guarded.page().daemon_pid
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{daemon}/status").read_text().splitlines())
    assert int(status["SigBlk"], 16) == 0
    assert not int(status["SigIgn"], 16) >> (signal.SIGHUP - 1) & 1
    assert os.sched_getscheduler(daemon) == os.SCHED_OTHER and os.getpriority(os.PRIO_PROCESS, daemon) == 0
    assert Path(f"/proc/{daemon}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    assert os.getsid(daemon) == daemon
    assert Path(f"/proc/{guarded.process.pid}/comm").read_text() == "tightrank-guard\n"


def test_lock_is_held_by_the_guard_alone(tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    orders = write_orders(tmp_path, daemon_argv=["sleep", "1004"], lock_descriptor=descriptor)
    process = spawn([*GUARD, orders], pass_fds=[descriptor])
    os.close(descriptor)
    children = wait_until(lambda: [each for each in psutil.Process(process.pid).children() if each.name() == "sleep"])
    held = f"{tmp_path}/lock"
    assert held in {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert held not in {os.readlink(path) for path in Path(f"/proc/{children[0].pid}/fd").iterdir()}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75  # sleep dies of it: not a clean end


FAULT = """
import os, sys
whole = Page.write
def write(self, *values):
    if os.path.exists(os.path.join(os.path.dirname(sys.argv[1]), "fault")):
        raise RuntimeError("made up")
    whole(self, *values)
Page.write = write
"""


def test_fault_of_the_guard_itself_ends_all_with_70_and_says_where(start: Start, tmp_path: Path) -> None:
    rooms = shutil.copytree(ROOMS, tmp_path / "guard")
    with (rooms / "page.py").open("a") as file:
        file.write(FAULT)
    guarded = start(rooms=rooms)
    engines = guarded.wait_for_engines(*TREE_NAMES)
    daemon = psutil.Process(guarded.page().daemon_pid)
    (guarded.directory / "fault").touch()
    assert guarded.exit_code() == 70
    assert not any(each.is_running() for each in (daemon, *engines))
    line, *trace = guarded.said().partition("ends by a fault of its own")[2].splitlines()
    assert "RuntimeError: made up" in line
    assert any("in publish" in each for each in trace) and trace[-1] == "RuntimeError: made up"


# --- signals ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_drains(start: Start, number: signal.Signals) -> None:
    guarded = start(exits={"SIGTERM": 0, "SIGINT": 0})
    guarded.wait_for_engines(*TREE_NAMES)
    guarded.process.send_signal(number)
    assert guarded.exit_code() == 0
    assert guarded.events() == ["started", number.name]


def test_second_signal_is_passed_on_and_ends_all_after_ten_seconds(start: Start) -> None:
    guarded = start(exits={"SIGTERM": None})  # type: ignore[dict-item]  # a daemon that never ends by itself
    engines = guarded.wait_for_engines(*TREE_NAMES)
    guarded.process.send_signal(signal.SIGTERM)
    guarded.wait_for_event("SIGTERM")
    began = time.monotonic()
    guarded.process.send_signal(signal.SIGTERM)
    guarded.wait_for_event("SIGTERM", 2)
    assert guarded.exit_code() == 75
    assert time.monotonic() - began >= 10
    assert not any(each.is_running() for each in engines)


def test_daemon_that_dies_while_draining_is_not_started_again(start: Start) -> None:
    guarded = start(exits={"SIGTERM": 1})
    guarded.wait_for_engines(*TREE_NAMES)
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.exit_code() == 75
    assert guarded.events() == ["started", "SIGTERM"]


def test_hangup_is_ignored(start: Start) -> None:
    guarded = start()
    guarded.wait_for_event("started")
    guarded.process.send_signal(signal.SIGHUP)
    samples = guarded.page().samples
    wait_until(lambda: guarded.page().samples > samples + 2)
    assert guarded.events() == ["started"]


# --- the page --------------------------------------------------------------------------------------------------------

def test_page_tells_what_is_so(start: Start) -> None:
    guarded = start(floor=5 * MIB)
    guarded.wait_for_event("started")
    page = guarded.page()
    assert (page.pid, page.start_time) == (guarded.process.pid, wire.start_time(guarded.process.pid))
    assert page.floor_bytes == 5 * MIB and page.stops == 0 and page.last_stop_monotonic_ns == UNKNOWN
    assert page.lowest_available_bytes <= page.available_bytes <= psutil.virtual_memory().total
    assert page.daemon_starts == 1 and page.daemon_beat_age_ns == UNKNOWN
    beat = pages.Page(str(guarded.directory / "daemon.beat"), "Q", True)
    beat.write(time.monotonic_ns() - 5 * 10**9)
    wait_until(lambda: 5 * 10**9 <= guarded.page().daemon_beat_age_ns < 60 * 10**9, what="age of the beat")
    with (guarded.directory / "daemon.beat").open("r+b") as file:
        file.write((3).to_bytes(8, "little"))  # hangs in the middle of a beat: the last one grows old
    wait_until(lambda: 6 * 10**9 <= guarded.page().daemon_beat_age_ns < 60 * 10**9, what="age of the last whole beat")
    os.kill(page.daemon_pid, signal.SIGKILL)
    wait_until(lambda: (page := guarded.page()).daemon_starts == 2 and page.daemon_beat_age_ns == UNKNOWN)
    for path in ("guard.page", "daemon.beat"):
        assert (guarded.directory / path).stat().st_mode & 0o777 == 0o600


def test_small_footprint(start: Start) -> None:
    guarded = start()
    guarded.wait_for_event("started")
    rollup = Path(f"/proc/{guarded.process.pid}/smaps_rollup").read_text()
    pss = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    assert pss <= 16 * 1024


def drop_capabilities() -> None:
    """In the child before exec: as in a container without any, with a small memlock limit."""
    libc = ctypes.CDLL(None)
    for number in range(64):
        libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
    import resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, MIB))


def test_without_capabilities_it_locks_what_it_may_and_says_so(start: Start) -> None:
    guarded = start(preexec_fn=drop_capabilities)
    guarded.wait_for_engines(*TREE_NAMES)
    assert guarded.page().locked == 0
    said = guarded.said()
    assert "RLIMIT_MEMLOCK is 1024 KiB" in said and "CAP_SYS_NICE" in said and "CAP_SYS_RESOURCE" in said
    locked = next(line for line in Path(f"/proc/{guarded.process.pid}/status").read_text().splitlines() if "VmLck" in line)
    assert 0 < int(locked.split()[1]) <= 1024
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.exit_code() == 0


# --- the floor -------------------------------------------------------------------------------------------------------

def waiting_hog(directory: Path, name: str, size: int) -> tuple[list[str], Path]:
    """(argv, fifo) of a hog that starts when somebody writes to the fifo."""
    fifo = directory / f"fifo-{uuid.uuid4().hex}"
    os.mkfifo(fifo)
    hog = shlex.join([*HOG, "--bytes", str(size), "--seconds", "20", "--name", name])
    return ["sh", "-c", f"read _ < {shlex.quote(str(fifo))}; exec {hog}"], fifo


def begin(fifo: Path) -> None:
    """Lets the hog go; fails where a hog that is gone would make a plain open wait for ever."""
    def opened() -> int | None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None
    descriptor = wait_until(opened, what="the hog reads its fifo")
    os.write(descriptor, b"\n")
    os.close(descriptor)


@pytest.mark.parametrize("stopped", [False, True], ids=["daemon-runs", "daemon-sigstopped"])
def test_floor_kills_all_but_the_daemon_and_names_the_hog(start: Start, tmp_path: Path, stopped: bool) -> None:
    argv, fifo = waiting_hog(tmp_path, "foo) Z 1 (", 2048 * MIB)
    floor = available_bytes() - 500 * MIB
    guarded = start(engines=(TREE, argv), floor=floor)
    engines = guarded.wait_for_engines(*TREE_NAMES, "sh")
    daemon = guarded.page().daemon_pid
    if stopped:
        os.kill(daemon, signal.SIGSTOP)
    begin(fifo)
    record = wait_until(guarded.stops, what="the guard acted")[0]
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in engines))
    assert record["available_bytes"] < floor == record["floor_bytes"]
    assert record["lowest_available_bytes"] <= record["available_bytes"]
    assert {each["pid"] for each in record["killed"]} == {each.pid for each in engines}
    assert record["killed"][0]["name"] == record["hog"]["name"] == "foo) Z 1 ("
    assert record["hog"]["inside"] and record["hog"]["growth_bytes"] > 200 * MIB
    assert 0 < record["reaction_us"] < 1_000_000
    page = guarded.page()
    assert page.daemon_pid == daemon and page.daemon_starts == 1 and page.stops >= 1
    assert page.last_stop_monotonic_ns <= time.monotonic_ns()
    os.kill(daemon, signal.SIGCONT)
    guarded.process.send_signal(signal.SIGTERM)
    assert guarded.exit_code() == 0


def outside_trial(start: Start) -> tuple[dict[str, Any], bool] | None:
    """(the guard's record, whether the hog outside of its tree still lives) of one crossing; None: there was none."""
    engine = [*HOG, "--bytes", str(512 * MIB), "--seconds", "60", "--name", "engine"]
    guarded = start(engines=(engine,), floor=available_bytes() - (512 + 400) * MIB)
    wait_until(lambda: any(each.memory_info().rss > 500 * MIB for each in guarded.engines()), what="the engine is loaded")
    settled = guarded.page().monotonic_ns + 4 * 10**9  # censuses every second near the floor: the engine's load is past
    wait_until(lambda: guarded.page().monotonic_ns > settled)
    with subprocess.Popen([*HOG, "--bytes", str(900 * MIB), "--seconds", "20", "--name", "outsider"]) as hog:
        try:
            wait_until(lambda: guarded.stops() or hog.poll() is not None, what="the guard acted, or the hog has had its 20 s")
            return (guarded.stops()[0], hog.poll() is None) if guarded.stops() else None
        finally:
            hog.kill()
            guarded.process.send_signal(signal.SIGTERM)
            assert guarded.exit_code() == 0


def test_hog_of_somebody_else_is_named_and_left_alone(start: Start) -> None:
    for _ in range(4):  # what else takes or frees memory on this host during a trial is named instead, and rightly
        trial = outside_trial(start)
        if trial and trial[0]["hog"] and trial[0]["hog"]["name"] == "outsider":
            break
    assert trial, "the floor was never crossed"
    record, hog_lives = trial
    assert record["hog"]["name"] == "outsider" and not record["hog"]["inside"]
    assert [each["name"] for each in record["killed"]] == ["engine"] and hog_lives


def test_a_dry_run_says_once_that_it_would_kill_and_kills_nothing(start: Start) -> None:
    guarded = start(floor=available_bytes() + 4096 * MIB, dry_run=True)
    engines = guarded.wait_for_engines(*TREE_NAMES)
    wait_until(lambda: guarded.page().dry_stops, what="a crossing")
    samples = guarded.page().samples
    wait_until(lambda: guarded.page().samples > samples + 5, what="more samples")
    record, = guarded.stops()
    assert (record["dry_run"], record["killed"], record["reaction_us"]) == (True, [], None)
    assert guarded.page().dry_stops == 1 and guarded.page().stops == 0 and all(each.is_running() for each in engines)
    assert "would be killed" in guarded.said() and guarded.said().count("a dry run: killed nothing") == 1
    guarded.process.terminate()
    assert guarded.exit_code() == 0


def test_under_the_floor_from_the_start_new_engines_are_ended_and_nothing_is_repeated(start: Start) -> None:
    floor = available_bytes() + 4096 * MIB
    guarded = start(floor=floor)
    wait_until(lambda: guarded.page().stops and not guarded.engines())
    guarded.wait_for_event("started")
    told = len(guarded.stops())
    samples = guarded.page().samples
    wait_until(lambda: guarded.page().samples > samples + 10)
    assert len(guarded.stops()) == told
    assert guarded.page().daemon_starts == 1


def test_full_disk_does_not_stop_the_guard(start: Start, tmp_path: Path) -> None:
    argv, fifo = waiting_hog(tmp_path, "hog", 2048 * MIB)
    guarded = start(engines=(argv,), floor=available_bytes() - 500 * MIB)
    (guarded.directory / "guard.jsonl").symlink_to("/dev/full")
    guarded.wait_for_engines("sh")
    begin(fifo)
    wait_until(lambda: "guard.jsonl: not written" in guarded.said())
    guarded.wait_for_no_engines()
    assert guarded.page().stops == 1


def test_stuck_reader_of_stderr_does_not_stop_the_guard(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write_end, True)
    process = spawn([*GUARD, write_orders(tmp_path, daemon_argv=["sh", "-c", "exit 0"])], stderr=write_end)
    assert process.wait(timeout=30) == 0
    os.close(read_end)
    os.close(write_end)


# --- bad input -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("values", "wanted"), [
    ({"schema": 2}, "schema = 2"),
    ({"floor_bytes": -1}, "floor_bytes = -1"),
    ({"floor_bytes": True}, "floor_bytes = true"),
    ({"floor_bytes": 1.5}, "floor_bytes = 1.5"),
    ({"priority": 64}, "priority = 64: wanted 0 to 63"),
    ({"daemon_argv": []}, "daemon_argv = []"),
    ({"daemon_argv": "sh -c true"}, 'daemon_argv = "sh -c true"'),
    ({"run_directory": "/nonexistent"}, 'run_directory = "/nonexistent"'),
    ({"lock_descriptor": 99}, "lock_descriptor = 99"),
    ({"florr_bytes": 1}, "florr_bytes"),
])
def test_bad_orders_are_refused_in_one_line(tmp_path: Path, values: dict[str, Any], wanted: str) -> None:
    path = write_orders(tmp_path, **values)
    result = subprocess.run([*GUARD, path], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 78
    assert wanted in result.stderr and str(path) in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3"])
def test_unreadable_orders_are_refused_in_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "guard.json"
    if text is not None:
        path.write_text(text)
    result = subprocess.run([*GUARD, path], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 78
    assert str(path) in result.stderr and result.stderr.count("\n") == 1
