"""What clients may do wrong: sizes, slowness, broken HTTP and JSON, fields that are the gateway's own, leaving early."""
from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fleet import GatewayProcess, chat, completion
from helpers import wait_until

Stack = Any
MIB = 1 << 20


def connect(stack: Stack, timeout: float = 20) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.gateway.port), timeout)


def send_raw(stack: Stack, data: bytes, timeout: float = 20) -> bytes:
    """What comes back for these bytes until the connection ends."""
    with connect(stack, timeout) as client:
        try:
            client.sendall(data)
        except OSError:
            pass                               # it may be cut off while we send: what it said is read below
        return drain(client)


def drain(client: socket.socket) -> bytes:
    found = b""
    try:
        while data := client.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


def request(body: bytes, path: str = "/v1/completions", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def status_of(raw: bytes) -> int:
    return int(raw.split(b" ", 2)[1]) if raw.startswith(b"HTTP/1.1 ") else 0


def assert_refused(answer: httpx2.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape, one sentence, and it says that it is ours."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error) and len(error["message"]) < 1000
    assert code in (None, error["code"])
    return error


def engines_saw_nothing(stack: Stack) -> bool:
    return not stack.fleet.log("start") and set(stack.standings().values()) == {"up"}


@pytest.mark.parametrize(("method", "path", "status"), [
    ("POST", "/v1/unknown", 404), ("GET", "/", 404), ("POST", "/v1/completions/", 404), ("POST", "/flush_cache", 404),
    ("POST", "/abort_request", 404), ("POST", "/set_internal_state", 404), ("POST", "//v1/completions", 404),
    ("POST", "/v1/../abort_request", 404), ("POST", "/%76%31/completions%00", 404), ("GET", "/v1/completions", 405),
    ("DELETE", "/v1/models", 405), ("POST", "/status", 405)])
def test_other_paths_and_methods_are_refused(plain: Stack, method: str, path: str, status: int) -> None:
    answer = plain.gateway.client.request(method, path, content=b"{}")
    assert answer.status_code in (status, 404), answer.text
    assert_refused(answer, answer.status_code)
    assert engines_saw_nothing(plain)


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b'"text"', b"{\"model\": \"tiny\",}", b"\xff\xfe{}", b"{'a': 1}", b"[" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"prompt": "\\ud800"', b"1" * 10_000])
def test_what_is_no_json_object_is_refused(pairs: Stack, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        assert_refused(pairs.gateway.client.post(path, content=body), 400)
    assert engines_saw_nothing(pairs)


@pytest.mark.parametrize("fields", [
    {"stream": "yes"}, {"stream": 1.5}, {"model": 7}, {"model": ["tiny"]}, {"prompt": 5}, {"prompt": {}}, {"prompt": []},
    {"max_tokens": "many"}, {"max_tokens": -1}, {"max_tokens": 10**30}, {"max_tokens": 1.5}, {"max_tokens": [1]},
    {"max_tokens": True}, {"n": "2"}, {"prompt": [1, "a"]}, {"stream_options": "x"}])
def test_wrong_types_and_absurd_numbers_never_hurt(pairs: Stack, fields: dict[str, Any]) -> None:
    """400 or, where neither looks at the field, a good answer; never a 5xx, and no engine is thought ill of."""
    answer = pairs.post("/v1/completions", completion() | fields)
    assert answer.status_code in (200, 400, 404, 422), answer.text
    if answer.status_code != 200:
        assert b"message" in answer.content
    assert set(pairs.standings().values()) == {"up"}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 5000, "1" + "0" * 400])
def test_numbers_that_python_reads_oddly(pairs: Stack, number: str) -> None:
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": %s}' % number.encode()
    answer = pairs.gateway.client.post("/v1/completions", content=body)
    assert answer.status_code == 400 and b"message" in answer.content
    assert set(pairs.standings().values()) == {"up"}


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"])
def test_the_protocols_fields_are_the_gateways_own(pairs: Stack, name: str) -> None:
    for value in (None, 1, "10.0.0.1", {"remote_host": "10.0.0.1"}):
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            error = assert_refused(pairs.post(path, {**body, name: value}), 400)
            assert name in error["message"]
    escaped = json.dumps(completion()).replace("{", '{"%s\\u%04x": 1, ' % (name[:-1], ord(name[-1])), 1)
    assert_refused(pairs.gateway.client.post("/v1/completions", content=escaped.encode()), 400)
    assert engines_saw_nothing(pairs)


def test_a_clients_rid_does_not_meet_another_requests(sglang: Stack) -> None:
    """SGLang aborts and matches by rid: of two clients that send the same, one that leaves must not end the other."""
    for name in ("p0", "p1"):
        sglang.fleet[name].fault("slow-prefill", tokens_per_second=10)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sglang.post, "/v1/completions", completion("hello12345", rid="same"))
        wait_until(lambda: sglang.fleet.log("start"))
        with pytest.raises(httpx2.TimeoutException):
            sglang.gateway.client.post("/v1/completions", json=completion("hello" * 20, rid="same"), timeout=0.3)
        assert first.result().status_code == 200
    assert len({leg["rid"] for leg in sglang.fleet.log("start") if leg["path"] == "/v1/completions"} - {"same"}) == 2


@pytest.mark.parametrize("length", ["declared", "chunked"])
def test_a_body_of_100_mb_is_refused_early(plain: Stack, length: str) -> None:
    started, sent = time.monotonic(), 0
    with connect(plain) as client:
        head = "Content-Length: 100000000" if length == "declared" else "Transfer-Encoding: chunked"
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        part = b" " * MIB
        try:
            while sent < 100:
                client.sendall(part if length == "declared" else b"%x\r\n%s\r\n" % (MIB, part))
                sent += 1
        except OSError:
            pass
        answer = drain(client)
    assert status_of(answer) == 413 or (not answer and sent < 100)
    assert time.monotonic() - started < 10 and engines_saw_nothing(plain)


def test_a_body_just_within_the_limit_goes_through(plain: Stack) -> None:
    body = json.dumps(completion()).encode()
    assert plain.gateway.client.post("/v1/completions", content=body + b" " * (32 * MIB - len(body))).status_code == 200
    answer = plain.gateway.client.post("/v1/completions", content=body + b" " * (32 * MIB - len(body) + 1))
    assert_refused(answer, 413)


@pytest.mark.parametrize("raw", [
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /livez HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"\r\n\r\n\x00\xff\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{\"a\":1}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n{}"],
    ids=["line", "header", "headers", "colon", "tls", "bytes", "nul", "negative", "lengths", "smuggle", "chunk", "te"])
def test_http_that_is_none(plain: Stack, raw: bytes) -> None:
    """Refused or cut within moments, never passed on, and the next client is served."""
    assert status_of(send_raw(plain, raw + b"\r\n", 12)) in (0, 400, 413, 414, 431, 501, 505)
    assert engines_saw_nothing(plain)
    assert plain.post("/v1/completions", completion()).status_code == 200


def test_slow_clients_are_cut_off(plain: Stack) -> None:
    """Nothing at all; headers byte by byte; a body that stops; all at once, so that the test takes one time limit."""
    body = json.dumps(completion()).encode()

    def silent(client: socket.socket) -> None:
        pass

    def loris(client: socket.socket) -> None:
        for byte in b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 50:
            client.sendall(bytes([byte]))
            time.sleep(0.2)

    def half(client: socket.socket) -> None:
        client.sendall(request(body)[:-10])

    def after_one(client: socket.socket) -> None:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        client.recv(65536)
        client.sendall(b"GET /liv")

    def until_cut(act: Any) -> float:
        started = time.monotonic()
        with connect(plain, 30) as client:
            try:
                act(client)
            except ConnectionError:
                pass
            drain(client)
        return time.monotonic() - started

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(until_cut, (silent, loris, half, after_one))) < 25
    assert not plain.fleet.log("start")


def test_a_client_that_half_closes_leaves_nothing_behind(pairs: Stack) -> None:
    for stream in (False, True):
        with connect(pairs) as client:
            client.sendall(request(json.dumps(completion(stream=stream)).encode()))
            client.shutdown(socket.SHUT_WR)
            answer = drain(client)
        assert status_of(answer) in (0, 200)
    wait_until(lambda: all(worker["legs"] == 0 for worker in pairs.status()["workers"]), 5)
    assert set(pairs.standings().values()) == {"up"}


def test_a_client_that_waits_for_100_continue(plain: Stack) -> None:
    body = json.dumps(completion()).encode()
    with connect(plain) as client:
        client.sendall(request(body, "/v1/completions", "Expect: 100-continue")[:-len(body)])
        assert client.recv(1024).startswith(b"HTTP/1.1 100")
        client.sendall(body)
        assert status_of(drain(client)) == 200


def told(stack: Stack, role: str) -> float:
    """When the engines of this role learned that a client had left."""
    found = wait_until(lambda: [event for event in stack.fleet.log("gone", "abort") if event["peer"][0] == role], 5)
    return float(found[0]["at"])


def legs(stack: Stack) -> list[dict[str, Any]]:
    return [event for event in stack.fleet.log("start") if event["path"] == "/v1/completions"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_the_prefill(pairs: Stack, stream: bool) -> None:
    """The engines know at once (scripts/bench/faults measures it), and no decode starts for nobody afterwards."""
    for name in ("p0", "p1"):
        pairs.fleet[name].fault("slow-prefill", tokens_per_second=2)
    with pytest.raises(httpx2.TimeoutException):
        pairs.gateway.client.post("/v1/completions", json=completion("x" * 20, stream=stream), timeout=0.4)
    left, begun = time.monotonic(), legs(pairs)
    assert {leg["peer"][0] for leg in begun} == ({"p", "d"} if pairs.engine == "sglang" else {"p"})
    assert all(told(pairs, leg["peer"][0]) - left < 3 for leg in begun)
    time.sleep(0.3)
    assert legs(pairs) == begun and set(pairs.standings().values()) == {"up"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_the_decode(pairs: Stack, stream: bool) -> None:
    with connect(pairs) as client:
        client.sendall(request(json.dumps(completion(tokens=2000, stream=stream)).encode()))
        wait_until(lambda: pairs.fleet.log("received"), 5)
    left = time.monotonic()
    assert told(pairs, "d") - left < 3
    wait_until(lambda: all(worker["legs"] == 0 for worker in pairs.status()["workers"]), 3)


@pytest.fixture(scope="module")
def small(stacks: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that takes two requests at once and 4 KiB of body."""
    entries = [peer.entry() for peer in stacks("plain").fleet.peers]
    gateway = GatewayProcess(tmp_path_factory.mktemp("small"), entries, in_flight=2, body_limit="4KiB")
    try:
        yield gateway.start()
    finally:
        gateway.close()


def test_more_at_once_than_allowed_get_429(plain: Stack, small: GatewayProcess) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: small.post("/v1/completions", completion(tokens=60)), range(6)))
    assert sorted({answer.status_code for answer in answers}) == [200, 429]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 4 and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert assert_refused(refused[0], 429)["type"] == "rate_limit_error"
    assert small.post("/v1/completions", completion()).status_code == 200       # and they are free again
    assert small.post("/v1/completions", completion("x" * 5000)).status_code == 413


def test_no_file_is_needed(plain: Stack, tmp_path: Path) -> None:
    """`tightrank gateway` with its limits from the command line, and a wrong one is one line and exit code 78."""
    gateway = GatewayProcess(tmp_path, [plain.fleet["w0"].entry()], canary="nonsense")
    with pytest.raises(AssertionError, match=r"gateway\.canary"):
        gateway.start()
    assert gateway.process is not None and gateway.process.wait(5) == 78
    gateway.close()
