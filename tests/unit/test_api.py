"""The HTTP API over a real uvicorn on a real socket: health, errors in one shape, hostile bodies, writes, streams."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers import wait_until
from samples import TOO_SMALL, failed, process, rank, status, worker
from tightrank.adapter import pages, wire
from tightrank.api import (
    MOST_REQUESTS,
    ApiSettings,
    Requests,
    WorkerRequest,
    create,
)
from tightrank.config.units import is_loopback
from tightrank.errors import CAUSES
from tightrank.readers.process import read_process
from tightrank.records import Event, Phase, ProcessId, RankReading
from tightrank.report import Board, Journal
from tightrank.serve import Server
from tightrank.sockets import bind

WRITE = {"X-Tightrank": "1", "Content-Type": "application/json"}


@dataclass
class Api:
    board: Board
    journal: Journal
    requests: Requests
    client: httpx2.Client
    port: int

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return self.client.get(path, **more)

    def write(self, path: str, headers: dict[str, str] | None = None, content: str | bytes = b"{}") -> httpx2.Response:
        return self.client.post(path, content=content, headers=WRITE if headers is None else headers)

    def admission(self, body: Any) -> httpx2.Response:
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        return self.client.post("/admission", content=content, headers={"Content-Type": "application/json"})


def start(tmp_path: Path, settings: ApiSettings) -> Iterator[Api]:
    board, journal, requests = Board(), Journal(tmp_path / "journal.jsonl"), Requests()
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = Server(create(board, journal, requests, settings), listening)
    board.publish(status())
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        yield Api(board, journal, requests, client, port)
    server.stop()
    assert not server.alive


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    yield from start(tmp_path, ApiSettings(public=False, state_directory=tmp_path, plan={"workers": ["w0"]}))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One server for the tests that leave it as it was."""
    tmp_path = tmp_path_factory.mktemp("api")
    yield from start(tmp_path, ApiSettings(public=False, state_directory=tmp_path))


def error(response: httpx2.Response, code: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape and name us."""
    assert response.status_code == code, response.text
    body = response.json()
    assert body["source"] == "tightrank" and set(body["error"]) >= {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if code < 500 else "server_error")
    assert "\n" not in body["error"]["message"] and len(body["error"]["message"]) < 400
    found: dict[str, Any] = body["error"]
    return found


def test_a_ready_deployment(api: Api) -> None:
    for path in ("/livez", "/readyz", "/health", "/startupz"):
        assert api.get(path).status_code == 200, path
    assert api.get("/readyz").json()["workers"]["w0"]["phase"] == "up"
    assert api.get("/plan").json() == {"workers": ["w0"]}
    assert api.get("/status").json()["workers"][0]["name"] == "w0"
    text = api.get("/metrics")
    assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8" and "tightrank_up 1\n" in text.text
    assert api.get("/openapi.json").json()["info"]["title"] == "tightrank"


def test_a_failed_worker_says_why_and_promises_no_restart(api: Api) -> None:
    api.board.publish(status(failed()))
    answer = api.get("/readyz")
    assert answer.status_code == 503 and "retry-after" not in answer.headers
    found = answer.json()["workers"]["w0"]
    assert (found["cause"], found["change"], found["evidence"]) == (TOO_SMALL.cause, TOO_SMALL.change,
                                                                   list(TOO_SMALL.evidence))
    assert api.get("/livez").status_code == 200
    api.board.publish(status(worker(ready=False, phase=Phase.BACKING_OFF, next_start_unix=time.time() + 10)))
    assert 10 <= int(api.get("/readyz").headers["retry-after"]) <= 20


def test_a_stopped_loop_is_neither_alive_nor_ready(api: Api) -> None:
    api.board.publish(status(updated_monotonic=time.monotonic() - 11))
    assert api.get("/livez").status_code == 503
    answer = api.get("/readyz")
    assert answer.status_code == 503 and not answer.json()["ready"] and "loop" in answer.json()["reason"]


def test_before_the_first_tick(tmp_path: Path) -> None:
    for api in start(tmp_path, ApiSettings(public=False, state_directory=tmp_path)):
        api.board._status = None
        assert error(api.get("/readyz"), 503)["code"] == "not_ready"
        assert error(api.get("/status"), 503)["code"] == "not_ready"
        assert error(api.admission({"prompt_tokens": 1}), 503)["code"] == "not_ready"
        assert api.get("/livez").status_code == 503 and api.get("/metrics").status_code == 200


def test_paths_and_methods_that_are_not_there(api: Api) -> None:
    assert error(api.get("/nothing"), 404)["code"] == "not_found"
    assert error(api.client.delete("/status"), 405)["code"] == "method_not_allowed"
    assert error(api.get("/steps", params={"worker": "x"}), 404)["code"] == "worker_not_found"
    assert error(api.get("/steps"), 400)["param"] == "worker"
    assert error(api.get("/events", params={"since": "x"}), 400)["param"] == "since"
    assert error(api.get("/events", params={"limit": "0"}), 400)["param"] == "limit"


def test_steps(api: Api) -> None:
    api.board.add_steps("w0", [wire.Step(1, 10, 1, 0, 1, 256, 4096, 10**6, False, 1.5, None, [[0, 256]])])
    assert [s["rows"] for s in api.get("/steps", params={"worker": "w0"}).json()["steps"]] == [256]
    assert api.get("/steps", params={"worker": "w0", "since": 1}).json()["steps"] == []


# --- admission ---------------------------------------------------------------------------------------------------------

def test_admission(api: Api) -> None:
    assert api.admission({"prompt_tokens": 8000, "max_tokens": 100}).json() == {
        "admit": True, "worker": "w0", "largest_prompt_tokens": 8092}
    refused = api.admission({"prompt_tokens": 8193})
    assert error(refused, 400)["code"] == "context_length_exceeded" and refused.json()["error"]["largest_prompt_tokens"] == 8191
    api.board.publish(status(failed()))
    answer = api.admission({"prompt_tokens": 10})
    assert error(answer, 503)["code"] == TOO_SMALL.cause and int(answer.headers["retry-after"]) > 0
    told = answer.json()["error"]
    assert (told["cause"], told["runbook"]) == (TOO_SMALL.cause, CAUSES[TOO_SMALL.cause].runbook)
    assert error(api.admission({"prompt_tokens": 10, "worker": "x"}), 404)["param"] == "worker"


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt_tokens": True}, "prompt_tokens"), ({"prompt_tokens": "5"}, "prompt_tokens"),
    ({"prompt_tokens": 5.0}, "prompt_tokens"), ({"prompt_tokens": -1}, "prompt_tokens"),
    ({"prompt_tokens": 0}, "prompt_tokens"), ({"prompt_tokens": 10**9 + 1}, "prompt_tokens"),
    ({"prompt_tokens": 10**400}, "prompt_tokens"), ({"prompt_tokens": None}, "prompt_tokens"),
    ('{"prompt_tokens": NaN}', "prompt_tokens"), ('{"prompt_tokens": Infinity}', "prompt_tokens"),
    ('{"prompt_tokens": 1e400}', "prompt_tokens"), ({}, "prompt_tokens"),
    ({"prompt_tokens": 5, "max_tokens": 0}, "max_tokens"), ({"prompt_tokens": 5, "cached_tokens": 5}, "cached_tokens"),
    ({"prompt_tokens": 5, "cached_tokens": -1}, "cached_tokens"), ({"prompt_tokens": 5, "tokens": 1}, "tokens"),
    ({"prompt_tokens": 5, "worker": 3}, "worker"), ({"prompt_tokens": 5, "worker": "w" * 200}, "worker"),
    ([], "body"), ("", "body"), ("null", "body"), ("{", "body"), (b"\xff\xfe", "body"), ("[" * 30_000, None),
    ('{"prompt_tokens": ' + "9" * 5000 + "}", None),
])
def test_bad_bodies_are_refused_with_the_field_named(shared: Api, body: Any, param: str | None) -> None:
    found = error(shared.admission(body), 400)
    assert found["param"] == param
    if param not in (None, "body"):
        assert param in found["message"]
    assert shared.get("/plan").status_code == 200


def test_a_value_and_its_range_are_in_the_message(api: Api) -> None:
    message = error(api.admission({"prompt_tokens": -7}), 400)["message"]
    assert "prompt_tokens=-7" in message and "greater than or equal to 1" in message


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_cut_off(api: Api, chunked: bool) -> None:
    content: Any = (b"x" * 1024 for _ in range(80)) if chunked else b"x" * 80 * 1024
    assert error(api.client.post("/admission", content=content), 413)["code"] == "body_refused"
    assert api.get("/livez").status_code == 200


def test_a_wrong_content_length_hangs_nobody(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as raw:
        raw.sendall(b"POST /admission HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert api.get("/livez").status_code == 200


# --- writes ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("action", ["drain", "resume", "restart"])
def test_a_write_becomes_a_request_for_the_tick(api: Api, action: Any) -> None:
    if action == "resume":
        api.board.publish(status(worker(phase=Phase.DRAINING, ready=False)))
    answer = api.write(f"/workers/w0/{action}")
    assert answer.status_code == 202 and answer.json()["accepted"] and "w0" in answer.json()["message"]
    assert api.requests.get_nowait() == WorkerRequest(action, "w0")


@pytest.mark.parametrize(("action", "phase"), [("drain", Phase.STARTING), ("resume", Phase.UP), ("restart", Phase.STOPPING)])
def test_a_request_that_the_phase_cannot_take_is_refused(api: Api, action: Any, phase: Phase) -> None:
    api.board.publish(status(worker(phase=phase)))
    assert error(api.write(f"/workers/w0/{action}"), 409)["code"] == "wrong_phase"
    assert api.requests.empty()


def test_writes_to_what_is_not_there(api: Api) -> None:
    assert error(api.write("/workers/x/drain"), 404)["code"] == "worker_not_found"
    assert error(api.write("/workers/w0/explode"), 404)["code"] == "action_not_found"
    assert error(api.write("/workers/w0/drain", content=b'{"now": 1}'), 400)["param"] == "now"
    assert api.requests.empty()


@pytest.mark.parametrize("headers", [
    {"Content-Type": "application/json"}, {"X-Tightrank": "1"}, {"X-Tightrank": "1", "Content-Type": "text/plain"},
    {**WRITE, "Host": "evil.example"}, {**WRITE, "Host": "127.0.0.1.evil.example:80"}, {**WRITE, "Host": "192.168.0.1"},
])
def test_a_web_page_cannot_write_to_loopback(shared: Api, headers: dict[str, str]) -> None:
    assert error(shared.write("/workers/w0/drain", headers), 403)["code"] == "write_forbidden"
    assert shared.requests.empty()


@pytest.mark.parametrize("host", ["localhost:9470", "LOCALHOST", "127.0.0.2", "[::1]:9470"])
def test_loopback_names_may_write(api: Api, host: str) -> None:
    assert api.write("/workers/w0/drain", {**WRITE, "Host": host}).status_code == 202


def test_no_cross_origin_permission_is_given(api: Api) -> None:
    answer = api.client.options("/workers/w0/drain", headers={"Origin": "http://evil.example",
                                                              "Access-Control-Request-Method": "POST"})
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_too_many_requests_are_told_to_wait(api: Api) -> None:
    for _ in range(MOST_REQUESTS):
        assert api.write("/workers/w0/drain").status_code == 202
    answer = api.write("/workers/w0/drain")
    assert error(answer, 503)["code"] == "busy" and answer.headers["retry-after"] == "1"


def test_a_public_bind_without_a_token_is_read_only(tmp_path: Path) -> None:
    for api in start(tmp_path, ApiSettings(public=True, state_directory=tmp_path)):
        found = error(api.write("/workers/w0/drain"), 403)
        assert "token_file" in found["message"] and "TIGHTRANK_TOKEN" in found["message"]
        assert api.get("/status").status_code == 200 and api.admission({"prompt_tokens": 1}).status_code == 200


@pytest.mark.parametrize("public", [True, False])
def test_with_a_token_only_its_bearer_writes(tmp_path: Path, public: bool) -> None:
    for api in start(tmp_path, ApiSettings(public=public, state_directory=tmp_path, token="t0p-s3cret")):
        for wrong in ({}, WRITE, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic t0p-s3cret"},
                      {"Authorization": "Bearer"}, {"Authorization": "Bearer t0p-s3cre\u00e9".encode("latin-1")}):
            answer = api.write("/workers/w0/drain", wrong)  # type: ignore[arg-type]
            assert error(answer, 401)["code"] == "invalid_token" and answer.headers["www-authenticate"] == "Bearer"
            assert "t0p-s3cret" not in answer.text
        assert api.requests.empty()
        assert api.write("/workers/w0/drain", {"Authorization": "bearer t0p-s3cret"}, b"").status_code == 202
        assert api.get("/status").status_code == 200


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True), ("Localhost.", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False), ("localhost.example.org", False),
    ("", False)])
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


# --- events ------------------------------------------------------------------------------------------------------------

def happen(api: Api, *sentences: str) -> None:
    for sentence in sentences:
        api.journal.append(Event(1.0, "phase", "w0", 1, sentence))


def test_history(api: Api) -> None:
    happen(api, "a", "b", "c")
    body = api.get("/events", params={"since": 1, "limit": 1}).json()
    assert [e["sentence"] for e in body["events"]] == ["b"] and body["last"] == 3


def stream(api: Api, headers: dict[str, str] | None = None, query: str = "") -> Any:
    return api.client.stream("GET", "/events" + query, headers={"Accept": "text/event-stream", **(headers or {})})


def read(response: httpx2.Response, count: int) -> list[dict[str, Any]]:
    """The first `count` events of a stream; each must carry its sequence number as id."""
    found: list[dict[str, Any]] = []
    number = ""
    for row in response.iter_lines():
        if row.startswith("id: "):
            number = row[4:]
        if row.startswith("data: "):
            found.append(json.loads(row[6:]))
            assert found[-1]["sequence"] == int(number)
        if len(found) == count:
            break
    return found


def test_a_stream_replays_then_follows_and_resumes(api: Api) -> None:
    happen(api, "a", "b")
    with stream(api, query="?since=1") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        later = threading.Timer(0.1, happen, (api, "c\nd"))
        later.start()
        assert [e["sentence"] for e in read(response, 2)] == ["b", "c\nd"]
        later.join()
    happen(api, "e")
    with stream(api, {"Last-Event-ID": "3"}) as response:
        assert [e["sentence"] for e in read(response, 1)] == ["e"]
    wait_until(lambda: not api.journal._listeners, what="the closed streams let go of the journal")


def test_an_idle_stream_beats_as_often_as_asked(api: Api) -> None:
    started = time.monotonic()
    with stream(api, query="?beat=0.25") as response:
        rows = (row for row in response.iter_lines() if row)
        assert [next(rows) for _ in range(4)] == [": beat"] * 4
    assert time.monotonic() - started < 5          # less than one beat of the usual interval


@pytest.mark.parametrize("beat", ["0.2", "61", "nan", "inf", "x", ""])
def test_a_beat_out_of_range_is_refused(shared: Api, beat: str) -> None:
    assert error(shared.get("/events", params={"beat": beat}), 400)["param"] == "beat"


# --- pulse ------------------------------------------------------------------------------------------------------------

def own_rank(state: Path) -> tuple[RankReading, pages.BeatWriter]:
    """This process as the scheduler of w0's generation 3."""
    run = state / "run" / "w0-3"
    run.mkdir(parents=True)
    found = read_process(os.getpid())
    assert found is not None
    return rank(id=found.id), pages.BeatWriter(str(run))


def test_a_pulse_is_read_at_that_moment(api: Api, tmp_path: Path) -> None:
    me, beat = own_rank(tmp_path)
    api.board.publish(status(worker(ranks=(me, rank(role="detokenizer", rank=None)), longest_step_seconds=1.25)))
    beat.steps, beat.prefill_tokens, beat.in_flight = 7, 512, 2
    beat.beat()
    answer = api.get("/workers/w0/pulse").json()
    mine, other = answer.pop("ranks")
    assert answer.pop("cpu_seconds") > 0
    assert answer == {"worker": "w0", "generation": 3, "phase": "up", "stopped": [], "longest_step_seconds": 1.25}
    assert 0 <= mine.pop("beat_age_seconds") < 5
    assert mine == {"role": "scheduler", "rank": 0, "loops": 2, "steps": 7, "prefill_tokens": 512, "in_flight": 2}
    assert other == {"role": "detokenizer", "rank": None, "beat_age_seconds": None, "loops": None, "steps": None,
                     "prefill_tokens": None, "in_flight": None}
    beat.beat()
    assert api.get("/workers/w0/pulse").json()["ranks"][0]["loops"] == 3      # no tick was between


def test_a_pulse_names_what_is_stopped_while_the_loop_hangs(api: Api) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            found = read_process(child.pid)
            assert found is not None
            mine = process(id=found.id)
            again = process(id=ProcessId(child.pid, found.id.start_time + 1))          # its pid was another's before
            api.board.publish(status(worker(processes=(mine,), ranks=()), updated_monotonic=time.monotonic() - 60))
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: api.get("/workers/w0/pulse").json()["stopped"] == [child.pid], what="the process is stopped")
            api.board.publish(status(worker(processes=(again,), ranks=())))
            assert api.get("/workers/w0/pulse").json()["stopped"] == []
        finally:
            child.kill()


@pytest.mark.parametrize("content", [None, b"", b"\0" * 4096, b"\xff" * 4096])
def test_a_page_that_cannot_be_read_is_unknown(api: Api, tmp_path: Path, content: bytes | None) -> None:
    me, _ = own_rank(tmp_path)
    page = tmp_path / "run" / "w0-3" / f"beat-{os.getpid()}"
    page.unlink()
    if content is not None:
        page.write_bytes(content)
    api.board.publish(status(worker(ranks=(me,))))
    assert api.get("/workers/w0/pulse").json()["ranks"][0]["loops"] is None


def test_a_page_of_an_earlier_process_is_unknown(api: Api, tmp_path: Path) -> None:
    me, _ = own_rank(tmp_path)
    api.board.publish(status(worker(ranks=(replace(me, id=ProcessId(me.id.pid, me.id.start_time - 1)),))))
    assert api.get("/workers/w0/pulse").json()["ranks"][0]["loops"] is None


def test_the_pulse_of_nobody(shared: Api) -> None:
    assert error(shared.get("/workers/zz/pulse"), 404)["code"] == "worker_not_found"


def test_status_tells_a_gateway_what_it_needs(api: Api) -> None:
    api.board.publish(status(worker(served_model="m", address="10.0.0.3", transfer_port=8998)))
    found = api.get("/status").json()["workers"][0]
    assert (found["served_model"], found["address"], found["transfer_port"]) == ("m", "10.0.0.3", 8998)
    assert found["longest_prompt_tokens"] == 8191          # of 8192, with one token of answer
    api.board.publish(status(worker(context_tokens=None, line=None)))
    assert api.get("/status").json()["workers"][0]["longest_prompt_tokens"] is None


def test_a_client_that_reads_nothing_is_dropped(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightrank.edge.SEND_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", api.port)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        wait_until(lambda: api.journal._listeners, what="the stream is open")
        for number in range(200):
            happen(api, f"{number} " + "x" * 100_000)
        wait_until(lambda: not api.journal._listeners, what="the client is dropped")
    assert api.get("/livez").status_code == 200


def test_streams_are_counted_and_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightrank.edge.STREAMS", 1)
    with stream(api) as first:
        assert first.status_code == 200
        wait_until(lambda: api.journal._listeners)
        with stream(api) as second:
            assert second.status_code == 503 and second.headers["retry-after"] == "5"


def test_an_open_stream_does_not_hold_up_the_end(tmp_path: Path) -> None:
    for api in start(tmp_path, ApiSettings(public=False, state_directory=tmp_path)):
        raw = socket.create_connection(("127.0.0.1", api.port))
        raw.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        wait_until(lambda api=api: api.journal._listeners, what="the stream is open")
    raw.close()                                   # `start` has checked that the server has ended


def test_a_taken_port_is_an_error_before_anything_starts() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["evil_name.example", "localhost@evil.example", "[", "127.0.0.1/..", "a b", ""])
def test_a_host_that_is_odd_is_not_taken_for_ours(shared: Api, host: str) -> None:
    """A rebound name with an underscore is a valid page's origin, and Starlette reads it as our own address."""
    head = "".join(f"{name}: {value}\r\n" for name, value in WRITE.items())
    with socket.create_connection(("127.0.0.1", shared.port), timeout=20) as raw:
        raw.sendall(f"POST /workers/w0/drain HTTP/1.1\r\nHost: {host}\r\n{head}Content-Length: 2\r\nConnection: close\r\n"
                    "\r\n{}".encode())
        assert raw.makefile("rb").readline().split()[1] == b"403"
    assert shared.requests.empty()


@pytest.mark.parametrize("last", ["9" * 5000, "100000", "-1", "x"])
def test_an_event_number_that_cannot_be_starts_from_the_beginning(api: Api, last: str) -> None:
    happen(api, "a", "b")
    with stream(api, {"Last-Event-ID": last}) as response:
        assert [event["sentence"] for event in read(response, 2)] == ["a", "b"]


def test_text_that_is_no_unicode_costs_no_answer(api: Api) -> None:
    api.board.publish(status(worker(reason="a path: \udcff")))
    assert api.get("/status").json()["workers"][0]["reason"] == "a path: \udcff"


def test_a_connection_that_asks_nothing_is_closed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightrank.edge.REQUEST_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", api.port), timeout=20) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nHost:")
        assert _ended(raw)


def test_one_connection_too_many_is_closed_and_the_others_are_served(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.get("/livez").status_code == 200
    monkeypatch.setattr("tightrank.edge.CONNECTIONS", 1)
    with socket.create_connection(("127.0.0.1", api.port), timeout=20) as raw:
        assert _ended(raw)
    assert api.get("/livez").status_code == 200


def _ended(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True
