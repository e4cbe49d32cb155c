"""What adapter and supervisor say to each other: round trips, and files and records that are not what they should be."""
from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT, ROOT
from hypothesis import given
from hypothesis import strategies as st
from tightrank_adapter import pages, wire

SETTINGS = wire.Settings("w", 3, "vllm", {"ranks": {}, "line": {"budget": 200_000_000, "minimum": 256}})
HELLO = wire.Hello(pid=12, start_time=34, role="worker", engine="vllm", engine_version="0.32.0", worker="w", generation=3,
                   rank=0, tp_rank=0, pp_rank=0, dp_rank=None, device=None,
                   hooks={"ranks": {"state": wire.IN_FORCE, "wanted": "", "found": ""}}, facts={"granule_tokens": 64})
STEP = wire.Step(3, 12, 1, 0, 123456789, 256, 4096, 200_000_000, False, 1.5, None, [[3840, 256]])
FAULT = wire.Fault(3, 12, "line", "predict", "ValueError: x", True)


def test_settings_survive(tmp_path: Path) -> None:
    wire.write_settings(str(tmp_path), SETTINGS)
    assert wire.read_settings(str(tmp_path)) == SETTINGS


def test_a_hello_survives_and_is_private(tmp_path: Path) -> None:
    wire.write_hello(str(tmp_path), HELLO)
    path = wire.hello_path(str(tmp_path), HELLO.pid)
    assert wire.read_json(path, wire.Hello) == HELLO
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == [f"hello-{HELLO.pid}.json"]


@pytest.mark.parametrize("record", [STEP, FAULT, STEP._replace(peak_bytes=2**40, chunks=[])])
def test_records_survive(record: Any) -> None:
    assert wire.decode(wire.encode(record)) == record


@given(st.builds(wire.Fault, st.integers(0), st.integers(0), st.text(), st.text(), st.text(), st.booleans()))
def test_any_text_survives(fault: wire.Fault) -> None:
    assert wire.decode(wire.encode(fault)) == fault


@given(st.one_of(st.binary(), st.text().map(str.encode),
                 st.recursive(st.none() | st.integers() | st.text() | st.booleans(), lambda inner: st.lists(inner) |
                              st.dictionaries(st.text(), inner)).map(lambda value: json.dumps(value).encode())))
def test_a_foreign_datagram_is_a_wire_error(datagram: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(datagram)


@pytest.mark.parametrize("datagram", [
    wire.encode(STEP)[:-5], wire.encode(STEP).replace(b"[3,", b"[4,", 1), wire.encode(STEP).replace(b'"step"', b'"hop"'),
    b'[3,"step"]', b'[3,["step"]]', b"\xff\xfe"])
def test_a_torn_or_later_record_is_a_wire_error(datagram: bytes) -> None:
    with pytest.raises(wire.WireError, match=r"^record: "):
        wire.decode(datagram)


@pytest.mark.parametrize(("text", "message"), [
    ("", "not JSON"), ('{"schema": 3, "pid"', "not JSON"), ("[]", "schema None, wanted 3"),
    ('{"schema": 1}', "schema 1, wanted 3: adapter and supervisor are of different versions"),
    ('{"schema": 3}', "field pid is missing")])
def test_a_hello_of_another_form_names_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hello-1.json"
    path.write_text(text)
    with pytest.raises(wire.WireError, match=f"^{re.escape(str(path))}: {re.escape(message)}"):
        wire.read_json(str(path), wire.Hello)


def test_fields_of_a_later_minor_change_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "hello-1.json"
    path.write_text(json.dumps({**HELLO._asdict(), "schema": 3, "later": True}))
    assert wire.read_json(str(path), wire.Hello) == HELLO


def test_the_start_time_names_this_process() -> None:
    assert wire.start_time(os.getpid()) == int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    with pytest.raises(OSError, match="No such file"):
        wire.start_time(2**22 + 1)


def test_beat_and_control_pages(tmp_path: Path) -> None:
    writer = pages.BeatWriter(str(tmp_path))
    writer.steps, writer.prefill_tokens, writer.in_flight = 5, 4096, 2
    writer.beat()
    beat = pages.BeatReader(str(tmp_path), os.getpid()).read()
    assert (beat.pid, beat.loops, beat.steps, beat.prefill_tokens, beat.in_flight) == (os.getpid(), 2, 5, 4096, 2)
    control = pages.ControlWriter(str(tmp_path))
    reader = pages.ControlReader(str(tmp_path))
    for budget in (1, 2**40, 7):
        control.publish(budget)
        assert reader.budget() == budget
    assert (tmp_path / wire.CONTROL).stat().st_mode & 0o777 == 0o600


def test_a_page_that_nobody_wrote_or_that_is_being_written(tmp_path: Path) -> None:
    page = pages.Page(str(tmp_path / "page"), "2Q", True)
    reader = pages.Page(str(tmp_path / "page"), "2Q", False)
    with pytest.raises(wire.WireError, match="not written yet"):
        reader.read()
    page.write(1, 2)
    assert reader.read() == (1, 2)
    with open(tmp_path / "page", "r+b") as file:
        file.write((3).to_bytes(8, "little"))          # odd: a writer that stopped half-way
    with pytest.raises(wire.WireError, match="not written yet"):
        reader.read()


def test_a_page_of_another_schema(tmp_path: Path) -> None:
    pages.Page(str(tmp_path / "page"), "Q", True).write(1)
    with open(tmp_path / "page", "r+b") as file:
        file.seek(8)
        file.write((9).to_bytes(8, "little"))
    with pytest.raises(wire.WireError, match="schema 9, wanted 3"):
        pages.Page(str(tmp_path / "page"), "Q", False).read()


_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from tightrank_adapter import pages, wire
page, number = pages.Page(sys.argv[2], "3Q", True), 2**60
while True:
    number += 1
    page.write(number, number, number)
"""


def test_a_reader_never_sees_half_a_page(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    """A process that writes without pause: all values that are read together were written together."""
    path, seen = tmp_path / "page", set()
    reader = pages.Page(str(path), "3Q", True)
    spawn([sys.executable, "-I", "-c", _WRITER, str(INJECT), str(path)])
    deadline = time.monotonic() + 60
    while len(seen) < 20_000:
        assert time.monotonic() < deadline
        try:
            values = reader.read()
        except wire.WireError:
            continue
        assert len(set(values)) == 1
        seen.add(values[0])


def _receiver(directory: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    descriptor = os.open(directory, os.O_PATH)
    found.bind(wire.socket_address(str(directory), descriptor))
    os.close(descriptor)
    found.setblocking(False)
    return found


def _drain(receiver: socket.socket) -> list[int]:
    found = []
    while True:
        try:
            found.append(wire.decode(receiver.recv(65536)).sequence)
        except BlockingIOError:
            return found


def test_a_full_socket_loses_nothing_and_keeps_the_order(tmp_path: Path) -> None:
    receiver, sender = _receiver(tmp_path), wire.Sender(str(tmp_path), keep=1000)
    for number in range(800):                    # a queue takes about 10 (net.unix.max_dgram_qlen) to 500
        sender.send(STEP._replace(sequence=number))
    found: list[int] = []
    while len(found) < 800:
        new = _drain(receiver)
        assert new
        found += new
        sender.flush()
    assert found == list(range(800))
    assert sender.lost == 0


def test_without_a_supervisor_the_oldest_go_and_are_counted(tmp_path: Path) -> None:
    sender = wire.Sender(str(tmp_path), keep=5)
    for number in range(8):
        sender.send(STEP._replace(sequence=number))
    assert sender.lost == 3
    receiver = _receiver(tmp_path)               # a supervisor comes back
    sender.flush()
    assert _drain(receiver) == [3, 4, 5, 6, 7]


def test_a_run_directory_may_have_a_long_path(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)           # a socket's own path ends at 107 bytes
    directory.mkdir()
    receiver, sender = _receiver(directory), wire.Sender(str(directory))
    sender.send(STEP)
    assert _drain(receiver) == [STEP.sequence]


@pytest.mark.parametrize(("field", "value"), [
    ("pid", "12"), ("pid", True), ("start_time", None), ("role", 1), ("rank", "0"), ("hooks", []), ("hooks", {"ranks": []}),
    ("hooks", {"ranks": {"state": 1}}), ("facts", []), ("facts", {"faults": 1}), ("facts", {"faults": ["x"]}),
    ("facts", {"faults": [{"hook": "line"}]}),
    ("facts", {"faults": [{"hook": "line", "where": [], "error": "", "replicated": True}]})])
def test_a_hello_with_a_field_of_another_form_is_a_wire_error(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "hello-12.json"
    path.write_text(json.dumps({**HELLO._asdict(), "schema": 3, field: value}))
    with pytest.raises(wire.WireError, match=r"field|form"):
        wire.read_json(str(path), wire.Hello)


def test_a_hello_nested_without_end_is_a_wire_error(tmp_path: Path) -> None:
    path = tmp_path / "hello-12.json"
    path.write_text("[" * 200_000)
    with pytest.raises(wire.WireError, match="not JSON"):
        wire.read_json(str(path), wire.Hello)


@pytest.mark.parametrize("record", [
    STEP._replace(over="x"), STEP._replace(chunks=[["a", 1]]), STEP._replace(chunks=5), STEP._replace(pid=[12]),
    STEP._replace(milliseconds="1"), FAULT._replace(where=[]), FAULT._replace(replicated=1)])
def test_a_record_with_a_field_of_another_form_is_a_wire_error(record: Any) -> None:
    with pytest.raises(wire.WireError, match="is of another form"):
        wire.decode(wire.encode(record))


def test_a_record_that_never_fits_holds_up_no_other(tmp_path: Path) -> None:
    receiver, sender = _receiver(tmp_path), wire.Sender(str(tmp_path))
    sender.send(STEP._replace(sequence=1, chunks=[[1, 1]] * 200_000))
    sender.send(STEP._replace(sequence=2))
    assert _drain(receiver) == [2] and sender.lost == 1


def test_a_page_has_its_block_before_anything_is_written(tmp_path: Path) -> None:
    """A full disk must be an OSError here and not a SIGBUS at the first write."""
    pages.Page(str(tmp_path / "page"), "Q", True)
    assert (tmp_path / "page").stat().st_blocks * 512 >= 4096


def test_a_write_that_fails_leaves_the_old_file_and_no_half_of_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    wire.write_json(str(path), {"a": 1})
    (tmp_path / "other").mkdir()
    with pytest.raises(IsADirectoryError):
        wire.write_json(str(tmp_path / "other"), {"a": 2})
    with pytest.raises(TypeError):
        wire.write_json(str(path), {"a": {2}})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file.json", "other"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_the_guard_which_imports_nothing_of_ours_writes_pages_of_the_same_schema() -> None:
    found = (ROOT / "supervisor" / "tightrank" / "guard" / "page.py").read_text()
    assert f"\nSCHEMA = {wire.SCHEMA}\n" in found
