"""The archive: whole or not there, private, bounded, without secrets; what goes in; who waits for whom."""
from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import wait_until
from hypothesis import given
from hypothesis import strategies as st
from samples import TOO_SMALL, status, worker
from tightrank import bundle, plan
from tightrank.bundle import Done, Job, Part, Writer, parts, secrets
from tightrank.bundle.memory import Memory
from tightrank.config import Config, load
from tightrank.host import HostFacts
from tightrank.inputs import Inputs
from tightrank.records import Failure, Line, MemoryReading, ProcessId, RankReading, Snapshot, WorkerReading
from unpack import unpack

PLANTED = {"url": "someone:opensesame77",
           "file": "sk-file-7d1f0a2b", "argument": "sk-arg-99aa88bb", "env": 'hf_"quoted"\\token', "token": "tok-5e5e5e5e",
           "worker env": "wenv-secret-1234", "gateway": "gw-key-31415926"}


def same(text: str) -> str:
    return text


# --- one archive ------------------------------------------------------------------------------------------------------

def test_an_archive_is_private_and_holds_the_end_of_what_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    bundle.write(path, [("a.txt", "short"), ("b.txt", "x" * bundle.MEMBER_BYTES + "the end")], same)
    found = unpack(path)
    assert found["a.txt"] == "short" and len(found["b.txt"]) == bundle.MEMBER_BYTES and found["b.txt"].endswith("the end")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["x.tar.gz"]


def test_there_are_not_more_members_than_allowed(tmp_path: Path) -> None:
    bundle.write(tmp_path / "x.tar.gz", ((f"{number}.txt", "") for number in range(10 * bundle.MEMBERS)), same)
    found = unpack(tmp_path / "x.tar.gz")
    assert len(found) == bundle.MEMBERS + 1 and "left-out.txt" in found


def test_what_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Part]:
        yield "a.txt", "x"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        bundle.write(tmp_path / "x.tar.gz", broken(), same)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("room", [0, 1, 500, 20_000])
def test_a_disk_that_is_full_half_way_leaves_nothing(tmp_path: Path, room: int) -> None:
    """RLIMIT_FSIZE stands in for it."""
    old_handler, old_limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, old_limit[1]))
        with pytest.raises(OSError, match="File too large"):
            bundle.write(tmp_path / "x.tar.gz", [("a.txt", random.Random(1).randbytes(100_000).hex())], same)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limit)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert not os.listdir(tmp_path)


def test_the_oldest_go_and_what_a_dead_process_left_half_done(tmp_path: Path) -> None:
    names = [bundle.name_of(second, "w0-1") for second in range(0, 50, 10)]
    assert names == sorted(names)
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100)
    for name in (".x.tar.gz.4194305.7.tmp", f".y.tar.gz.{os.getpid()}.7.tmp", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    bundle.tidy(tmp_path, keep_files=4)
    assert [path.name for path in bundle.found(tmp_path)] == names[1:]
    bundle.tidy(tmp_path, keep_bytes=250)
    assert [path.name for path in bundle.found(tmp_path)] == names[3:]
    bundle.tidy(tmp_path, keep_bytes=1)
    assert [path.name for path in bundle.found(tmp_path)] == names[4:], "never the newest"
    assert {path.name for path in tmp_path.iterdir()} == {names[4], f".y.tar.gz.{os.getpid()}.7.tmp", "notes.txt"}
    assert bundle.found(tmp_path / "none") == []


# --- the thread -------------------------------------------------------------------------------------------------------

def job(number: int, made: Callable[[], Iterator[Part]] = lambda: iter([("a.txt", "x")])) -> Job:
    return Job("w0", number, f"{number}.tar.gz", made, same)


def collect(writer: Writer, count: int) -> list[Done]:
    done: list[Done] = []
    wait_until(lambda: (done.extend(writer.take()), len(done) >= count)[1], 20, f"{count} bundles")
    return done


def test_one_at_a_time_in_order_and_whoever_puts_never_waits(tmp_path: Path) -> None:
    gate, woken = threading.Event(), threading.Event()

    def slow() -> Iterator[Part]:
        assert gate.wait(20)
        yield "a.txt", "x"

    writer = Writer(tmp_path / "bundles", woken.set)
    for number in range(2 * bundle.WAITING):
        writer.put(job(number, slow))
    refused = collect(writer, 1)
    assert all("others wait" in done.trouble for done in refused)
    gate.set()
    kept = collect(writer, 2 * bundle.WAITING - len(refused))
    writer.close(20)
    made = [done.generation for done in kept if not done.trouble]
    assert woken.is_set() and made == sorted(made) and bundle.WAITING <= len(made) <= bundle.WAITING + 1
    assert {path.name for path in bundle.found(tmp_path / "bundles")} == {f"{number}.tar.gz" for number in made}
    assert stat.S_IMODE((tmp_path / "bundles").stat().st_mode) == 0o700


def test_a_thread_is_there_only_while_there_is_something_to_write(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "bundles", lambda: None)
    for number in range(3):
        writer.put(job(number))
        assert collect(writer, 1)[0].trouble == ""
        wait_until(lambda: not any(thread.name == "bundles" for thread in threading.enumerate()), 20, "no thread")


@pytest.mark.parametrize("trouble", ["a file in its place", "no place"])
def test_a_disk_that_takes_nothing_is_said_and_the_next_one_is_tried(tmp_path: Path, trouble: str) -> None:
    directory = tmp_path / "bundles"
    if trouble == "a file in its place":
        directory.write_text("")
    else:
        directory = tmp_path / "none" / "bundles"
    writer = Writer(directory, lambda: None)
    writer.put(job(1))
    assert collect(writer, 1)[0].trouble
    directory.unlink(missing_ok=True)
    directory.parent.mkdir(exist_ok=True)
    writer.put(job(2))
    assert collect(writer, 1)[0].trouble == ""


def test_a_fault_of_ours_costs_one_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def faulty() -> Iterator[Part]:
        yield "a.txt", "x"
        raise ZeroDivisionError

    writer = Writer(tmp_path / "bundles", lambda: None)
    writer.put(job(1, faulty))
    wait_until(lambda: raised, 20)
    writer.put(job(2))
    assert collect(writer, 1)[0].generation == 2
    assert [path.name for path in bundle.found(tmp_path / "bundles")] == ["2.tar.gz"]


# --- secrets ----------------------------------------------------------------------------------------------------------

@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A deployment with a secret in each place that one can stand in."""
    for name, text in (("key", PLANTED["file"]), ("token", PLANTED["token"]), ("gateway", PLANTED["gateway"])):
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    body = {"name": "test", "engine": "vllm", "model": str(tmp_path / "model"), "state_directory": str(tmp_path / "state"),
            "http": {"token_file": str(tmp_path / "token")}, "gateway": {"engine_key_file": str(tmp_path / "gateway")},
            "workers": [{"name": "w0", "api_key_file": str(tmp_path / "key"), "args": ["--hf-token", PLANTED["argument"],
                                                                   "--otlp-traces-endpoint", f"http://{PLANTED['url']}@c:1"],
                         "env": {"MY_PASSWORD": PLANTED["worker env"], "TOKENIZERS_PARALLELISM": "false"}}]}
    (tmp_path / "tightrank.yaml").write_text(json.dumps(body))
    return load(tmp_path / "tightrank.yaml", {}, []).config


ENVIRONMENT = {"HF_TOKEN": PLANTED["env"], "MAX_TOKENS": "131072", "HOME": "/root", "SOME_KEY": "short"}


def test_all_secrets_are_known_and_nothing_else(config: Config) -> None:
    assert sorted(secrets.known(config, ENVIRONMENT)) == sorted(PLANTED.values())


def test_a_key_file_that_cannot_be_read_hinders_nothing(config: Config, tmp_path: Path) -> None:
    (tmp_path / "key").unlink()
    assert PLANTED["file"] not in secrets.known(config, ENVIRONMENT)


def failure(config: Config, tmp_path: Path) -> tuple[Failure, parts.Scene]:
    """One in which the engine and everybody else has printed each secret, plain and as JSON."""
    run = tmp_path / "state" / "run" / "w0-3"
    run.mkdir(parents=True)
    said = [f"{name}: {text} and {json.dumps(text)}" for name, text in PLANTED.items()]
    (run / "stacks-77").write_text("\n".join(["Thread 0x7f (most recent call first):", *said]))
    (run / "hello-77.json").write_text(json.dumps({"role": "scheduler", "rank": 0}))
    (run / "stacks-78").write_text("")
    lines = tuple(Line(number, float(number), stream, f"(Worker_TP0 pid=77) {text}" if number % 2 else text)
                  for stream in ("stdout", "stderr") for number, text in enumerate(said))
    given = Inputs(ENVIRONMENT, {"max_position_embeddings": 4096}, {"w0": PLANTED["file"]})
    specs = plan.build(config, HostFacts(None, None), given)
    diagnosis = replace(TOO_SMALL, evidence=tuple(said))
    seen = status(worker(log_tail=tuple(said), diagnosis=diagnosis))
    memory = Memory()
    memory.add(snapshot(1.0))
    scene = parts.Scene(config, specs, seen, [{"sequence": 1, "sentence": text} for text in said], memory.samples())
    return Failure("w0", 3, 1e9, diagnosis, "0.5.23", lines, str(run), "stacks of 1 of 2 processes"), scene


def test_no_secret_is_in_any_member_and_all_that_is_wanted_is(config: Config, tmp_path: Path) -> None:
    broken, scene = failure(config, tmp_path)
    path = tmp_path / "x.tar.gz"
    bundle.write(path, parts.of_failure(broken, scene), secrets.scrubber(secrets.known(config, ENVIRONMENT)))
    found = unpack(path)
    for name, text in found.items():
        for place, secret in PLANTED.items():
            assert secret not in text and json.dumps(secret)[1:-1] not in text, f"{place} in {name}"
    assert {"summary.json", "diagnosis.json", "versions.json", "journal.jsonl", "status.json", "config.json", "plan.json",
            "memory.jsonl", "lines/stdout.txt", "lines/stderr.txt", "lines/stderr-Worker_TP0-77.txt",
            "stacks/scheduler-0-stacks-77.txt"} <= found.keys() and not any("stacks-78" in name for name in found)
    assert json.loads(found["diagnosis.json"])["cause"] == "kv-pool-too-small"
    assert json.loads(found["versions.json"])["engines"] == {"w0": "0.5.23"}
    assert json.loads(found["config.json"])["workers"][0]["env"] == {"MY_PASSWORD": "***", "TOKENIZERS_PARALLELISM": "***"}
    assert json.loads(found["memory.jsonl"])["available_bytes"] == 5 << 30
    assert [json.loads(row)["sequence"] for row in found["journal.jsonl"].splitlines()] == [1] * len(PLANTED)
    for name in ("plan.json", "status.json", "summary.json"):
        json.loads(found[name])


def test_the_bundle_of_a_state_directory_has_no_secret_either(config: Config, tmp_path: Path) -> None:
    failure(config, tmp_path)
    state = tmp_path / "state"
    (state / "logs").mkdir()
    said = "\n".join(f"--api-key {text}, {json.dumps(text)}" for text in PLANTED.values())
    for name in ("journal.jsonl", "logs/w0.log", "run/guard.jsonl"):
        (state / name).write_text(said)
    for number in (1, 2, 10):
        (state / "run" / f"w0-{number}").mkdir()
    (state / "run" / "w0-10" / "pyspy-5").write_text(said)
    path = tmp_path / "x.tar.gz"
    bundle.write(path, parts.of_state(state, config, (), said), secrets.scrubber(secrets.known(config, ENVIRONMENT)))
    found = unpack(path)
    assert not [(name, text) for name, text in found.items() for secret in PLANTED.values() if secret in text]
    assert {"journal.jsonl", "logs/w0.log", "run-guard.jsonl", "w0-3/stacks/scheduler-0-stacks-77.txt",
            "w0-10/stacks/pyspy-5.txt", "versions.json", "status.json"} <= found.keys()


_LETTERS = 'ab1"\\é'        # few, so that secrets lie in each other


@given(st.lists(st.text(_LETTERS, min_size=4, max_size=9), min_size=1, max_size=5), st.text(_LETTERS, max_size=9))
def test_a_secret_never_survives_wherever_it_stands(found: list[str], filling: str) -> None:
    scrub = secrets.scrubber(found)
    for secret in found:
        text = f"{filling}{secret}{filling}{secret}"
        assert not [each for each in found for shown in (scrub(text), scrub(json.dumps(text))) if each in shown]


# --- members ----------------------------------------------------------------------------------------------------------

def test_of_a_file_that_is_too_long_only_whole_lines_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("sk-secret-key-1234\nsecond\nthird\n")
    assert parts.tail(path, 20) == "second\nthird\n"
    assert parts.tail(path, 12) == "third\n"
    assert parts.tail(tmp_path / "none") == "" and "cannot be read" in parts.tail(tmp_path)


def test_lines_are_sorted_by_who_said_them() -> None:
    texts = {"(EngineCore pid=12) INFO x": "stderr-EngineCore-12", "(Worker_TP1 rank=1 pid=13) x": "stderr-Worker_TP1-13",
             "[2026-11-30 12:00:00 TP0] Decode batch": "stderr-TP0", "[2026-11-30 12:00:00 DP1 TP0] x": "stderr-DP1-TP0",
             "[2026-11-30 12:00:00] server": "stderr", "INFO:     1.2.3.4 - GET": "stderr"}
    for text, name in texts.items():
        assert dict(parts.line_parts([Line(0.0, 0.0, "stderr", text)])) == {f"lines/{name}.txt": f"0.000 {text}\n"}
    many = [Line(0.0, 0.0, "stdout", f"(W pid={number}) x") for number in range(500)]
    assert len(dict(parts.line_parts(many))) <= parts.STREAMS + 1


def test_the_kernels_lines_are_read_up_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("6,1,1,-;first\n")
    assert dict(parts.kernel_part(str(path))) == {"kernel.txt": "6,1,1,-;first\n"}
    assert not dict(parts.kernel_part(str(tmp_path / "none")))


def snapshot(now: float, rank_bytes: int | None = 5 << 30) -> Snapshot:
    rank = RankReading(ProcessId(1, 1), "worker", 0, 0, 0, 0, None, "", True, {}, {}, rank_bytes, "", 0.0, 1, 1, 1, 0)
    memory = MemoryReading(now, 8 << 30, 5 << 30, None, None, 5 << 30, 0.5, None)
    return Snapshot(now, 1e9 + now, memory, {"w0": WorkerReading("w0", 1, None, (), (rank,), (), ())}, {})


def test_memory_is_kept_once_a_second_and_for_a_while() -> None:
    memory = Memory()
    for tick in range(100):
        memory.add(snapshot(tick / 10))
    assert len(memory.samples()) == 10 and memory.samples()[0].ranks == ()
    memory.add(snapshot(1000.0, 1 << 30))
    assert memory.samples()[-1].ranks == (("w0 worker 0", 1 << 30),)
    memory.add(snapshot(1001.0, None))
    assert memory.samples()[-1].ranks == (("w0 worker 0", None),), "unknown is never left out"
    for tick in range(5000):
        memory.add(snapshot(2000.0 + tick))
    assert len(memory.samples()) == 1800 and memory.samples()[-1].monotonic == 6999.0


def test_a_bundle_is_shown_in_the_status() -> None:
    shown: Mapping[str, object] = parts.plain(worker(bundle="x.tar.gz"))
    assert shown["bundle"] == "x.tar.gz"
