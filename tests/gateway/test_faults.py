"""What engines may do wrong. One of two is ill: the client gets a right answer by the other pair, in a new room, and the leg
that was left over is ended at its engine. Both are ill: an error of ours, never a text from a failed transfer."""
from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from fleet import chat, completion, digest, events
from helpers import wait_until

Stack = Any
PATHS = ("/v1/completions", "/v1/chat/completions")
NO_ANSWER = [("drop", {}), ("status", {"status": 500}), ("status", {"status": 502, "body": "no object"}), ("garbage", {}),
             ("no-colon", {}), ("long-line", {}), ("many-headers", {}), ("flood-1xx", {}), ("redirect", {}),
             ("cut", {"how": "rst"}), ("cut", {"how": "fin"}), ("truncated", {}), ("wrong-length", {}), ("bad-json", {}),
             ("status", {"status": 101}), ("status", {"status": 204}), ("status", {"status": 700})]
NAMES = ["-".join(str(part) for part in (kind, *fields.values())) for kind, fields in NO_ANSWER]
BUSY = [(429, None), (429, 7), (503, None), (503, 7)]


def right(answer: httpx2.Response, prompt: str = "hello") -> bool:
    """Whether this is the whole answer to a completion, streamed or not."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(choice["text"] for part in parts for choice in part["choices"])
        return text == digest(prompt) + " 1 2 3" and answer.text.endswith("data: [DONE]\n\n")
    return bool(answer.json()["choices"][0]["text"] == digest(prompt) + " 1 2 3")


def legs(stack: Stack) -> list[dict[str, Any]]:
    """Those of our requests: what the gateway asks by itself names no user agent."""
    return [event for event in stack.fleet.log("start") if event["path"] in PATHS and "user-agent" in event["headers"]]


def none_runs(stack: Stack) -> None:
    """No leg is left at an engine: each that has started has ended, or was ended."""
    def over() -> bool:
        ended = {(event["peer"], event["number"]) for event in stack.fleet.log("end", "gone")}
        return all((leg["peer"], leg["number"]) in ended for leg in legs(stack))
    wait_until(over, 3, f"all legs ended; {stack.fleet.log()[-12:]}")


def rooms_once(stack: Stack) -> None:
    for peer in stack.fleet.peers:
        rooms = [leg["room"] for leg in legs(stack) if leg["peer"] == peer.name and leg["room"] is not None]
        assert len(rooms) == len(set(rooms))


@pytest.mark.parametrize(("kind", "fields"), NO_ANSWER, ids=NAMES)
@pytest.mark.parametrize(("role", "stream"), [("prefill", False), ("decode", False), ("decode", True)])
def test_one_gives_no_answer(pairs: Stack, role: str, stream: bool, kind: str, fields: dict[str, Any]) -> None:
    if kind == "flood-1xx" or (kind == "bad-json" and pairs.engine == "sglang" and role == "prefill"):
        fields = {**fields, "times": 50, "then": "answer"}       # may be borne: a good answer follows
    pairs.trusted(role).fault(kind, paths=["/v1/completions"], count=1, **fields)
    tries = 0
    while not [leg for leg in legs(pairs) if leg["fault"] == kind]:
        assert (tries := tries + 1) <= 6, "nobody met it"
        assert right(pairs.post("/v1/completions", completion(stream=stream)))
    rooms_once(pairs)
    none_runs(pairs)


@pytest.mark.parametrize("ill", ["p0", "d0"])
def test_one_of_two_is_dead(pairs: Stack, ill: str) -> None:
    pairs.fleet[ill].kill()
    for stream in (False, True, False, True):
        assert right(pairs.post("/v1/completions", completion(stream=stream)))
    pairs.fleet[ill].start()
    wait_until(pairs.well, 10, "it is used again")
    for _ in range(4):
        assert right(pairs.post("/v1/completions", completion()))
    assert [leg for leg in legs(pairs) if leg["peer"] == ill]


@pytest.mark.parametrize("ill", ["p0", "d0"])
def test_one_of_two_refuses(pairs: Stack, ill: str) -> None:
    pairs.fleet[ill].fault("refuse")
    for _ in range(6):
        assert right(pairs.post("/v1/completions", completion()))
    pairs.fleet[ill].reset()
    wait_until(pairs.well, 10, "it is used again")


@pytest.mark.parametrize("role", ["p", "d"])
def test_killed_in_flight_before_the_first_byte(pairs: Stack, role: str) -> None:
    """The client gets the other pair's answer."""
    for name in ("p0", "p1") if role == "p" else ("d0", "d1"):
        pairs.fleet[name].fault("slow-prefill" if role == "p" else "stall", tokens_per_second=5)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pairs.post, "/v1/completions", completion())
        leg = wait_until(lambda: [leg for leg in legs(pairs) if leg["peer"][0] == role])[0]
        other = pairs.fleet[role + "10"[int(leg["peer"][1])]]
        other.reset()
        pairs.fleet[leg["peer"]].kill()
        assert right(answer.result(20))
    rooms_once(pairs)


def test_decode_is_ended_when_its_prefill_fails(sglang: Stack) -> None:
    """It would wait for its whole patience: 300 s. And the prefill, when its decode fails."""
    for ill, left in (("p0", "d"), ("d0", "p")):
        sglang.recover()
        sglang.fleet[ill].fault("status", status=500)
        for _ in range(4):
            assert right(sglang.post("/v1/completions", completion()))
        for failed in [leg for leg in legs(sglang) if leg["peer"] == ill]:
            other = next(leg for leg in legs(sglang) if leg["room"] == failed["room"] and leg["peer"][0] == left)
            ended = [event["at"] for event in sglang.fleet.log("gone", "abort") if event["peer"] == other["peer"]
                     and (event.get("rid") == other["rid"] or event["number"] == other["number"])]
            assert ended and ended[0] - failed["at"] < 2
        none_runs(sglang)


@pytest.mark.parametrize("fields", [{"status": 500}, {"status": 400}, {"status": 422}])
def test_all_answer_with_an_error(pairs: Stack, fields: dict[str, Any]) -> None:
    """5xx: ours, after one retry. 4xx is the client's: passed on, and not tried elsewhere."""
    for peer in pairs.fleet.role("prefill"):
        peer.fault("status", **fields)
    answer = pairs.post("/v1/completions", completion())
    tried = len([leg for leg in legs(pairs) if leg["peer"][0] == "p"])
    if fields["status"] == 500:
        assert answer.status_code in (502, 503) and "p" in answer.json()["error"]["message"] and tried == 2
    else:
        assert answer.status_code == fields["status"] and tried == 1
        assert answer.json()["error"]["message"] == f"the fake engine says {fields['status']}"
        assert set(pairs.standings().values()) == {"up"}
    none_runs(pairs)


@pytest.mark.parametrize(("status", "seconds"), BUSY)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_busy_engines(pairs: Stack, role: str, status: int, seconds: int | None) -> None:
    """One of two: the other takes it. Both: their answer with their Retry-After, or one of ours; nobody is condemned."""
    one, two = pairs.fleet.role(role)
    fault = {"status": status, **({} if seconds is None else {"retry_after": seconds})}
    one.fault("status", **fault)
    for _ in range(3):
        assert right(pairs.post("/v1/completions", completion()))
    two.fault("status", **fault)
    answer = pairs.post("/v1/completions", completion())
    assert answer.status_code == status
    assert int(answer.headers["retry-after"]) >= 1 if seconds is None else answer.headers["retry-after"] == "7"
    assert set(pairs.standings().values()) == {"up"}
    none_runs(pairs)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["transfer-fails", "abort"])
def test_no_200_from_a_failed_transfer(pairs: Stack, kind: str, stream: bool) -> None:
    """The engines themselves answer 200 to a stream whose transfer failed, and to what was aborted."""
    one, two = pairs.fleet.role("decode")
    one.fault(kind)
    for _ in range(3):
        assert right(pairs.post("/v1/completions", completion(stream=stream)))
    two.fault(kind)
    answer = pairs.post("/v1/completions", completion(stream=stream))
    assert answer.status_code in (500, 502, 503) and "choices" not in answer.json()
    none_runs(pairs)


@pytest.mark.parametrize("kind", ["no-params", "odd-params"])
def test_prefill_without_parameters_for_the_decode(vllm: Stack, kind: str) -> None:
    vllm.fleet["p0"].fault(kind)
    for _ in range(3):
        assert right(vllm.post("/v1/completions", completion()))
    vllm.fleet["p1"].fault(kind)
    assert vllm.post("/v1/completions", completion()).status_code in (502, 503)


@pytest.mark.parametrize(("path", "kind", "fields"), [
    *(("/v1/completions", kind, fields) for kind, fields in (
        ("cut", {"how": "rst"}), ("cut", {"how": "fin"}), ("abort", {}), ("bad-json", {}), ("bad-sse", {}), ("no-done", {}),
        ("long-event", {"bytes": 17 << 20}))),
    *(("/v1/chat/completions", kind, {}) for kind in ("cut", "abort", "no-done")),
    *(("/v1/responses", kind, {}) for kind in ("cut", "bad-json", "bad-sse"))])
def test_broken_off_after_the_first_byte(pairs: Stack, path: str, kind: str, fields: dict[str, Any]) -> None:
    """The good events arrive, then one terminal error event, and no [DONE] behind it that would make it look complete."""
    for peer in pairs.fleet.role("decode"):
        peer.fault(kind, after=2, **fields)
    body = {"/v1/completions": completion(tokens=6, stream=True), "/v1/chat/completions": chat(tokens=6, stream=True),
            "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 6, "stream": True}}[path]
    started = time.monotonic()
    with pairs.gateway.client.stream("POST", path, json=body) as answer:
        found = [data for _, data in events(answer)]
    assert answer.status_code == 200 and time.monotonic() - started < 15
    last = json.loads(found[-1])
    assert last.get("error", {}).get("message") or (last.get("type") == "error" and last["message"])
    first = digest("<user>hello" if "chat" in path else "hello")
    assert first in "".join(found) and '" 1"' in "".join(found) and "[DONE]" not in found
    none_runs(pairs)


def test_what_a_client_may_still_read(pairs: Stack) -> None:
    """Odd but whole: answered twice, of another content type. Right, or refused; never a mixture of two answers."""
    for kind in ("twice", "wrong-type"):
        for peer in pairs.fleet.role("decode"):
            peer.fault(kind)
        for stream in (False, True):
            for _ in range(2):
                answer = pairs.post("/v1/completions", completion(stream=stream))
                assert answer.status_code >= 500 or right(answer)
        pairs.recover()


def test_an_engine_that_says_500_gets_work_again(pairs: Stack) -> None:
    """Half open: a real request of the gateway's own decides, and no client pays for the trial."""
    pairs.fleet["p0"].fault("status", status=500)
    for _ in range(6):
        assert right(pairs.post("/v1/completions", completion()))
    assert pairs.standings()["p0"] != "up"
    tried = len([leg for leg in legs(pairs) if leg["peer"] == "p0"])
    pairs.fleet["p0"].reset()
    wait_until(pairs.well, 10, "p0 is up again")
    assert tried <= 3
    for _ in range(4):
        assert right(pairs.post("/v1/completions", completion()))
    assert [leg for leg in legs(pairs) if leg["peer"] == "p0"]


def test_a_slow_prefill_is_not_condemned(pairs: Stack) -> None:
    """Both need 2.5 s more for what they did in milliseconds before: nobody is out, and the answer comes."""
    for _ in range(4):
        assert right(pairs.post("/v1/completions", completion()))
    for peer in pairs.fleet.role("prefill"):
        peer.fault("slow-prefill", seconds=2.5)
    assert right(pairs.post("/v1/completions", completion("x" * 20, stream=True)), "x" * 20)
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
        assert right(pairs.post("/v1/completions", completion()))
    pairs.fleet[ill].fault(kind)
    slowest = 0.0
    for stream in (False, True):
        started = time.monotonic()
        assert right(pairs.post("/v1/completions", completion(stream=stream)))
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 10
    none_runs(pairs)


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
    assert right(pairs.post("/v1/completions", completion()))


def test_the_canary_is_a_real_transfer(pairs: Stack) -> None:
    """After a role came back, the pair counts as one only once KV went from the one to the other."""
    pairs.fleet["d0"].kill()
    wait_until(lambda: pairs.standings()["d0"] == "out", 5)
    since = time.monotonic()
    pairs.fleet["d0"].start()
    wait_until(pairs.up, 20, f"all are up: {pairs.status()}")
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
