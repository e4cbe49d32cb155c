"""Who gets work: the dead, the mute, the slow and those that came back; canaries and readiness."""
from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fleet import GatewayProcess, completion, digest
from helpers import wait_until

Stack = Any


@pytest.mark.parametrize("ill", ["p0", "d0"])
def test_one_of_two_is_dead(pairs: Stack, ill: str) -> None:
    pairs.fleet[ill].kill()
    for stream in (False, True, False, True):
        assert pairs.right(pairs.post("/v1/completions", completion(stream=stream)))
    pairs.fleet[ill].start()
    wait_until(pairs.well, 10, "it is used again")
    for _ in range(4):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    assert [leg for leg in pairs.legs() if leg["peer"] == ill]


@pytest.mark.parametrize("ill", ["p0", "d0"])
def test_one_of_two_refuses(pairs: Stack, ill: str) -> None:
    pairs.fleet[ill].fault("refuse")
    for _ in range(6):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    pairs.fleet[ill].reset()
    wait_until(pairs.well, 10, "it is used again")


def test_an_engine_that_says_500_gets_work_again(pairs: Stack) -> None:
    """Half open: a real request of the gateway's own decides, and no client pays for the trial."""
    pairs.fleet["p0"].fault("status", status=500)
    for _ in range(6):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    assert pairs.standings()["p0"] != "up"
    tried = len([leg for leg in pairs.legs() if leg["peer"] == "p0"])
    pairs.fleet["p0"].reset()
    wait_until(pairs.well, 10, "p0 is up again")
    assert tried <= 3
    for _ in range(4):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    assert [leg for leg in pairs.legs() if leg["peer"] == "p0"]


def test_a_slow_prefill_is_not_condemned(pairs: Stack) -> None:
    """Both need 2.5 s more for what they did in milliseconds before: nobody is out, and the answer comes."""
    for _ in range(4):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    for peer in pairs.fleet.role("prefill"):
        peer.fault("slow-prefill", seconds=2.5)
    assert pairs.right(pairs.post("/v1/completions", completion("x" * 20, stream=True)), "x" * 20)
    assert "out" not in pairs.standings().values()
    wait_until(pairs.up, 20, f"all are up: {pairs.status()}")


def test_a_slow_stream_is_not_cut(vllm: Stack) -> None:
    for peer in vllm.fleet.role("decode"):
        peer.fault("slow", seconds=2)
    answer = vllm.post("/v1/completions", completion(tokens=2, stream=True))
    assert answer.text.endswith("data: [DONE]\n\n") and digest("hello") in answer.text
    assert set(vllm.standings().values()) == {"up"}


@pytest.mark.parametrize(("ill", "kind"), [("p0", "mute"), ("d0", "headers-only")])
def test_one_of_two_is_mute_with_good_health(pairs: Stack, ill: str, kind: str) -> None:
    """Without a supervisor there is only what answers took before: the request goes elsewhere soon after that."""
    for _ in range(4):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    pairs.fleet[ill].fault(kind)
    slowest = 0.0
    for stream in (False, True):
        started = time.monotonic()
        assert pairs.right(pairs.post("/v1/completions", completion(stream=stream)))
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 10
    pairs.none_runs()


@pytest.mark.parametrize("after", [0, 2])
def test_comments_are_no_progress(vllm: Stack, tmp_path: Path, after: int) -> None:
    """vLLM can be told to send SSE comments while it generates nothing: its HTTP is alive, the answer is not."""
    gateway = GatewayProcess(tmp_path, [peer.entry() for peer in vllm.fleet.peers], silence="2s")
    try:
        gateway.start()
        for peer in vllm.fleet.role("decode"):
            peer.fault("stall", after=after, comments=True)
        timer = threading.Timer(15, gateway.close)           # a hang ends as an error, not with the run
        timer.start()
        answer = gateway.post("/v1/completions", completion(stream=True))
        timer.cancel()
        assert answer.status_code == 200 if after else answer.status_code in (503, 504)
        assert '"error"' in answer.text and "[DONE]" not in answer.text
    finally:
        gateway.close()


def test_all_are_dead(pairs: Stack) -> None:
    """503 at once, which names them, with Retry-After; /readyz says so; and both are right again after they came back."""
    for peer in pairs.fleet.role("prefill"):
        peer.kill()
    killed = time.monotonic()
    wait_until(lambda: not pairs.gateway.answers("/readyz"), 5, "/readyz says 503")
    for stream in (False, True):
        started = time.monotonic()
        answer = pairs.post("/v1/completions", completion(stream=stream))
        assert answer.status_code == 503 and time.monotonic() - started < 2
        assert int(answer.headers["retry-after"]) >= 1 and "p0" in answer.json()["error"]["message"]
    assert pairs.gateway.answers("/livez") and not pairs.gateway.answers("/health")
    assert time.monotonic() - killed < 15
    for peer in pairs.fleet.role("prefill"):
        peer.start()
    wait_until(lambda: pairs.gateway.answers("/readyz"), 10, "/readyz says 200")
    assert pairs.right(pairs.post("/v1/completions", completion()))


def test_the_canary_is_a_real_transfer(pairs: Stack) -> None:
    """After a role came back, the pair counts as one only once KV went from the one to the other."""
    pairs.fleet["d0"].kill()
    wait_until(lambda: pairs.standings()["d0"] == "out", 5)
    since = time.monotonic()
    pairs.fleet["d0"].start()
    wait_until(pairs.well, 20, f"all are up and seen to transfer: {pairs.status()}")
    assert {event["source"] for event in pairs.fleet["d0"].log("received", since=since)} == {"p0", "p1"}


def test_a_pair_whose_transfer_never_works_is_not_ready(pairs: Stack) -> None:
    """Both roles answer, and nothing goes between them: the engines' own health says 200."""
    for peer in pairs.fleet.role("decode"):
        peer.kill()
    wait_until(lambda: pairs.standings()["d0"] == pairs.standings()["d1"] == "out", 5)
    for peer in pairs.fleet.role("decode"):
        peer.flags, flags = ("--fault", '{"kind": "transfer-fails"}'), peer.flags
        peer.start().flags = flags
        wait_until(peer.ready)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        assert not pairs.gateway.answers("/readyz")
        time.sleep(0.1)
