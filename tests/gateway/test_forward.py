"""What goes through: bodies byte for byte, ids and headers, streams, all paths; who gets what."""
from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fleet import chat, completion, digest, events
from helpers import wait_until

Stack = Any
ODD = b' {\t"model":"tiny" , "prompt" :"h\\u00e9llo \xc3\xa9",\n"max_tokens":4, "x": 1.0e2, "y": 12345678901234567890 } \n'
GENERATING = [("/v1/completions", completion()), ("/v1/chat/completions", chat()),
              ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 4})]


def starts(stack: Stack, path: str = "/v1/completions") -> list[dict[str, Any]]:
    """The legs of our requests: what the gateway asks by itself names no user agent."""
    return [event for event in stack.fleet.log("start") if event["path"] == path and "user-agent" in event["headers"]]


def test_a_body_reaches_a_plain_engine_byte_for_byte(plain: Stack) -> None:
    assert plain.gateway.client.post("/v1/completions", content=ODD).status_code == 200
    (start,) = starts(plain)
    assert start["sha256"] == hashlib.sha256(ODD).hexdigest()


def test_a_body_reaches_a_pair_with_the_protocols_fields_at_its_end(pairs: Stack) -> None:
    answer = pairs.gateway.client.post("/v1/completions", content=ODD)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == digest("héllo é") + " 1 2 3"
    legs = starts(pairs)
    assert {leg["peer"][0] for leg in legs} == {"p", "d"}
    ours = {"sglang": {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}, "vllm": {"kv_transfer_params"}}
    for leg in legs:
        body = leg["body"].encode("latin-1")
        assert body.startswith(ODD[:ODD.rindex(b"}")].rstrip())
        added = set(json.loads(body)) - set(json.loads(ODD))
        assert added == ours[pairs.engine] | ({"stream"} if pairs.engine == "vllm" and leg["peer"][0] == "p" else set())


def test_sglangs_legs_are_equal_and_rooms_are_fresh(sglang: Stack) -> None:
    for _ in range(3):
        assert sglang.post("/v1/completions", completion()).status_code == 200
    legs = starts(sglang)
    rooms = {leg["room"] for leg in legs}
    assert len(rooms) == 3 and all(type(room) is int and 0 <= room < 2**63 for room in rooms)
    for room in rooms:
        one, other = [leg for leg in legs if leg["room"] == room]
        assert one["sha256"] == other["sha256"] and one["rid"]


def test_vllms_prefill_comes_first_and_makes_one_token(vllm: Stack) -> None:
    assert vllm.post("/v1/chat/completions", chat(stream=True)).status_code == 200
    prefill, decode = starts(vllm, "/v1/chat/completions")
    first, second = (json.loads(leg["body"]) for leg in (prefill, decode))
    assert (prefill["peer"][0], decode["peer"][0]) == ("p", "d")
    assert (first["max_tokens"], first["stream"], first["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert (second["max_tokens"], second["stream"], second["kv_transfer_params"]["do_remote_prefill"]) == (4, True, True)


def test_the_answer_is_the_engines_own_byte_for_byte(plain: Stack) -> None:
    headers = {"X-Request-Id": "same"}
    engine = plain.fleet["w0"]
    for path, body in GENERATING:
        for stream in (False, True):
            asked = {**body, "stream": stream}
            direct = engine.client.post(engine.url + path, json=asked, headers=headers)
            through = plain.post(path, asked, headers=headers)
            assert through.content == direct.content and through.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_streams_and_whole_answers_come_through_pairs(pairs: Stack, path: str, body: dict[str, Any]) -> None:
    whole = pairs.post(path, body)
    assert whole.status_code == 200 and (" 1 2 3" in whole.text)
    with pairs.gateway.client.stream("POST", path, json={**body, "stream": True}) as response:
        found = list(events(response))
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    if path == "/v1/responses":
        assert json.loads(found[-1][1])["type"] == "response.completed"
    else:
        assert found[-1][1] == "[DONE]"
    assert found[-1][0] - found[0][0] > 0.01             # each when it is there, not all at the end


def test_generate_of_sglang(sglang: Stack) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
    assert sglang.post("/generate", body).json()["text"] == digest("hello") + " 1 2 3"
    assert sglang.post("/generate", {**body, "stream": True}).text.rstrip().endswith("data: [DONE]")


def test_paths_that_do_not_generate(plain: Stack, pairs: Stack) -> None:
    assert plain.gateway.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert plain.post("/v1/embeddings", {"model": "tiny", "input": "hello"}).json()["data"][0]["embedding"]
    for stack in (plain, pairs):
        assert stack.post("/tokenize", {"model": "tiny", "prompt": "hello"}).json()["count"] == 5
        assert stack.post("/detokenize", {"model": "tiny", "tokens": [104, 105]}).status_code == 200


def test_tools_pass_through(pairs: Stack) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    choice = pairs.post("/v1/chat/completions", chat(tools=[tool])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert all(json.loads(leg["body"])["tools"] == [tool] for leg in starts(pairs, "/v1/chat/completions"))


def test_ids_and_traces_go_on(pairs: Stack) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"X-Request-Id": "mine-1", "traceparent": trace, "tracestate": "a=b", "Authorization": "Bearer sk-x"}
    answer = pairs.post("/v1/completions", completion(), headers=headers)
    assert answer.headers["x-request-id"] == "mine-1"
    legs = starts(pairs)
    assert len(legs) == 2
    for leg in legs:
        assert (leg["request_id"], leg["generation"]) == ("mine-1", "0")
        assert (leg["headers"]["traceparent"], leg["headers"]["tracestate"]) == (trace, "a=b")
        assert leg["headers"]["authorization"] == "Bearer sk-x"


@pytest.mark.parametrize("given", ["", "a b", "x" * 5000, "ä"])
def test_an_id_is_made_where_none_can_be_kept(pairs: Stack, given: str) -> None:
    headers = {"X-Request-Id": given.encode("latin-1")} if given else {}
    answer = pairs.post("/v1/completions", completion(), headers=headers)
    made = answer.headers["x-request-id"]
    assert answer.status_code == 200 and made != given and 8 <= len(made) <= 200
    assert {leg["request_id"] for leg in starts(pairs)} == {made}


def test_headers_of_the_hop_stay_here(pairs: Stack) -> None:
    headers = {"X-Tightrank-Generation": "99", "Connection": "X-Hop", "X-Hop": "1", "Proxy-Authorization": "a", "TE": "x"}
    assert pairs.post("/v1/completions", completion(), headers=headers).status_code == 200
    for leg in starts(pairs):
        assert leg["generation"] == "0" and not {"x-hop", "proxy-authorization", "te"} & set(leg["headers"])


def test_many_at_once_are_spread_and_none_is_mixed_up(pairs: Stack) -> None:
    prompts = [f"prompt {i} " * (1 + i % 5) for i in range(40)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: pairs.post("/v1/completions", completion(prompt)), prompts))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [digest(prompt) + " 1 2 3" for prompt in prompts]
    counts = {name: sum(leg["peer"] == name for leg in starts(pairs)) for name in ("p0", "p1", "d0", "d1")}
    assert min(counts.values()) >= 8, counts


def test_a_clients_connection_stays_open(plain: Stack) -> None:
    ports = set()
    for stream in (False, True, False):
        with plain.gateway.client.stream("POST", "/v1/completions", json=completion(stream=stream)) as response:
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
            response.read()
    assert len(ports) == 1


def test_an_engine_that_hangs_up_on_idle_connections_is_not_failed_by_it(pairs: Stack) -> None:
    """As uvicorn does after 5 s: the connection that the next request would use is gone, and the engine is well."""
    for _ in range(4):
        assert pairs.post("/v1/completions", completion()).status_code == 200
    for peer in pairs.fleet.peers:
        peer.fault("refuse")                              # closes what is idle
        peer.reset()
    for _ in range(4):
        assert pairs.post("/v1/completions", completion()).status_code == 200
    assert set(pairs.standings().values()) == {"up"}


def test_a_long_answer_comes_whole(plain: Stack) -> None:
    with plain.gateway.client.stream("POST", "/v1/completions", json=completion(tokens=300, stream=True)) as response:
        found = [data for _, data in events(response)]
    assert len(found) == 302
    text = "".join(json.loads(data)["choices"][0]["text"] for data in found[:-1])
    assert text == digest("hello") + "".join(f" {i}" for i in range(1, 300))


def test_usage_and_single_events_are_untouched(pairs: Stack) -> None:
    asked = completion(stream=True, stream_options={"include_usage": True})
    found = pairs.post("/v1/completions", asked).text.strip().split("\n\n")
    assert json.loads(found[-2][6:])["usage"]["completion_tokens"] == 4 and found[-1] == "data: [DONE]"


def test_all_is_at_rest_after_it(pairs: Stack) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: pairs.post("/v1/completions", completion(stream=bool(i % 2))), range(16)))
    wait_until(lambda: all((worker["legs"], worker["running"], worker["queued_tokens"]) == (0, 0, 0)
                           for worker in pairs.status()["workers"]), 5, "no legs left")
    ends = {event["event"] for event in pairs.fleet.log("end", "gone", "abort")}
    assert ends == {"end"}
