"""Records count only from a process of ours that said hello in this generation."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import wait_until
from tightrank.adapter import INJECT, pages, wire
from tightrank.readers.ranks import RankReader, RecordSocket
from tightrank.records import ProcessId

SEND = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tightrank_adapter import pages, wire
directory, pid, generation = sys.argv[2], int(sys.argv[3]) or os.getpid(), int(sys.argv[4])
wire.Sender(directory).send(wire.Fault(generation, pid, "line", "here", "E", False))
print(os.getpid())
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / ("long" * 30)          # a socket's path may hold 107 bytes, a run directory's more
    path.mkdir(mode=0o700)
    return path


def send(directory: Path, pid: int = 0, generation: int = 3) -> int:
    done = subprocess.run([sys.executable, "-c", SEND, str(INJECT), str(directory), str(pid), str(generation)],
                          capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_who_is_heard(directory: Path) -> None:
    receiver = RecordSocket(directory)
    known = {send(directory)}
    assert len(receiver.receive(3, known)) == 1
    stranger = send(directory)
    assert receiver.receive(3, {os.getpid()}) == [] and stranger
    send(directory, pid=os.getpid())         # says it is another process
    assert receiver.receive(3, {os.getpid()}) == []
    known = {send(directory, generation=2)}
    assert receiver.receive(3, known) == []
    assert receiver.refused == 3
    receiver.close()


def test_garbage_is_counted(directory: Path) -> None:
    receiver = RecordSocket(directory)
    sender = wire.Sender(str(directory))
    me = os.getpid()
    unformed = (wire.Fault(3, me, ["line"], "here", "E", False), wire.Step(3, me, 1, 0, 1, 1, 1, 1, "x", 1.0, None, []))
    garbage = (b"", b"\xff", b"[]", b"[1,\"step\"]", b"{}", b"[1,\"fault\",1,2,3]", b"[" * 5000, *map(wire.encode, unformed))
    for datagram in garbage:
        sender._waiting.append(datagram)
        sender.flush()
        assert receiver.receive(3, {me}) == []
    assert receiver.refused == len(garbage)
    receiver.close()


def hello(directory: Path, **changes: object) -> None:
    values = {"pid": os.getpid(), "start_time": wire.start_time(os.getpid()), "role": "scheduler", "engine": "sglang",
              "engine_version": "0", "worker": "w", "generation": 3, "rank": 0, "tp_rank": 0, "pp_rank": 0, "dp_rank": None,
              "device": None, "hooks": {}, "facts": {}, **changes}
    wire.write_hello(str(directory), wire.Hello(**values))


def test_hellos_of_others_are_problems_and_not_ranks(directory: Path) -> None:
    reader = RankReader(directory, "w", 3)
    hello(directory)
    (directory / "hello-1.json").write_text('{"schema": 1, "pid"')
    (directory / "hello-2.json").write_text('{"schema": 99}')
    hello(directory, pid=3, generation=2)
    garbage = ({"start_time": "x"}, {"hooks": []}, {"hooks": {"line": 1}}, {"facts": {"faults": [{"hook": "line"}]}})
    for pid, changes in enumerate(garbage, 4):
        hello(directory, **{"pid": pid, **changes})
    ranks, problems = reader.read(lambda _: True, lambda _: (5, ""))
    assert [rank.id.pid for rank in ranks] == [os.getpid()] and len(problems) == 7
    assert ranks[0].beat_age_seconds is None and ranks[0].available_bytes == 5
    pages.BeatWriter(str(directory)).beat()
    ranks, _ = reader.read(lambda _: True, lambda _: (None, "unreadable"))
    assert ranks[0].loops == 2 and ranks[0].available_bytes is None and ranks[0].available_why == "unreadable"
    reader.close()


def test_a_dead_process_is_told_by_pid_and_start_time(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId(child.pid, wire.start_time(child.pid))
    hello(directory, pid=identity.pid, start_time=identity.start_time)
    from tightrank.watch import _alive
    reader = RankReader(directory, "w", 3)
    assert reader.read(_alive, lambda _: (1, ""))[0][0].alive
    assert not _alive(ProcessId(identity.pid, identity.start_time + 1))
    child.kill()
    wait_until(lambda: not reader.read(_alive, lambda _: (1, ""))[0][0].alive, 5)      # a zombie is dead
    child.wait()
    reader.close()
