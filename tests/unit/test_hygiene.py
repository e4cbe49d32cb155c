"""What a generation left: whose it is, who holds it, and that nothing of others goes."""
from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tightrank import hygiene
from tightrank.hygiene import Rules, Traces, shared, sweep
from tightrank.hygiene.devices import Devices
from tightrank.readers.nvidia import NvidiaReader
from tightrank.records import WorkerSpec

GIB = 1 << 30
NOW = 1000.0


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm: leases work on every disk."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(shared, "SHM", path)
    monkeypatch.setattr(shared, "ORPHAN_SECONDS", 0.1)
    monkeypatch.setattr(shared, "_MAPPED", shared.re.compile(rb" " + os.fsencode(path) + rb"/(.+?)(?: \(deleted\))?$",
                                                             shared.re.MULTILINE))
    return path


def spec(directory: Path, **env: str) -> WorkerSpec:
    return WorkerSpec(
        name="w", engine="vllm", role="both", argv=("true",), env={"TIGHTRANK_RUN": "0123456789abcdef:w:3", **env},
        host="127.0.0.1", port=1, model=str(directory), served_model="m", tensor_parallel=1, pipeline_parallel=1, devices=(),
        hooks={}, line=None, context_tokens=None, schedule=(), drain_seconds=1, start_stall_seconds=1, generation=3,
        run_directory=str(directory / "w-3"))


def segment(path: Path, held: bool = False) -> mmap.mmap | None:
    path.write_bytes(b"\1" * 8192)
    if not held:
        return None
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


class Reader(NvidiaReader):
    """A device whose level the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.free: int | None = 80 * GIB
        self.by: dict[int, int] = {}

    def devices(self) -> tuple[str, ...]:
        return ("0000:01:00.0",)

    def free_bytes(self, pci_id: str) -> tuple[int | None, str]:
        return self.free, ""

    def holders(self, pci_id: str) -> dict[int, int]:
        return dict(self.by)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def opened(tmp_path: Path, said: list[str]) -> Callable[..., tuple[Traces, WorkerSpec]]:
    """A generation's traces, whose TMPDIR lies in `base` of this test, and the spec as it is started."""
    def make(rules: Rules | None = None, **env: str) -> tuple[Traces, WorkerSpec]:
        base = Path("/tmp") / f"t{os.getpid()}"        # short: see SOCKET_PATH_BYTES
        base.mkdir(exist_ok=True)
        env = {"TMPDIR": str(base), **env}
        traces = Traces(spec(tmp_path, **env), os.environ, rules or Rules(), said.append)
        return traces, traces.open(spec(tmp_path, **env), os.environ)

    yield make
    hygiene.shutil.rmtree(f"/tmp/t{os.getpid()}", ignore_errors=True)


def ended(traces: Traces, now: float = NOW) -> bool:
    """After its removal."""
    traces.step(now)
    traces._removal.join(30)
    return traces.step(now)


Opened = Callable[..., tuple[Traces, WorkerSpec]]


def test_what_the_tree_held_and_what_engines_name_goes_and_nothing_else(opened: Opened, shm: Path, said: list[str]) -> None:
    segment(shm / "psm_00000001")                                   # before the start
    os.utime(shm / "psm_00000001")
    traces, _ = opened()
    mine = segment(shm / "of_a_library", held=True)
    traces.look([os.getpid()], (), NOW)
    assert mine is not None
    mine.close()
    theirs = segment(shm / "psm_00000002", held=True)
    for name in ("psm_00000003", "sem.mp-abcd1234", "sglang_loads_1_2.shm", "sgl_shm_mq_1_a", "nccl-x1", "vllm_dist_a",
                 "torch_7_a"):
        segment(shm / name)
    for name in ("weights.bin", "psm_notours", "psm_00000003.bak", "x-nccl-1"):
        segment(shm / name)                                         # a person's
    (shm / "psm_0000000d").mkdir()
    (shm / "psm_0000000e").symlink_to(shm / "weights.bin")
    since = traces._record.since_ns
    traces._record.since_ns = max(since, os.lstat(shm / "psm_00000001").st_ctime_ns + 1)
    assert ended(traces)
    assert sorted(path.name for path in shm.iterdir()) == [
        "psm_00000001", "psm_00000002", "psm_00000003.bak", "psm_0000000d", "psm_0000000e", "psm_notours", "weights.bin",
        "x-nccl-1"]
    assert len(said) == 1 and "8 of shared memory" in said[0], said
    assert theirs is not None
    theirs.close()
    assert traces.step(NOW + 1) and len(said) == 1                  # once


def test_a_zombie_lets_go_of_its_memory_a_moment_later(opened: Opened, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ORPHAN_SECONDS", 30.0)
    traces, _ = opened()
    mine = segment(shm / "of_a_library", held=True)
    traces.note([os.getpid()])
    assert mine is not None
    threading.Timer(0.5, mine.close).start()
    assert ended(traces) and list(shm.iterdir()) == []


def test_in_a_hurry_what_may_be_of_use_is_left_to_the_next_supervisor(opened: Opened, shm: Path, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ORPHAN_SECONDS", 30.0)
    traces, _ = opened()
    segment(shm / "psm_00000001")
    traces.hurry()
    assert ended(traces) and len(list(shm.iterdir())) == 1
    monkeypatch.setattr(shared, "ORPHAN_SECONDS", 0.0)
    assert len(list(sweep(tmp_path, lambda _: False))) == 1 and list(shm.iterdir()) == []


def test_what_is_handed_from_one_process_to_another_is_not_taken_on_the_way(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's pictures: the sender has let go, the receiver has not come yet."""
    segment(shm / "psm_00000001")
    segment(shm / "psm_00000002")
    taken: list[mmap.mmap | None] = []

    def pause(seconds: float) -> bool:
        taken.append(segment(shm / "psm_00000001", held=True))
        return False

    assert shared.remove({}, 0, pause, True)[0] == {"psm_00000002": 8192}
    assert (shm / "psm_00000001").exists() and taken[0] is not None


def test_what_was_ours_and_is_held_is_named(opened: Opened, shm: Path, said: list[str]) -> None:
    traces, _ = opened()
    mine = segment(shm / "of_a_library", held=True)
    traces.note([os.getpid()])
    assert ended(traces) and mine is not None
    assert said == ["left alone, since another process holds it: of_a_library in /dev/shm"]

def test_a_file_that_took_a_name_that_was_ours_is_another(opened: Opened, shm: Path) -> None:
    traces, _ = opened()
    mine = segment(shm / "of_a_library", held=True)
    traces.note([os.getpid()])
    assert mine is not None
    (shm / "new").write_text("a person's")
    (shm / "new").replace(shm / "of_a_library")
    mine.close()
    assert ended(traces) and (shm / "of_a_library").exists()


@pytest.mark.parametrize("how", ["read", "write", "map"])
def test_what_is_open_anywhere_is_not_free(shm: Path, how: str) -> None:
    path = shm / "psm_00000001"
    segment(path)
    assert shared.free(path)
    file = path.open("rb" if how == "read" else "r+b")
    held = mmap.mmap(file.fileno(), 4096) if how == "map" else file
    if how == "map":
        file.close()
    assert not shared.free(path)
    held.close()
    assert shared.free(path)
    assert not shared.free(shm / "not-there")


def test_the_engine_has_a_temporary_directory_that_goes_with_it(opened: Opened, said: list[str]) -> None:
    traces, started = opened()
    directory = Path(started.env["TMPDIR"])
    assert directory.stat().st_mode & 0o777 == 0o700 and directory.parent.name == f"t{os.getpid()}"
    assert started.env["TORCHINDUCTOR_CACHE_DIR"].startswith(str(directory.parent) + "/torchinductor_")   # compiled once
    (directory / "pymp-x").mkdir()
    (directory / "pymp-x" / "listener").write_text("")
    (directory / "7c3a").write_text("")
    assert ended(traces) and not directory.exists()
    assert said == ["removed what it left: 2 temporary files"]


def test_what_a_person_set_stays(opened: Opened) -> None:
    _, started = opened(TORCHINDUCTOR_CACHE_DIR="/cache", RAY_TMPDIR="/ray")
    assert (started.env["TORCHINDUCTOR_CACHE_DIR"], started.env["RAY_TMPDIR"]) == ("/cache", "/ray")


def test_a_long_or_closed_tmpdir_stays_the_engines(tmp_path: Path, said: list[str]) -> None:
    for base in ("/tmp/" + "x" * 80, "/proc"):
        own = spec(tmp_path, TMPDIR=base)
        traces = Traces(own, {}, Rules(), said.append)
        assert traces.open(own, {}) == own and ended(traces)
    assert len(said) == 1 and said[0].startswith("/proc/tightrank-") and list(sweep(tmp_path, lambda _: False)) == []


def test_the_next_supervisor_removes_what_is_left(opened: Opened, shm: Path, tmp_path: Path) -> None:
    traces, started = opened()
    mine = segment(shm / "of_a_library", held=True)
    traces.note([os.getpid()])
    assert mine is not None
    mine.close()
    segment(shm / "psm_00000001")
    (Path(started.env["TMPDIR"]) / "7c3a").write_text("")
    assert list(sweep(tmp_path, lambda _: False)) == [
        "removed what w-3 left: 2 of shared memory (0 MiB: of_a_library, psm_00000001), 1 temporary files"]
    assert not Path(started.env["TMPDIR"]).exists() and list(shm.iterdir()) == []
    assert list(sweep(tmp_path, lambda _: False)) == []


def test_the_creator_of_a_system_v_segment_is_known_by_its_hello(opened: Opened, tmp_path: Path, said: list[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    monkeypatch.setattr(shared, "remove_sysv", lambda pids, since_ns: asked.append(set(pids)) or 1)
    traces, _ = opened()
    traces.note([7])
    (tmp_path / "w-3").mkdir()
    for name in ("hello-8.json", "hello-9.json.1.tmp", "beat-10"):
        (tmp_path / "w-3" / name).write_text("")
    assert ended(traces) and asked == [{7, 8}] and said == ["removed what it left: 1 System V segments"]


@pytest.mark.parametrize("rows", ["", "garbage", "key shmid\n1\n", "key shmid\n1 x\n"])
def test_a_table_of_another_form_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    (tmp_path / "shm").rmdir()
    (tmp_path / "table").write_text(rows)
    monkeypatch.setattr(shared, "SYSV", tmp_path / "table")
    assert shared.remove_sysv({1}, 0) == 0 and shared.remove({}, 0, lambda _: False, True) == ({}, [])


@pytest.mark.parametrize("text", ["", "[]", "{}", "\0", '{"temporary": "/etc", "since_ns": 0, "segments": {}, "pids": []}'])
def test_a_torn_file_is_said_and_removes_nothing(tmp_path: Path, shm: Path, text: str) -> None:
    (tmp_path / "w-3.traces.json").write_text(text)
    segment(shm / "psm_00000001")
    said = list(sweep(tmp_path, lambda _: False))
    assert len(said) == 1 and "w-3.traces.json: not readable" in said[0] and (shm / "psm_00000001").exists()
    assert list(sweep(tmp_path, lambda _: False)) == []


def test_a_disk_that_was_full_from_the_start_is_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         said: list[str]) -> None:
    def full(path: str, values: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hygiene.wire, "write_json", full)
    own = spec(tmp_path, TMPDIR="/tmp")
    with pytest.raises(OSError, match="No space left"):
        Traces(own, {}, Rules(), said.append).open(own, {})
    assert list(tmp_path.glob("*.json")) == []


def test_a_full_disk_while_it_lives_loses_nothing(opened: Opened, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, _ = opened()
    mine = segment(shm / "of_a_library", held=True)

    def full(path: str, values: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hygiene.wire, "write_json", full)
    traces.note([os.getpid()])
    assert mine is not None
    mine.close()
    assert ended(traces) and list(shm.iterdir()) == []


def test_device_memory_is_waited_for_and_then_named(opened: Opened) -> None:
    reader = Reader()
    traces, _ = opened(Rules(limit_seconds=30, tolerance_bytes=GIB, reader=reader))
    traces.look([7], ["0000:01:00.0"], NOW)
    reader.free, reader.by = 10 * GIB, {7: 70 * GIB}
    assert not ended(traces) and traces.trouble(NOW + 29) is None
    found = traces.trouble(NOW + 31)
    assert found is not None and (found.cause, found.restart_helps) == ("device-memory-not-released", True)
    assert "10240 MiB free, 81920 before" in found.summary and "pid 7 (71680 MiB)" in found.summary
    reader.free = 79 * GIB + 1
    assert traces.step(NOW + 32) and traces.trouble(NOW + 99) is None


@pytest.mark.parametrize(("free_gib", "by", "missing"), [
    (80, {}, False), (79, {}, False), (78, {}, True), (40, {9: 40 * GIB}, False), (30, {9: 40 * GIB}, True),
    (40, {7: 40 * GIB}, True), (None, {}, False)])
def test_what_others_took_meanwhile_is_not_missing(free_gib: int | None, by: dict[int, int], missing: bool) -> None:
    reader = Reader()
    devices = Devices(reader, GIB)
    reader.free, reader.by = None if free_gib is None else free_gib * GIB, by
    assert bool(devices.missing(["0000:01:00.0"], {7})) == missing
    assert devices.missing(["0000:02:00.0"], {7}) == ""        # never seen before the start


def test_the_weights_leave_the_page_cache_when_asked(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hygiene, "_forget_pages", asked.append)
    for drop in (False, True):
        traces, _ = opened(Rules(drop_weights=drop))
        assert ended(traces)
        assert asked == [str(tmp_path)] * drop


def test_a_record_holds_what_it_needs(opened: Opened, tmp_path: Path) -> None:
    _, started = opened()
    values = json.loads((tmp_path / "w-3.traces.json").read_text())
    assert set(values) == {"temporary", "since_ns", "segments", "pids"} and values["temporary"] == started.env["TMPDIR"]
