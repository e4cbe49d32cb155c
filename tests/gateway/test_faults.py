"""What engines may do wrong. One of two is ill: the client gets a right answer by the other pair, in a new room, and the leg
that was left over is ended at its engine. Both are ill: an error of ours, never a text from a failed transfer."""
from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def rooms_once(stack: Stack) -> None:
    for peer in stack.fleet.peers:
        rooms = [leg["room"] for leg in stack.legs() if leg["peer"] == peer.name and leg["room"] is not None]
        assert len(rooms) == len(set(rooms))


@pytest.mark.parametrize(("kind", "fields"), NO_ANSWER, ids=NAMES)
@pytest.mark.parametrize(("role", "stream"), [("prefill", False), ("decode", False), ("decode", True)])
def test_one_gives_no_answer(pairs: Stack, role: str, stream: bool, kind: str, fields: dict[str, Any]) -> None:
    if kind == "flood-1xx" or (kind == "bad-json" and pairs.engine == "sglang" and role == "prefill"):
        fields = {**fields, "times": 50, "then": "answer"}       # may be borne: a good answer follows
    pairs.trusted(role).fault(kind, paths=["/v1/completions"], count=1, **fields)
    tries = 0
    while not [leg for leg in pairs.legs() if leg["fault"] == kind]:
        assert (tries := tries + 1) <= 6, "nobody met it"
        assert pairs.right(pairs.post("/v1/completions", completion(stream=stream)))
    rooms_once(pairs)
    pairs.none_runs()


@pytest.mark.parametrize("role", ["p", "d"])
def test_killed_in_flight_before_the_first_byte(pairs: Stack, role: str) -> None:
    """The client gets the other pair's answer."""
    for name in ("p0", "p1") if role == "p" else ("d0", "d1"):
        pairs.fleet[name].fault("slow-prefill" if role == "p" else "stall", tokens_per_second=5)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pairs.post, "/v1/completions", completion())
        leg = wait_until(lambda: [leg for leg in pairs.legs() if leg["peer"][0] == role])[0]
        other = pairs.fleet[role + "10"[int(leg["peer"][1])]]
        other.reset()
        pairs.fleet[leg["peer"]].kill()
        assert pairs.right(answer.result(20))
    rooms_once(pairs)


def test_decode_is_ended_when_its_prefill_fails(sglang: Stack) -> None:
    """It would wait for its whole patience: 300 s. And the prefill, when its decode fails."""
    for ill, left in (("p0", "d"), ("d0", "p")):
        sglang.recover()
        sglang.fleet[ill].fault("status", status=500)
        for _ in range(4):
            assert sglang.right(sglang.post("/v1/completions", completion()))
        for failed in [leg for leg in sglang.legs() if leg["peer"] == ill]:
            other = next(leg for leg in sglang.legs() if leg["room"] == failed["room"] and leg["peer"][0] == left)
            ended = [event["at"] for event in sglang.fleet.log("gone", "abort") if event["peer"] == other["peer"]
                     and (event.get("rid") == other["rid"] or event["number"] == other["number"])]
            assert ended and ended[0] - failed["at"] < 2
        sglang.none_runs()


@pytest.mark.parametrize("fields", [{"status": 500}, {"status": 400}, {"status": 422}])
def test_all_answer_with_an_error(pairs: Stack, fields: dict[str, Any]) -> None:
    """5xx: ours, after one retry. 4xx is the client's: passed on, and not tried elsewhere."""
    for peer in pairs.fleet.role("prefill"):
        peer.fault("status", **fields)
    answer = pairs.post("/v1/completions", completion())
    tried = len([leg for leg in pairs.legs() if leg["peer"][0] == "p"])
    if fields["status"] == 500:
        assert answer.status_code in (502, 503) and "p" in answer.json()["error"]["message"] and tried == 2
    else:
        assert answer.status_code == fields["status"] and tried == 1
        assert answer.json()["error"]["message"] == f"the fake engine says {fields['status']}"
        assert set(pairs.standings().values()) == {"up"}
    pairs.none_runs()


@pytest.mark.parametrize(("status", "seconds"), BUSY)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_busy_engines(pairs: Stack, role: str, status: int, seconds: int | None) -> None:
    """One of two: the other takes it. Both: their answer with their Retry-After, or one of ours; nobody is condemned."""
    one, two = pairs.fleet.role(role)
    fault = {"status": status, **({} if seconds is None else {"retry_after": seconds})}
    one.fault("status", **fault)
    for _ in range(3):
        assert pairs.right(pairs.post("/v1/completions", completion()))
    two.fault("status", **fault)
    answer = pairs.post("/v1/completions", completion())
    assert answer.status_code == status
    assert int(answer.headers["retry-after"]) >= 1 if seconds is None else answer.headers["retry-after"] == "7"
    assert set(pairs.standings().values()) == {"up"}
    pairs.none_runs()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["transfer-fails", "abort"])
def test_no_200_from_a_failed_transfer(pairs: Stack, kind: str, stream: bool) -> None:
    """The engines themselves answer 200 to a stream whose transfer failed, and to what was aborted."""
    one, two = pairs.fleet.role("decode")
    one.fault(kind)
    for _ in range(3):
        assert pairs.right(pairs.post("/v1/completions", completion(stream=stream)))
    two.fault(kind)
    answer = pairs.post("/v1/completions", completion(stream=stream))
    assert answer.status_code in (500, 502, 503) and "choices" not in answer.json()
    pairs.none_runs()


@pytest.mark.parametrize("kind", ["no-params", "odd-params"])
def test_prefill_without_parameters_for_the_decode(vllm: Stack, kind: str) -> None:
    vllm.fleet["p0"].fault(kind)
    for _ in range(3):
        assert vllm.right(vllm.post("/v1/completions", completion()))
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
    pairs.none_runs()


def test_what_a_client_may_still_read(pairs: Stack) -> None:
    """Odd but whole: answered twice, of another content type. Right, or refused; never a mixture of two answers."""
    for kind in ("twice", "wrong-type"):
        for peer in pairs.fleet.role("decode"):
            peer.fault(kind)
        for stream in (False, True):
            for _ in range(2):
                answer = pairs.post("/v1/completions", completion(stream=stream))
                assert answer.status_code >= 500 or pairs.right(answer)
        pairs.recover()
