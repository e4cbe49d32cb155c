"""Readers on fake kernel trees with hostile rows: meminfo, cgroup v1 and v2, PSI, /proc/<pid>/stat, the guard's page."""
from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
from tightrank.adapter import memory, pages, wire
from tightrank.readers.guard import GuardReader
from tightrank.readers.memory import MemoryReader, pressure
from tightrank.readers.process import Process, ProcessTable, marked, parse_stat, read_process
from tightrank.records import ProcessId
from tightrank.watch import _alive

MIB = 1 << 20
STAT = "4242 ({name}) S 17 4200 4100 0 -1 4194560 1 0 0 0 250 150 0 0 20 0 9 0 99887 1000000 2560 18446744073709551615"


def host(root: Path, meminfo_text: str = "MemTotal: 1000 kB\nMemAvailable: 600 kB\n", cgroup: str = "0::/a/b\n") -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "pressure").mkdir()
    (proc / "meminfo").write_text(meminfo_text)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "pressure" / "memory").write_text("some avg10=1.50 avg60=0.00 total=7\nfull avg10=0.25 avg60=0 total=1\n")
    return proc


def group(path: Path, version: int, limit: str, current: int, cache: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current", "inactive_file"),
             1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}[version]
    (path / names[0]).write_text(limit + "\n")
    (path / names[1]).write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nfile 9\n")


def test_without_a_limit_available_is_the_hosts(tmp_path: Path) -> None:
    group(tmp_path / "cg/a/b", 2, "max", 10, 0)
    reading = MemoryReader(host(tmp_path), tmp_path / "cg").read(1.0)
    assert (reading.mem_available_bytes, reading.available_bytes, reading.cgroup_room_bytes) == (600 * 1024, 600 * 1024, None)
    assert (reading.pressure_some_avg10, reading.pressure_full_avg10, reading.why) == (1.5, 0.25, "")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_and_idle_page_cache_does_not(tmp_path: Path, version: int) -> None:
    line, base = ("0::/a/b\n", "cg") if version == 2 else ("4:cpu,memory:/a/b\n0::/x\n", "cg/memory")
    group(tmp_path / base / "a/b", version, str(500 * MIB), 400 * MIB, 350 * MIB)      # room 450
    group(tmp_path / base / "a", version, str(300 * MIB), 290 * MIB, 90 * MIB)         # room 100
    group(tmp_path / base, version, "9223372036854771712" if version == 1 else "max", 0, 0)
    reading = MemoryReader(host(tmp_path, "MemTotal: 8000000 kB\nMemAvailable: 900000 kB\n", line), tmp_path / "cg").read(1.0)
    assert (reading.cgroup_limit_bytes, reading.cgroup_room_bytes) == (300 * MIB, 100 * MIB)
    assert reading.available_bytes == 100 * MIB


@pytest.mark.parametrize(("line", "file", "text"), [
    ("0::/a/b\n", "cg/a/b/memory.events", "low 0\noom 9\noom_kill 3\noom_group_kill 0\n"),
    ("4:memory:/a/b\n", "cg/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ("1:cpu:/\n", "proc/vmstat", "nr_free_pages 7\noom_kill 3\n")])
def test_the_kernels_kills_are_counted(tmp_path: Path, line: str, file: str, text: str) -> None:
    group(tmp_path / "cg/a/b", 2, "max", 10, 0)
    group(tmp_path / "cg/memory/a/b", 1, "9223372036854771712", 10, 0)
    proc = host(tmp_path, cgroup=line)
    assert MemoryReader(proc, tmp_path / "cg").read(1.0).oom_kills is None
    (tmp_path / file).write_text(text)
    assert MemoryReader(proc, tmp_path / "cg").read(1.0).oom_kills == 3


def test_what_cannot_be_read_is_unknown_and_says_why(tmp_path: Path) -> None:
    group(tmp_path / "cg/a/b", 2, "12x", 10, 0)
    reading = MemoryReader(host(tmp_path, "MemTotal: 5 kB\n"), tmp_path / "cg").read(1.0)
    assert reading.available_bytes is None and reading.mem_available_bytes is None
    assert "MemAvailable" in reading.why and "cgroup" in reading.why


def test_a_container_that_names_the_hosts_path_reads_its_own_mount(tmp_path: Path) -> None:
    group(tmp_path / "cg", 2, str(64 * MIB), 60 * MIB, 4 * MIB)
    reading = MemoryReader(host(tmp_path, cgroup="0::/docker/abc\n"), tmp_path / "cg").read(1.0)
    assert reading.cgroup_room_bytes == 8 * MIB


def test_odd_lines_are_left_out() -> None:
    assert memory.meminfo("A: 1 kB\nHugePages: 3\nnonsense\nB: x kB\n:\n") == {"A": 1024, "HugePages": 3}
    assert pressure("some avg10=2.0 total=1\n") == {"some": 2.0}


@pytest.mark.parametrize("name", ["python3", "foo) Z ", "a b (c) d", "((", "ä"])
def test_any_process_name_is_read(name: str) -> None:
    found = parse_stat(4242, STAT.format(name=name))
    assert (found.name, found.state, found.parent_pid, found.session) == (name, "S", 17, 4100)
    assert (found.id, found.rss_bytes) == (ProcessId(4242, 99887), 2560 * os.sysconf("SC_PAGE_SIZE"))
    assert found.cpu_seconds == 400 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("text", ["", "1 (x", "1 (x) S 1 2"])
def test_a_torn_stat_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="stat"):
        parse_stat(1, text)


def process(pid: int, parent: int, session: int, start: int = 50, state: str = "S") -> Process:
    return Process(ProcessId(pid, start), parent, session, "p", state, 0, 0.0)


def test_a_tree_holds_descendants_orphans_of_the_session_and_what_was_known() -> None:
    main = ProcessId(10, 50)
    table = ProcessTable([process(1, 0, 1), process(10, 1, 10), process(11, 10, 10), process(12, 11, 12),    # setsid child
                          process(13, 1, 10, 60),        # orphan of the session
                          process(14, 1, 14, 70),        # orphan with a session of its own, seen before
                          process(15, 1, 15), process(16, 14, 14), process(17, 1, 10, 40)])   # 17: an older session number
    found = {item.id.pid for item in table.tree(main, [ProcessId(14, 70), ProcessId(15, 999)])}
    assert found == {10, 11, 12, 13, 14, 16}


def test_a_pid_that_was_used_again_is_not_ours() -> None:
    table = ProcessTable([process(10, 1, 1, start=80), process(11, 10, 1)])
    assert table.tree(ProcessId(10, 50), [ProcessId(11, 49)]) == []
    table = ProcessTable([process(10, 1, 10, start=80), process(11, 10, 10, start=81)])      # it leads a session too
    assert table.tree(ProcessId(10, 50)) == []


def test_without_descriptors_no_process_is_taken_for_dead() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ourselves = ProcessId(os.getpid(), wire.start_time(os.getpid()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert _alive(ourselves)
        with pytest.raises(OSError, match="Too many open files"):
            read_process(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_process(2**22 + 1) is None


def test_leftovers_are_found_by_their_mark(tmp_path: Path) -> None:
    for pid, environment in ((5, b"A=1\0TIGHTRANK_RUN=abc:w:1\0"), (6, b"TIGHTRANK_RUN=abd:w:1\0"),
                             (7, b"X=TIGHTRANK_RUN=abc\0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(environment)
        (tmp_path / str(pid) / "stat").write_text(STAT.format(name="x"))
    (tmp_path / "8").mkdir()                # one that we may not read
    assert [found.pid for found in marked("abc", str(tmp_path))] == [5]


def test_the_guards_page_and_last_record(tmp_path: Path) -> None:
    reader = GuardReader(tmp_path)
    assert reader.read() == {}
    page = pages.Page(str(tmp_path / "guard.page"), "14Q", True)
    page.write(7, 8, 9, 10, 2**64 - 1, 12, 13, 1, 15, 16, 1, 0, 18, 0)
    (tmp_path / "guard.jsonl").write_text(json.dumps({"available_bytes": 3}) + "\n" + '{"torn')
    values = reader.read()
    assert (values["pid"], values["available_bytes"], values["stops"], values["last"]) == (7, None, 1, {"available_bytes": 3})
    page.write(7, 8, 9, 10, 11, 12, 13, 2, 15, 16, 1, 0, 18, 0)
    (tmp_path / "guard.jsonl").unlink()     # a full disk: the count stands, the record does not
    assert reader.read()["stops"] == 2 and reader.read()["last"] == {}
    page._map[:8] = bytes([7, 0, 0, 0, 0, 0, 0, 0])      # being written for ever: unknown, and never 0
    assert reader.read() == {} and reader.stops() == 2
