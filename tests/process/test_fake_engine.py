"""The fake engine is what its text says: titles, hello, HTTP, faults. Other tests stand on it."""
from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import FAKE_ENGINE, INJECT, kill, processes, session_pids, wait_until
from tightrank_adapter import line, pages, wire

LINE = {"budget": 1_500_000, "minimum": 64, "maximum": 1024, "granule": 64, "rule": "span", "step": "granule"}


class Fake:
    """One running fake engine with its run directory and the records that it sent."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, directory: Path, records: socket.socket) -> None:
        self.process, self.port, self.directory, self.records = process, port, directory, records

    def call(self, path: str, body: object = None, timeout: float = 30) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:
            return 0, None

    def hellos(self) -> dict[str, wire.Hello]:
        found = [wire.read_json(str(path), wire.Hello) for path in self.directory.glob("hello-*.json")]
        return {hello.role + ("" if hello.rank is None else str(hello.rank)): hello for hello in found}

    def steps(self) -> list[wire.Step]:
        steps = []
        while True:
            try:
                steps.append(wire.decode(self.records.recv(65536)))
            except BlockingIOError:
                return steps


Start = Callable[..., Fake]


@pytest.fixture
def start(spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, free_port: int) -> Iterator[Start]:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    records = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    records.bind(str(directory / wire.RECORDS))
    records.setblocking(False)

    def begin(engine: str, *flags: str, ready: bool = True, **keywords: Any) -> Fake:
        wire.write_settings(str(directory), wire.Settings("w0", 3, engine, {"ranks": {}, "line": LINE}))
        pages.ControlWriter(str(directory)).publish(LINE["budget"])
        argv = [sys.executable, FAKE_ENGINE, "--engine", engine, "--port", str(free_port), "--load-seconds", "0.1",
                *flags]
        process = spawn(argv, {"TIGHTRANK_ADAPTER": str(directory), "PYTHONPATH": str(INJECT)}, **keywords)
        fake = Fake(process, free_port, directory, records)
        if ready:
            wait_until(lambda: fake.call("/health")[0] == 200, what="/health 200")
        return fake

    yield begin
    records.close()


def completion(fake: Fake, tokens: list[int], new: int = 1) -> tuple[int, Any]:
    return fake.call("/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": new})


def test_vllm_processes_hello_and_chunks_obey_the_line(start: Start) -> None:
    fake = start("vllm", "--children", "2", "--enforce-eager", "--max-num-seqs", "8", "MODEL")
    assert set(fake.hellos()) == {"main", "engine-core", "worker0", "worker1"}
    names = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in session_pids(fake.process.pid)}
    assert {b"VLLM::EngineCore", b"VLLM::Worker_TP0", b"VLLM::Worker_TP1"} <= names
    status, answer = completion(fake, [7] * 4000)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 4000)
    steps: list[wire.Step] = []

    def whole() -> bool:
        steps.extend(step for step in fake.steps() if step.rank == 0)
        return sum(step.rows for step in steps) == 4000

    wait_until(whole, what="records of all 4000 tokens")
    keywords = {key: value for key, value in LINE.items() if key != "budget"}
    for step in steps[:-1]:
        assert step.chunks[0][1] == line.chunk_tokens(LINE["budget"], step.chunks[0][0], **keywords)
        assert step.rows * step.width <= LINE["budget"] and not step.over


def test_sglang_takes_a_budget_by_control_request(start: Start) -> None:
    fake = start("sglang")
    assert set(fake.hellos()) == {"main", "detokenizer", "scheduler0"}
    assert fake.call("/set_internal_state", {"server_args": {"tightrank_line_budget": 150_000}}) == (200, [True])
    assert fake.hellos()["scheduler0"].facts["line_budget"] == 150_000
    status, answer = fake.call("/generate", {"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 2}})
    assert (status, answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (200, [2, 3], 0)
    assert {step.budget for step in fake.steps()} == {150_000}
    _, again = fake.call("/generate", {"input_ids": [1] * 2000, "sampling_params": {"max_new_tokens": 1}})
    assert again["meta_info"]["cached_tokens"] == 1984


def test_a_prompt_beyond_the_context_is_refused(start: Start) -> None:
    fake = start("vllm", "--max-model-len", "100")
    status, answer = completion(fake, [1] * 200)
    assert status == 400 and "maximum context length is 100" in answer["error"]["message"]


def test_a_dead_rank_ends_vllm_with_code_0_and_sglang_with_sigkill(start: Start) -> None:
    fake = start("vllm")
    kill(fake.hellos()["worker0"].pid)
    wait_until(lambda: fake.call("/health")[0] in (503, 0))
    assert fake.process.wait(30) == 0
    fake = start("sglang")
    kill(next(hello.pid for name, hello in fake.hellos().items()
              if name == "scheduler0" and Path(f"/proc/{hello.pid}").exists()))
    assert fake.process.wait(30) == -9
    wait_until(lambda: not session_pids(fake.process.pid), what="no process left")


def test_sigterm_finishes_the_work_in_flight(start: Start) -> None:
    fake = start("vllm", "--step-seconds", "0.05")
    with socket.create_connection(("127.0.0.1", fake.port)) as client:
        body = json.dumps({"model": "tiny", "prompt": [1] * 64, "max_tokens": 20}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(fake.steps, what="the request's first step")
        fake.process.terminate()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    assert fake.process.wait(30) == 0


def test_ignore_sigterm(start: Start) -> None:
    fake = start("vllm", "--ignore-sigterm")
    fake.process.terminate()
    assert completion(fake, [1])[0] == 200 and fake.process.poll() is None


def test_start_that_fails_prints_its_line(start: Start) -> None:
    fake = start("vllm", "--die-with-line", "ValueError: No available memory for the cache blocks.", "--exit-code", "3",
                 ready=False, stderr=subprocess.PIPE)
    _, errors = fake.process.communicate(timeout=30)
    assert fake.process.returncode == 3 and b"No available memory for the cache blocks." in errors


def test_lines_of_a_file_are_printed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("first line\nsecond line\n")
    fake = start("sglang", "--print-lines", str(tmp_path / "lines"), "--exit-after", "1", "--exit-code", "0",
                 ready=False, stderr=subprocess.PIPE)
    _, errors = fake.process.communicate(timeout=30)
    assert fake.process.returncode == 0 and b"first line\nsecond line\n" in errors


def test_serve_then_die(start: Start) -> None:
    assert start("sglang", "--serve-then-die", "0.5", ready=False).process.wait(30) == -9


@pytest.mark.parametrize("flag", ["--freeze", "--block-in-futex"])
def test_a_wedged_rank_stops_beating_and_answering(start: Start, flag: str) -> None:
    fake = start("sglang", flag)
    reader = pages.BeatReader(str(fake.directory), fake.hellos()["scheduler0"].pid)
    wait_until(lambda: time.monotonic_ns() - reader.read().monotonic_ns > 1_000_000_000, what="a beat one second old")
    assert fake.call("/generate", {"input_ids": [1]}, timeout=1) == (0, None)
    assert fake.process.poll() is None


def test_mute_accepts_and_never_answers(start: Start) -> None:
    fake = start("vllm", "--mute", "0.3")
    wait_until(lambda: fake.call("/health", timeout=0.5) == (0, None))
    with socket.create_connection(("127.0.0.1", fake.port), timeout=5):
        pass


def test_hooks_that_are_not_in_force(start: Start) -> None:
    hellos = start("sglang", "--children", "2", "--hook-failed", "line").hellos()
    assert hellos["scheduler0"].hooks["line"]["state"] == wire.IN_FORCE
    assert hellos["scheduler1"].hooks["line"]["state"] == wire.FAILED


def test_no_hello(start: Start) -> None:
    assert start("vllm", "--no-hello").hellos() == {}


def test_memory_is_held_and_grows(start: Start) -> None:
    fake = start("vllm", "--memory-mib", "64", "--grow-mib-per-second", "40")
    pid = fake.hellos()["worker0"].pid
    def resident_mib() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 // 1024
    assert resident_mib() >= 64
    wait_until(lambda: resident_mib() >= 110)
    fake.process.kill()


def test_an_orphan_holds_the_port(start: Start) -> None:
    fake = start("vllm", "--hold-port")
    tree = [pid for pid, _, parent, _ in processes() if parent == fake.process.pid]
    fake.process.send_signal(signal.SIGTERM)
    assert fake.process.wait(30) == 0
    wait_until(lambda: sum(Path(f"/proc/{pid}").exists() for pid in tree) == 1, what="one process left")
    orphans = [pid for pid in tree if Path(f"/proc/{pid}").exists()]
    with pytest.raises(OSError, match="in use"), socket.socket() as probe:
        probe.bind(("127.0.0.1", fake.port))
    assert [Path(f"/proc/{pid}/comm").read_text().strip() for pid in orphans] == ["orphan"]
    kill(orphans[0])
