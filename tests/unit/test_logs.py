"""Output of engines: lines that are torn, endless, not UTF-8 or rewritten by \\r; a disk that is full."""
from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from helpers import wait_until
from hypothesis import given
from hypothesis import strategies as st
from tightrank import logs
from tightrank.logs import LONGEST_LINE_BYTES, Lines, Pipe, Sink
from tightrank.records import Line


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), min_size=1)
                .filter(lambda text: text == text.rstrip() and text), max_size=8), st.integers(1, 7))
def test_cuts_do_not_matter(whole: list[str], size: int) -> None:
    data = "".join(text + "\n" for text in whole).encode()
    cutter = Lines("stdout")
    found = [line for start in range(0, len(data), size) for line in cutter.feed(data[start:start + size])]
    assert texts(found) == whole


def test_a_line_without_end_is_cut_and_the_rest_is_marked() -> None:
    cutter = Lines("stderr")
    found = cutter.feed(b"x" * (2 * LONGEST_LINE_BYTES) + b"RuntimeError: tail\n")
    assert len(found[0].text) == LONGEST_LINE_BYTES
    assert all(text.startswith("... ") for text in texts(found)[1:])       # no engine message begins so


def test_progress_bars_and_bytes_that_are_no_text() -> None:
    cutter = Lines("stdout")
    assert texts(cutter.feed(b"10%\r20%\r\nnot \xff text\n\n\n")) == ["10%", "20%", "not \ufffd text"]
    assert cutter.feed(b"no newline") == [] and texts(cutter.close()) == ["no newline"]


def test_a_pipe_is_read_without_waiting_and_knows_its_end() -> None:
    reading, writing = os.pipe()
    pipe = Pipe(reading, "stdout")
    assert pipe.read() == [] and pipe.open
    os.write(writing, b"one\ntwo")
    assert texts(pipe.read()) == ["one"] and pipe.open
    os.close(writing)
    assert texts(pipe.read()) == ["two"] and not pipe.open
    pipe.close()


def put(sink: Sink, *lines: str) -> None:
    sink.put("w", [Line(0.0, time.time(), "stdout", text) for text in lines])


def test_lines_go_to_a_private_file_and_to_the_console(tmp_path: Path) -> None:
    console = io.StringIO()
    sink = Sink(tmp_path, console)
    put(sink, "hello")
    sink.close()
    assert console.getvalue() == "w | hello\n"
    assert (tmp_path / "w.log").read_text().endswith("Z hello\n")
    assert (tmp_path / "w.log").stat().st_mode & 0o777 == 0o600


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 2000)
    sink = Sink(tmp_path, None)
    put(sink, *["x" * 100] * 100)
    sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.log", "w.log.1"]
    assert all(path.stat().st_size < 2300 for path in tmp_path.iterdir())


def test_a_disk_that_takes_nothing_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "w.log").symlink_to("/dev/full")
    console = io.StringIO()
    sink = Sink(tmp_path, console)
    put(sink, "one", "two")
    wait_until(lambda: sink.lost == 2, 5)
    assert "No space left" in sink.trouble and console.getvalue().count("\n") == 2
    sink.close()


class Stuck(io.StringIO):
    """A terminal that nobody reads: the first write never returns."""

    def write(self, text: str) -> int:
        time.sleep(3600)
        return 0


def test_a_stuck_console_does_not_hold_the_caller(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Stuck(), keep=100)
    started = time.monotonic()
    for _ in range(50):
        put(sink, *["y"] * 20)
    assert time.monotonic() - started < 2 and sink.lost > 800
    sink.close(timeout_seconds=0.1)


def test_a_stuck_console_costs_the_file_nothing(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Stuck())
    sink.say("our own words")
    put(sink, *["z"] * 50)
    wait_until(lambda: (tmp_path / "w.log").exists() and (tmp_path / "w.log").read_text().count(" z\n") == 50, 5)
    sink.close(timeout_seconds=0.1)


class Closed(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_console_that_nobody_reads_any_more_is_given_up(tmp_path: Path) -> None:
    sink = Sink(tmp_path, Closed())
    sink.say("our own words")
    put(sink, "one", "two")
    sink.close()
    assert (tmp_path / "w.log").read_text().count("\n") == 2
