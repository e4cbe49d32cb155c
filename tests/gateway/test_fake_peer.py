"""The fake P/D engine is what its text says: both protocols, what becomes of a leg whose peer is lost, its faults."""
from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fleet import FakePeer, Fleet, completion
from helpers import INJECT, wait_until
from tightrank_adapter import pages, wire

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[str, Fleet]]:
    flags = ("--patience", "2", "--notice-seconds", "0.3", "--handshake-attempts", "1")
    found = {engine: Fleet(engine, 1, 1, flags=flags) for engine in ("sglang", "vllm")}
    for fleet in found.values():
        fleet.start()
    yield found
    for fleet in found.values():
        fleet.close()


@pytest.fixture
def sglang(fleets: dict[str, Fleet]) -> Fleet:
    fleets["sglang"].recover()
    return fleets["sglang"]


@pytest.fixture
def vllm(fleets: dict[str, Fleet]) -> Fleet:
    fleets["vllm"].recover()
    return fleets["vllm"]


def ask(peer: FakePeer, body: dict[str, Any], path: str = "/v1/completions") -> httpx2.Response:
    return peer.client.post(peer.url + path, json=body)


def legs(fleet: Fleet, room: int, **more: Any) -> list[httpx2.Response]:
    """Both legs of one SGLang request at once: [prefill's answer, decode's]."""
    body = completion(bootstrap_host="127.0.0.1", bootstrap_port=fleet["p0"].transfer_port, bootstrap_room=room, rid=f"r{room}",
                      **more)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda peer: ask(peer, body), fleet.peers))


def test_sglang_hands_the_digest_over(sglang: Fleet) -> None:
    prefill, decode = legs(sglang, 1)
    text = decode.json()["choices"][0]["text"]
    assert text == prefill.json()["choices"][0]["text"] + " 1 2 3" and len(text.split()[0]) == 8
    assert [event["source"] for event in sglang["d0"].log("received")] == ["p0"]


def test_sglang_without_a_room_is_refused(sglang: Fleet) -> None:
    for peer in sglang.peers:
        answer = ask(peer, completion())
        assert answer.status_code == 400 and "bootstrap room id" in answer.text


def test_sglang_answers_the_fake_bootstrap_host_without_a_peer(sglang: Fleet) -> None:
    body = {"text": "x", "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    assert [ask(peer, body, "/generate").status_code for peer in sglang.peers] == [200, 200]
    assert ask(sglang["d0"], body, "/generate").json()["text"].startswith("garbage")


def test_sglang_room_is_used_once(sglang: Fleet) -> None:
    assert [answer.status_code for answer in legs(sglang, 2)] == [200, 200]
    assert [answer.status_code for answer in legs(sglang, 2)] == [500, 500]


def test_sglang_lone_legs_run_out_of_patience(sglang: Fleet) -> None:
    sglang["d0"].fault("drop")
    with pytest.raises(httpx2.TransportError):
        legs(sglang, 3)
    wait_until(lambda: sglang["p0"].log("end"), 5)
    assert sglang["p0"].log("end")[0]["status"] == 500


def test_sglang_decode_fails_when_its_prefill_is_aborted(sglang: Fleet) -> None:
    sglang["p0"].fault("slow-prefill", tokens_per_second=1)
    with ThreadPoolExecutor(1) as pool:
        both = pool.submit(legs, sglang, 4)
        wait_until(lambda: sglang["p0"].log("announced"))
        ask(sglang["p0"], {"rid": "r4"}, "/abort_request")
        prefill, decode = both.result(5)
    assert prefill.status_code == 200 and prefill.json()["choices"][0]["finish_reason"] == "abort"
    assert decode.status_code == 500


def test_sglang_decode_notices_a_dead_prefill_late(sglang: Fleet) -> None:
    sglang["p0"].fault("slow-prefill", tokens_per_second=1)
    body = completion(bootstrap_host="127.0.0.1", bootstrap_port=sglang["p0"].transfer_port, bootstrap_room=5)
    with ThreadPoolExecutor(1) as pool:
        decode = pool.submit(ask, sglang["d0"], body)
        wait_until(lambda: sglang["p0"].log("announced"))
        sglang["p0"].kill()
        killed = time.monotonic()
        assert decode.result(5).status_code == 500
    assert time.monotonic() - killed >= 0.25


def test_vllm_blocks_are_fetched_once(vllm: Fleet) -> None:
    first = ask(vllm["p0"], completion(tokens=1, kv_transfer_params=REMOTE_DECODE)).json()
    body = completion(kv_transfer_params=first["kv_transfer_params"])
    assert ask(vllm["d0"], body).json()["choices"][0]["text"] == first["choices"][0]["text"] + " 1 2 3"
    assert ask(vllm["d0"], body).status_code == 500
    streamed = ask(vllm["d0"], {**body, "stream": True})
    assert streamed.status_code == 200 and '"code": 500' in streamed.text


def test_vllm_decode_fails_when_its_prefill_is_gone(vllm: Fleet) -> None:
    first = ask(vllm["p0"], completion(tokens=1, kv_transfer_params=REMOTE_DECODE)).json()
    vllm["p0"].kill()
    assert ask(vllm["d0"], completion(kv_transfer_params=first["kv_transfer_params"])).status_code == 500


def test_answers_are_the_same_from_a_pair_and_alone(sglang: Fleet, vllm: Fleet) -> None:
    alone = ask(vllm["p0"], completion()).json()["choices"][0]["text"]
    assert legs(sglang, 6)[1].json()["choices"][0]["text"] == alone


def test_log_tells_who_asked_and_that_a_client_left(vllm: Fleet) -> None:
    vllm["p0"].fault("stall")
    headers = {"X-Request-Id": "abc", "X-Tightrank-Generation": "7"}
    with pytest.raises(httpx2.TimeoutException):
        vllm["p0"].client.post(vllm["p0"].url + "/v1/completions", json=completion(), headers=headers, timeout=0.3)
    wait_until(lambda: vllm["p0"].log("gone"))
    start, gone = vllm["p0"].log("start", "gone")
    assert (start["request_id"], start["generation"], start["number"]) == ("abc", "7", gone["number"])


@pytest.mark.parametrize(("kind", "fields"), [
    ("garbage", {}), ("no-colon", {}), ("drop", {}), ("cut", {"how": "rst"}), ("cut", {"how": "fin"}), ("truncated", {}),
    ("wrong-length", {}), ("bad-json", {}), ("status", {"status": 503, "retry_after": 7}), ("redirect", {}), ("refuse", {})])
def test_faults_are_no_good_answers(vllm: Fleet, kind: str, fields: dict[str, Any]) -> None:
    vllm["p0"].fault(kind, **fields)
    try:
        answer = ask(vllm["p0"], completion())
    except httpx2.TransportError:
        answer = None
    if answer is not None and answer.status_code == 200:
        with pytest.raises(json.JSONDecodeError):
            answer.json()
    vllm["p0"].reset()
    assert ask(vllm["p0"], completion()).status_code == 200


@pytest.mark.parametrize("kind", ["mute", "headers-only", "stall", "flood-1xx"])
def test_faults_that_never_end(vllm: Fleet, kind: str) -> None:
    vllm["p0"].fault(kind, count=1)
    with pytest.raises(httpx2.TransportError):
        vllm["p0"].client.post(vllm["p0"].url + "/v1/completions", json=completion(), timeout=0.3)
    assert ask(vllm["p0"], completion()).status_code == 200          # of count=1
    assert vllm["p0"].ready()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_beats_are_the_loops(engine: str, spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Idle: SGLang beats, vLLM is silent. In flight: both beat. A rank that is blocked stops them, and HTTP still accepts."""
    tmp_path.chmod(0o700)
    wire.write_settings(str(tmp_path), wire.Settings("w0", 3, engine, {"ranks": {}}))
    peer = FakePeer(engine, "w0", "both")
    spawn(peer.argv(), {"TIGHTRANK_ADAPTER": str(tmp_path), "PYTHONPATH": str(INJECT)})
    wait_until(peer.ready)
    role = "engine-core" if engine == "vllm" else "scheduler"
    hello = next(hello for hello in hellos(tmp_path) if hello.role == role)
    page = pages.BeatReader(str(tmp_path), hello.pid)

    def turns() -> int:
        before = page.read().loops
        time.sleep(0.3)
        return page.read().loops - before

    assert (turns() > 0) == (engine == "sglang")
    peer.fault("slow-prefill", tokens_per_second=100)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, peer, completion("x" * 100, tokens=100))
        wait_until(lambda: page.read().in_flight == 1)
        time.sleep(1.1)
        assert turns() > 0
        peer.fault("block")
        wait_until(lambda: turns() == 0)
        assert page.read().in_flight == 1 and peer.ready() and not answer.done()
        peer.send(signal.SIGKILL)
        with pytest.raises(httpx2.TransportError):
            answer.result(5)
    page.close()


def hellos(directory: Path) -> list[wire.Hello]:
    return [wire.read_json(str(path), wire.Hello) for path in directory.glob("hello-*.json")]
