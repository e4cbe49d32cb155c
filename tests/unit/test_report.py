"""The journal survives crashes and full disks; the board and its JSON forms are whole."""
from __future__ import annotations

import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import SUPERVISOR
from samples import TOO_SMALL, failed, status, worker
from tightrank.adapter import wire
from tightrank.records import Event, Phase
from tightrank.report import RING_STEPS, Board, Journal, plain, read_events, ready_json, status_json


def event(sentence: str, **data: object) -> Event:
    return Event(1.5, "phase", "w0", 1, sentence, data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_events_are_private_json_lines_with_growing_numbers(path: Path) -> None:
    journal = Journal(path)
    assert [journal.append(event("a\nb\udcff")), journal.append(event("c", x=math.nan, y=Phase.UP))] == [1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second = (json.loads(line) for line in path.read_bytes().splitlines())
    assert first == {"sequence": 1, "unix": 1.5, "kind": "phase", "worker": "w0", "generation": 1, "sentence": "a\nb\udcff",
                     "data": {}}
    assert second["data"] == {"x": None, "y": "up"}
    assert journal.recent(1) == [second] and journal.recent(0) == []
    assert journal.since(1) == [second] and journal.since(0, 1) == [first] and journal.since(2) == []


@pytest.mark.parametrize("tail", [b'{"sequence": 3, "sente', b'{"sequence": 3}garbage', b"\xff\xfe", b"\n\n[1]\nnull"])
def test_a_torn_tail_is_sealed_and_left_out(path: Path, tail: bytes) -> None:
    journal = Journal(path)
    journal.append(event("one"))
    journal.append(event("two"))
    journal.close()
    with path.open("ab") as file:
        file.write(tail)
    again = Journal(path)
    assert [e["sentence"] for e in again.recent(9)] == ["one", "two"]
    assert again.append(event("three")) == 3
    assert [e["sentence"] for e in read_events(path)] == ["one", "two", "three"]
    assert again.lost == 0


def test_killed_while_writing_loses_at_most_the_last_line(path: Path) -> None:
    """A real process appends without end and is killed: all but its last line are whole, and numbers go on."""
    code = ("import sys; from pathlib import Path; from tightrank.report import Journal; from tightrank.records import Event\n"
            "journal = Journal(Path(sys.argv[1]))\n"
            "while True: print(journal.append(Event(1.0, 'phase', 'w', 1, 'x' * 100)), flush=True)")
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(SUPERVISOR)})
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 200:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    journal = Journal(path)
    last = journal.sequence
    assert last >= 200 and journal.append(event("after")) == last + 1
    assert [e["sequence"] for e in read_events(path)] == list(range(1, last + 2))


def test_a_full_disk_costs_the_copy_on_disk_only(path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk: the write that crosses it is cut short, those after it fail."""
    journal = Journal(path)
    journal.append(event("one"))
    room = path.stat().st_size + 20
    old_handler, old_limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, old_limit[1]))
        journal.append(event("two"))
        journal.append(event("three"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert path.stat().st_size == room and journal.lost == 2
    assert [e["sentence"] for e in journal.recent(9)] == ["one", "two", "three"]
    journal.append(event("four"))
    assert [e["sentence"] for e in read_events(path)] == ["one", "four"]


def test_it_rotates_and_reads_across_the_cut(path: Path) -> None:
    journal = Journal(path, rotate_bytes=2000)
    for number in range(100):
        journal.append(event(f"event {number}"))
    files = sorted(path.parent.iterdir())
    assert [f.name for f in files] == ["journal.jsonl", "journal.jsonl.1", "journal.jsonl.2", "journal.jsonl.3"]
    assert all(f.stat().st_size <= 2000 and stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    kept = [e["sequence"] for name in reversed(files) for e in read_events(name)]
    assert kept == list(range(kept[0], 101))
    assert Journal(path).append(event("next")) == 101


def test_the_memory_is_bounded(path: Path) -> None:
    journal = Journal(path, ring_events=10)
    for number in range(25):
        journal.append(event(str(number)))
    assert [e["sequence"] for e in journal.since(0)] == list(range(16, 26))


def test_listeners_are_woken_until_they_leave(path: Path) -> None:
    journal, woken = Journal(path), []
    leave = journal.listen(lambda: woken.append(1))
    journal.append(event("a"))
    leave()
    journal.append(event("b"))
    assert woken == [1]


def test_many_threads_write_whole_lines_with_numbers_of_their_own(path: Path) -> None:
    journal = Journal(path)
    threads = [threading.Thread(target=lambda: [journal.append(event("x" * 500)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e["sequence"] for e in read_events(path)] == list(range(1, 201))


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(OSError, match="journal"):
        Journal(path)


def step(number: int) -> wire.Step:
    return wire.Step(1, 10, number, 0, number, 256, 4096, 10**6, False, 1.5, None, [[0, 256]])


def test_steps_are_numbered_per_worker_and_bounded() -> None:
    board = Board()
    board.add_steps("w0", [step(7), step(8)])
    board.add_steps("w0", [])
    board.add_steps("w1", [step(9)])
    assert [(s["id"], s["sequence"], s["chunks"]) for s in board.steps("w0")] == [(1, 7, [[0, 256]]), (2, 8, [[0, 256]])]
    assert [s["id"] for s in board.steps("w0", since=1)] == [2] and board.steps("none") == []
    board.add_steps("w0", [step(n) for n in range(RING_STEPS)])
    kept = board.steps("w0")
    assert len(kept) == RING_STEPS and kept[-1]["id"] == RING_STEPS + 2


def test_started_stays_and_fresh_does_not() -> None:
    board = Board()
    assert board.status is None and not board.fresh(10) and not board.started
    board.publish(status(failed()))
    assert board.fresh(10) and not board.started
    board.publish(status())
    board.publish(status(failed()))
    assert board.started
    stale = status()
    board.publish(status(updated_monotonic=stale.updated_monotonic - 11))
    assert not board.fresh(10)


def test_status_as_json_is_plain_and_says_what_a_cause_means() -> None:
    now = status()
    body = json.loads(json.dumps(status_json(status(failed(), worker(name="w1")), now.updated_monotonic), allow_nan=False))
    first, second = body["workers"]
    assert first["phase"] == "failed" and first["diagnosis"]["cause"] == TOO_SMALL.cause
    assert "no room for the KV cache" in first["diagnosis"]["meaning"]
    assert first["diagnosis"]["runbook"] == "docs/runbooks/causes.md#kv-pool-too-small"
    assert second["diagnosis"] is None and second["line"]["budget"] == 200_000_000
    assert second["ranks"][0]["id"] == {"pid": 101, "start_time": 7}
    assert body["updated_age_seconds"] == pytest.approx(0, abs=5) and "updated_monotonic" not in body
    assert body["memory"]["age_seconds"] == pytest.approx(0, abs=5)
    assert list(status_json(now)) == list(status_json(now))


def test_ready_names_cause_change_and_evidence() -> None:
    body = ready_json(status(failed()))
    assert not body["ready"]
    assert body["workers"]["w0"] == {
        "ready": False, "phase": "failed", "step": None, "reason": TOO_SMALL.summary, "cause": TOO_SMALL.cause,
        "change": TOO_SMALL.change, "evidence": list(TOO_SMALL.evidence), "numbers": {"fraction": 0.01}, "generation": 3,
        "runbook": "docs/runbooks/causes.md#kv-pool-too-small"}


def test_plain_takes_anything() -> None:
    assert plain({1: (Path("/x"), {2}, b"y", math.inf)}) == {"1": ["/x", [2], "b'y'", None]}


def test_output_is_shown_without_the_secrets_that_an_engine_prints() -> None:
    tail = ("server_args={'api_key': 'sk-1', 'port': 1}", "api_key=['sk-1', 'sk-2'], port=2", "Authorization: Bearer sk-1",
            "ready")
    shown = status_json(status(worker(log_tail=tail)))["workers"][0]["log_tail"]
    assert "sk-" not in str(shown)
    assert shown[0].endswith("'port': 1}") and shown[1].endswith("port=2") and shown[3] == "ready"


def test_a_rotation_that_cannot_make_its_file_moves_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, rotate_bytes=200)
    for number in range(6):
        journal.append(event(f"{number}"))
    held = {item.name: item.read_bytes() for item in path.parent.iterdir()}
    assert len(held) > 3
    (path.parent / "elsewhere").touch()
    (path.parent / "journal.jsonl.new").symlink_to("elsewhere")           # refused as ENOSPC would be: an OSError
    for _ in range(5):
        journal.append(event("x" * 100))
    assert journal.lost == 5
    assert {name: (path.parent / name).read_bytes() for name in held} == held


def test_started_is_once_for_each_worker_and_not_all_at_once() -> None:
    board = Board()
    board.publish(status(worker(), failed(name="w1")))
    assert not board.started
    board.publish(status(failed(), worker(name="w1")))
    assert board.started
