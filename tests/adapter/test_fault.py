"""What is ours may raise; the engine's call happens once, as it was meant, and its errors are its own."""
from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import INJECT

sys.path.insert(0, str(INJECT))


class Adapter(SimpleNamespace):
    """Fresh modules of the adapter in a process that said hello as rank 1, and the supervisor's end of its socket."""

    def hello(self) -> Any:
        return self.wire.read_json(self.wire.hello_path(str(self.directory), os.getpid()), self.wire.Hello)

    def received(self) -> list[Any]:
        found = []
        while True:
            try:
                found.append(self.wire.decode(self.socket.recv(65536)))
            except BlockingIOError:
                return found


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Adapter]]:
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("tightrank_adapter")}
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def start(**drill: Any) -> Adapter:
        modules = {name: importlib.import_module(f"tightrank_adapter.{name}") for name in ("fault", "pages", "rank", "wire")}
        wire = modules["wire"]
        descriptor = os.open(directory, os.O_PATH)
        receiver.bind(wire.socket_address(str(directory), descriptor))
        os.close(descriptor)
        wire.write_settings(str(directory), wire.Settings("w", 1, "sglang", {"ranks": {}, "line": {}}, drill))
        modules["rank"].settings(str(directory))
        modules["rank"].hello("main", rank=1)
        return Adapter(directory=directory, socket=receiver, **modules)

    yield start
    receiver.close()
    for name in [name for name in sys.modules if name.startswith("tightrank_adapter")]:
        del sys.modules[name]
    sys.modules.update(kept)


class Engine:
    """What is wrapped: tells its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run(self, first: Any, *, second: Any = None) -> Any:
        self.calls.append((first, second))
        if first == "bad":
            raise KeyError("the engine's own")
        return first


@pytest.fixture
def engine() -> type[Engine]:
    return type("Engine", (Engine,), {"run": Engine.run})


def test_ours_sees_the_call_and_the_engine_is_called_once(begin: Callable[..., Adapter], engine: type[Engine]) -> None:
    adapter, seen = begin(), []
    adapter.fault.wrap(engine, "run", "line", before=lambda self, first, second: (first, second),
                       after=lambda token, result, self, first, second: seen.append((token, result)))
    subject = engine()
    assert subject.run(1, second=2) == 1
    assert subject.calls == [(1, 2)] and seen == [((1, 2), 1)]
    assert adapter.fault.is_wrapped(engine.run, "line") and not adapter.fault.is_wrapped(engine.run, "ranks")


def test_an_answer_stands_in_and_replaces(begin: Callable[..., Adapter], engine: type[Engine]) -> None:
    answer = begin().fault.Answer
    fault = sys.modules["tightrank_adapter.fault"]
    fault.wrap(engine, "run", "line", before=lambda self, first: answer("ours") if first == 0 else None,
               after=lambda token, result, self, first: answer(result * 2))
    subject = engine()
    assert (subject.run(0), subject.run(4), subject.calls) == ("ours", 8, [(4, None)])


def test_what_the_engine_raises_is_untouched_and_no_fault(begin: Callable[..., Adapter], engine: type[Engine]) -> None:
    adapter, after = begin(), []
    adapter.fault.wrap(engine, "run", "line", after=lambda *args: after.append(args))
    subject = engine()
    with pytest.raises(KeyError, match="the engine's own"):
        subject.run("bad")
    assert len(subject.calls) == 1 and not after
    assert adapter.hello().facts == {} and not adapter.received()


def test_a_fault_is_told_and_the_hook_ends_with_its_fallback(begin: Callable[..., Adapter],
                                                             engine: type[Engine]) -> None:
    adapter, tried, tokens = begin(), [], []

    def before(self: Any, first: Any) -> None:
        tried.append(first)
        raise ZeroDivisionError("ours")

    adapter.fault.wrap(engine, "run", "line", before=before, fallback=lambda self, first: "least", replicated=True,
                       after=lambda token, result, self, first: tokens.append(token))
    subject = engine()
    assert [subject.run(number) for number in range(5)] == [0, 1, 2, 3, 4]
    assert len(subject.calls) == 5 and tokens == ["least"] * 5
    assert tried == [0, 1, 2], "after three faults ours is not tried again"
    facts = adapter.hello().facts
    assert facts["fault_count"] == 3
    assert facts["faults"][0] == {"hook": "line", "where": "Engine.run", "error": "ZeroDivisionError: ours",
                                  "replicated": True}
    faults = adapter.received()
    assert [(fault.hook, fault.where, fault.replicated, fault.pid) for fault in faults] == [
        ("line", "Engine.run", True, os.getpid())] * 3


def test_faults_of_one_hook_leave_the_other_alone(begin: Callable[..., Adapter], engine: type[Engine]) -> None:
    adapter, beats = begin(), []
    adapter.fault.wrap(engine, "run", "line", before=lambda *args: 1 // 0)
    adapter.fault.wrap(engine, "run", "ranks", before=lambda self, first: beats.append(first))
    subject = engine()
    for number in range(5):
        assert subject.run(number) == number
    assert beats == [0, 1, 2, 3, 4]


def test_a_fallback_or_an_after_that_raises_harms_nobody(begin: Callable[..., Adapter], engine: type[Engine]) -> None:
    adapter = begin()
    adapter.fault.wrap(engine, "run", "line", before=lambda *args: 1 // 0, fallback=lambda *args: 1 // 0,
                       after=lambda *args: 1 // 0)
    adapter.fault.wrap(engine, "run", "ranks", after=lambda *args: 1 // 0)
    subject = engine()
    assert [subject.run(number) for number in range(9)] == list(range(9))
    assert len(subject.calls) == 9


def test_an_unwritable_run_directory_harms_nobody(begin: Callable[..., Adapter], engine: type[Engine],
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    adapter = begin()
    adapter.fault.wrap(engine, "run", "line", before=lambda *args: 1 // 0)
    for file in adapter.directory.iterdir():
        file.unlink()
    adapter.directory.rmdir()
    assert engine().run(1) == 1
    assert "hello not written" in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "raises"), [(None, True), ([1], True), ([0, 2], False)])
def test_a_drill_raises_in_our_part_on_its_ranks(begin: Callable[..., Adapter], engine: type[Engine],
                                                 ranks: list[int] | None, raises: bool) -> None:
    adapter = begin(where="Engine.run", ranks=ranks)
    adapter.fault.wrap(engine, "run", "line", before=lambda self, first: None)
    assert engine().run(1) == 1
    assert bool(adapter.received()) == raises


def test_a_failed_hook_stays_failed(begin: Callable[..., Adapter]) -> None:
    adapter = begin()
    adapter.rank.hello("scheduler", rank=0)
    adapter.fault.contained("line", "here", lambda module: adapter.fault.require(module, "gone", "9.9"))(Engine)
    adapter.rank.hook("line", adapter.wire.IN_FORCE)
    assert adapter.hello().hooks["line"] == {"state": "failed", "wanted": "Engine.gone",
                                             "found": "no such attribute in 9.9"}
    assert adapter.hello().hooks["ranks"]["state"] == "wanted"


def test_steps_and_beats_are_counted(begin: Callable[..., Adapter]) -> None:
    adapter = begin()
    adapter.rank.beat(4)
    adapter.rank.step([[100, 20], [0, 5]], 9_000, False, 1.5, None)
    [step] = adapter.received()
    assert (step.rows, step.width, step.budget, step.sequence, step.rank) == (25, 120, 9_000, 1, 1)
    adapter.rank.beat()
    beat = adapter.pages.BeatReader(str(adapter.directory), os.getpid()).read()
    assert (beat.steps, beat.prefill_tokens, beat.in_flight) == (1, 25, 4)


def test_a_fact_that_json_cannot_hold_spoils_no_later_hello(begin: Callable[..., Adapter], engine: type[Engine]) -> None:
    adapter = begin()
    adapter.fault.wrap(engine, "run", "ranks", before=lambda self, first: adapter.rank.fact("kv_tokens", {first}))
    assert engine().run(1) == 1
    adapter.rank.fact("other", 2)
    facts = adapter.hello().facts
    assert facts["other"] == 2 and "kv_tokens" not in facts
    assert "not JSON serializable" in facts["faults"][0]["error"]


def test_a_kernel_that_starts_no_new_peak_gives_none(begin: Callable[..., Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    begin()
    peak = importlib.import_module("tightrank_adapter.peak")
    peak.reset()
    assert peak.read() > 0
    monkeypatch.setattr(peak, "_CLEAR_REFS", "/proc/self/no_such_file")
    peak._forget()                      # as in a child
    peak.reset()
    assert peak.read() is None
