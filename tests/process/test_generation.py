"""One generation: starting the engine's process, asking its port, and what must not be told of it."""
from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import processes, wait_until
from tightrank import launch
from tightrank.breaker import Breaker
from tightrank.generation import Generation
from tightrank.readers.engine_http import Prober, probe
from tightrank.readers.process import ProcessTable
from tightrank.records import ActionKind, Decision, Diagnosis, Phase, WorkerReading, WorkerSpec
from tightrank.worker import Surroundings, Worker

KEY = "sk-of-the-engine"


@pytest.fixture
def spec(tmp_path: Path) -> WorkerSpec:
    return WorkerSpec(
        name="w", engine="vllm", role="both", argv=("sh", "-c", f"echo \"api_key='{KEY}'\"; exec sleep 60"), env={},
        host="127.0.0.1", port=1, model="/m", served_model="m", tensor_parallel=1, pipeline_parallel=1, devices=(), hooks={},
        line=None, context_tokens=None, schedule=(), drain_seconds=1, start_stall_seconds=1, api_key=KEY, generation=1,
        run_directory=str(tmp_path / "w-1"))


def children() -> set[int]:
    return {pid for pid, state, parent, _ in processes() if parent == os.getpid() and state != "Z"}


@pytest.mark.parametrize("call", ["pidfd_open", "dup"])
def test_a_start_that_fails_half_way_leaves_no_process(spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    before = children()
    monkeypatch.setattr(launch.os, call, refuse)
    with pytest.raises(OSError, match="Too many open files"):
        launch.spawn(spec, os.environ)
    assert children() == before


def test_a_null_byte_is_a_start_that_failed(spec: WorkerSpec) -> None:
    with pytest.raises(OSError, match="null byte"):
        launch.spawn(replace(spec, env={"A": "b\0c"}), os.environ)


def test_the_engines_key_is_masked_in_what_it_prints(spec: WorkerSpec) -> None:
    generation = Generation(spec, os.environ, 0, lambda *_: None, time.monotonic())
    try:
        lines = wait_until(lambda: generation.read_pipes(True), 10)
        assert lines[0].text == "api_key='***'" and KEY not in "".join(generation.tail())
    finally:
        generation.launched.process.kill()
        generation.launched.process.wait()
        generation.close()


def a_worker(spec: WorkerSpec, state: Path, next_generation: Callable[[str], int]) -> Worker:
    breaker = Breaker(state / "breaker.json", (), {}, lambda _: None)
    return Worker(spec, Surroundings(state, os.environ, Prober(lambda: None), next_generation, lambda: 0, breaker))


def test_a_start_that_fails_is_a_failure_like_others(spec: WorkerSpec, tmp_path: Path) -> None:
    def full(_: str) -> int:
        raise OSError(28, "No space left on device")

    worker = a_worker(spec, tmp_path, full)
    worker.apply(Decision(ActionKind.START, "w", 0, "start"), 1.0)
    view = worker.view(1.0)
    assert (view.phase, view.ended, view.failures_in_row) == (Phase.STOPPING, True, 1)      # decide: back off, or give up
    assert view.diagnosis is not None and (view.diagnosis.cause, view.diagnosis.restart_helps) == ("disk-full", True)


def test_what_it_printed_last_is_read_before_the_cause_stands(spec: WorkerSpec, tmp_path: Path) -> None:
    text = ("ValueError: To serve at least one request with the model's max seq len (32768), (4.00 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (1.00 GiB). Based on the available memory, the estimated "
            "maximum model length is 8192.")
    worker = a_worker(replace(spec, argv=("sh", "-c", f"echo \"{text}\" >&2")), tmp_path, lambda _: 1)
    worker.apply(Decision(ActionKind.START, "w", 0, "start"), 1.0)
    assert worker.run is not None and worker.run.launched.process.wait(10) == 0
    vague = Diagnosis("unknown", "it ended", (), "look", True)
    worker.apply(Decision(ActionKind.STOP, "w", 1, "it ended", vague), 2.0)
    worker.step_ending(ProcessTable.read(), 2.0)
    assert not worker.view(2.0).ended
    worker.read_pipes()
    wait_until(lambda: worker.step_ending(ProcessTable.read(), 2.1) or worker.view(2.1).ended, 20)
    assert worker.diagnosis is not None and worker.diagnosis.cause == "context-exceeds-kv-pool"
    worker.apply(Decision(ActionKind.FAIL, "w", 1, "failed", worker.diagnosis), 2.2)


@pytest.mark.parametrize(("kills", "cause"), [
    ([(0.0, 7), (1.0, 7)], "engine-exited"),                               # of an earlier generation
    ([(0.0, 7), (1.0, 8)], "killed-by-oom"),
    ([(0.0, None), (1.0, 8)], "engine-exited"),                            # how many there were before is not known
    ([(-30.0, 7), (-25.0, 8), (1.0, 8)], "engine-exited"),                 # of another process of the cgroup, long before
    ([(0.0, 7), (1.0, 7), (1.2, 8)], "killed-by-oom")])                    # read before the kill, polled after it
def test_the_kernel_is_blamed_for_a_kill_at_the_engines_end(
        spec: WorkerSpec, kills: list[tuple[float, int | None]], cause: str) -> None:
    generation = Generation(spec, os.environ, 0, lambda *_: None, -60.0)
    seen = WorkerReading("w", 1, generation.launched.main, (), (), (), ())
    try:
        for now, count in kills:
            if now >= 1.0:
                generation.launched.process.kill()
                generation.launched.process.wait()
            generation.observe(seen, count, now)
            assert generation.hurt == (now >= 1.0)
        assert generation.post_mortem(False).cause == cause
    finally:
        generation.launched.process.kill()
        generation.launched.process.wait()
        generation.close()


@pytest.fixture
def engine() -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """(port, requests): answers 200 to everything and keeps (path, Authorization)."""
    seen: list[tuple[str, str | None]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({}).encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], seen
    server.shutdown()
    server.server_close()


def test_health_comes_first_and_then_the_canary_and_no_proxy_sees_the_key(
        spec: WorkerSpec, engine: tuple[int, list[tuple[str, str | None]]], monkeypatch: pytest.MonkeyPatch) -> None:
    port, seen = engine
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    spec = replace(spec, port=port)
    health, canary = probe(spec, healthy=False), probe(spec, healthy=True)
    assert (health.health_ok, health.canary_ok, health.why) == (True, False, "")
    assert (canary.health_ok, canary.canary_ok, canary.why) == (True, True, "")
    assert seen == [("/health", None), ("/v1/completions", f"Bearer {KEY}")]


@pytest.mark.parametrize(("changes", "word"), [({"api_key": "schl\xfcssel"}, "ASCII"), ({"host": "1:2:zz"}, "InvalidURL")])
def test_what_cannot_be_asked_is_a_refusal(spec: WorkerSpec, changes: dict[str, str], word: str) -> None:
    result = probe(replace(spec, **changes), healthy=True)  # type: ignore[arg-type]
    assert not result.canary_ok and word in result.why
