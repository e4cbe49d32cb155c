"""Parts of the guard on their own: cgroups on made-up trees, hostile names, identity before a kill."""
from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import memory
import processes
import pytest
from common import UNKNOWN
from daemon import Daemon
from helpers import SUPERVISOR, wait_until
from memory import Available, Cgroup, memory_cgroups
from page import Page
from processes import Process, descendants, fastest_growing, parse_stat, process, walk
from tightrank_adapter import pages, wire

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = ("32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
             "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")


@pytest.mark.parametrize(("membership", "mounts", "found"), [
    ("0::/a/b\n", V2_MOUNT.format(root="/"),
     [("/sys/fs/cgroup/a/b", 2), ("/sys/fs/cgroup/a", 2), ("/sys/fs/cgroup", 2)]),
    ("0::/\n", V2_MOUNT.format(root="/"), [("/sys/fs/cgroup", 2)]),
    ("0::/docker/x/y\n", V2_MOUNT.format(root="/docker/x"), [("/sys/fs/cgroup/y", 2), ("/sys/fs/cgroup", 2)]),
    ("0::/../other\n", V2_MOUNT.format(root="/docker/x"), [("/sys/fs/cgroup", 2)]),
    ("0::/docker/xyz\n", V2_MOUNT.format(root="/docker/x"), [("/sys/fs/cgroup", 2)]),
    ("5:cpu:/c\n4:memory:/a\n0::/\n", V1_MOUNTS.format(root="/"),
     [("/sys/fs/cgroup/memory/a", 1), ("/sys/fs/cgroup/memory", 1)]),
    ("5:hugetlb,memory:/docker/x\n", V1_MOUNTS.format(root="/docker/x"), [("/sys/fs/cgroup/memory", 1)]),
    ("0::/a\n", "30 23 0:26 / /sys/fs/cgroup rw shared:1 - cgroup2  rw\n", [("/sys/fs/cgroup/a", 2), ("/sys/fs/cgroup", 2)]),
    ("", "", []),
    ("5:name=memory:/a\n", V1_MOUNTS.format(root="/"), []),
    ("4:memory:/\n0::/u\n", V1_MOUNTS.format(root="/") + "40 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
     [("/sys/fs/cgroup/memory", 1), ("/sys/fs/cgroup/unified/u", 2), ("/sys/fs/cgroup/unified", 2)]),
])
def test_memory_cgroups(membership: str, mounts: str, found: list[tuple[str, int]]) -> None:
    assert memory_cgroups(membership, mounts) == found


@pytest.mark.parametrize("version", [1, 2])
def test_room_is_the_limit_less_what_cannot_be_reclaimed(tmp_path: Path, version: int) -> None:
    limit, usage, key = Cgroup.V1 if version == 1 else Cgroup.V2
    (tmp_path / limit).write_text(f"{4 * GIB}\n")
    (tmp_path / usage).write_text(f"{3 * GIB}\n")
    # inactive_file of v1 is this cgroup's alone, its total_ is what counts; neither may be taken for the other
    (tmp_path / "memory.stat").write_text(f"anon 1\nx{key.decode()}77\n{key.decode()}{GIB // 2}\nfile 9\n")
    cgroup = Cgroup(str(tmp_path), version)
    assert cgroup.read(UNKNOWN) == GIB + GIB // 2
    assert cgroup.read(GIB) == GIB
    (tmp_path / usage).write_text(f"{5 * GIB}\n")
    assert cgroup.read(UNKNOWN) == -GIB // 2


@pytest.mark.parametrize(("version", "unlimited"), [(1, "9223372036854771712"), (2, "max")])
def test_no_limit_is_no_bound_until_there_is_one(tmp_path: Path, version: int, unlimited: str) -> None:
    limit, usage, key = Cgroup.V1 if version == 1 else Cgroup.V2
    (tmp_path / limit).write_text(unlimited)
    (tmp_path / usage).write_text("0")
    (tmp_path / "memory.stat").write_text(f"{key.decode()}0\n")
    cgroup = Cgroup(str(tmp_path), version)
    assert cgroup.read(123) == 123
    (tmp_path / limit).write_text(str(100 * 4096))
    assert any(cgroup.read(GIB) == 100 * 4096 for _ in range(102))


def test_unreadable_source_is_left_out_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in Cgroup.V2[:2]:
        (tmp_path / name).write_text("0")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    available = Available()
    available._sources.append(Cgroup(str(tmp_path), 2))
    assert available.read() == 0
    (tmp_path / "memory.current").write_text("not a number")
    assert (available.read() or 0) > 0
    assert (available.read() or 0) > 0
    assert capfd.readouterr().err.count(str(tmp_path)) == 1


def test_a_host_without_memavailable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    real = memory.MemAvailable
    monkeypatch.setattr(memory, "MemAvailable", lambda: real(str(tmp_path / "meminfo")))
    with pytest.raises(SystemExit) as refused:
        Available()
    assert refused.value.code == 70
    assert "MemAvailable" in capfd.readouterr().err


def test_failed_fork_is_tried_again_later(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise BlockingIOError(11, "no more processes")
    monkeypatch.setattr(os, "fork", fail)
    daemon = Daemon(["true"])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    daemon.start_when_due()
    daemon.start_when_due()
    assert daemon.pid == 0 and daemon.starts == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert capfd.readouterr().err.count("no more processes") == 1


FLAPS = """
import sys
sys.path.insert(0, sys.argv[1])
from importlib.machinery import SourceFileLoader
from orders import Orders
rooms = SourceFileLoader("guard", sys.argv[1] + "/__main__.py").load_module()
guard = rooms.Guard(Orders(["true"], sys.argv[2], 0, 0, None, True))
def flap():
    for floor in (2**60, 0) * 5:
        guard.floor = floor
        guard.keep_floor()
    print(guard.dry_stops, guard.stops)
flap()
guard.last_dry_ns -= rooms.DRY_NS
flap()
"""


def test_a_dry_run_says_little_while_memory_stays_about_the_floor(tmp_path: Path) -> None:
    """Nothing is killed, so it may stay there for hours: a line for each crossing would fill the disk."""
    rooms = str(SUPERVISOR / "tightrank" / "guard")
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", FLAPS, rooms, str(tmp_path)],
                          capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["1 0", "2 0"]
    assert len((tmp_path / "guard.jsonl").read_text().splitlines()) == done.stderr.count("a dry run: killed nothing") == 2


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from page import Page
page, number = Page(sys.argv[2], 14), 0
while True:
    number += 1
    page.write(*[number] * 14)
"""


def test_reader_never_takes_a_page_that_is_half_written(tmp_path: Path, spawn: Callable[..., object]) -> None:
    path = str(tmp_path / "page")
    Page(path, 14)
    spawn([sys.executable, "-I", "-S", "-c", WRITER, str(SUPERVISOR / "tightrank" / "guard"), path])
    reader = pages.Page(path, "14Q", False)
    wait_until(lambda: readable(reader))
    seen = {values for _ in range(200_000) if (values := readable(reader))}
    assert len(seen) > 1 and all(set(values) == {values[0]} and values[0] for values in seen)


def readable(page: pages.Page) -> tuple[int, ...]:
    try:
        return page.read()
    except wire.WireError:
        return ()


def test_page_reads_only_what_is_whole(tmp_path: Path) -> None:
    path, page = tmp_path / "page", Page(str(tmp_path / "page"), 1)
    assert page.read() is None
    pages.Page(str(path), "Q", True).write(7)
    assert page.read() == (7,)
    for torn in ((3, 2, 8), (0, 2, 8), (4, 1, 8)):  # being written, not yet written, of another version
        path.write_bytes(struct.pack("<QQQ", *torn).ljust(4096, b"\0"))
        assert page.read() is None


def stat(pid: int, name: str, state: str = "S", parent: int = 1, threads: int = 1, start: int = 5) -> bytes:
    fields = [state, parent, *[0] * 15, threads, 0, start, 0, 3, *[0] * 28]
    return f"{pid} ({name}) {' '.join(map(str, fields))}\n".encode(errors="surrogateescape")


@pytest.mark.parametrize("name", ["foo) Z 1 2", "a (b) c", ") ", "(", "", "new\nline", "\udcff"])
def test_hostile_names(name: str) -> None:
    found = parse_stat(stat(7, name, parent=3))
    assert (found.pid, found.parent, found.start_time, found.alive, found.rss_bytes) == (7, 3, 5, True, 3 * 4096)
    assert found.name == name.encode(errors="surrogateescape").decode(errors="replace")


@pytest.mark.parametrize(("state", "threads", "alive"), [
    ("S", 1, True), ("D", 9, True), ("T", 1, True), ("Z", 1, False), ("X", 0, False), ("Z", 4, True)])
def test_alive(state: str, threads: int, alive: bool) -> None:
    assert parse_stat(stat(1, "x", state, threads=threads)).alive is alive


def made(pid: int, parent: int, rss: int = 0, start: int = 5) -> Process:
    return Process(pid, start, f"p{pid}", parent, True, rss)


def test_descendants_whatever_the_order_of_pids() -> None:
    everyone = [made(2, 90), made(90, 40), made(40, 10), made(41, 1), made(10, 1), made(3, 10)]
    assert {each.pid for each in descendants(everyone, 10)} == {40, 3, 90, 2}


def test_fastest_growing_counts_a_reused_pid_as_new() -> None:
    before = {(1, 5): 900, (2, 5): 100}
    assert fastest_growing([made(1, 0, 1000), made(2, 0, 150)], before) == (made(1, 0, 1000), 100)
    assert fastest_growing([made(1, 0, 1000), made(2, 0, 600, start=6)], before) == (made(2, 0, 600, start=6), 600)
    assert fastest_growing([made(1, 0, 900), made(2, 0, 50)], before) is None


def test_kill_spares_a_process_that_only_has_the_same_pid(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    sleeper = spawn(["sleep", "1005"])
    real = process(sleeper.pid)
    assert real is not None
    assert processes.kill(real._replace(start_time=real.start_time - 1)) is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(timeout=0.3)
    killed = processes.kill(real)
    assert killed is not None and killed.identity == real.identity
    assert sleeper.wait(timeout=30) == -9
    assert processes.kill(real) is None


def test_walk_finds_this_process() -> None:
    mine = next(each for each in walk() if each.pid == os.getpid())
    assert mine.parent == os.getppid() and mine.alive and mine.rss_bytes > 0
