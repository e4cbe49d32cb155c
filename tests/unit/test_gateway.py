"""The gateway's pure parts: events, bodies, routes, predictions, what proves that an engine is frozen, standings."""
from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank.gateway import admit, pick, protocol, sse
from tightrank.gateway.intake import Asked, understood
from tightrank.gateway.pace import Pace, joined
from tightrank.gateway.peers import Member, Peers
from tightrank.gateway.records import Failure, LegFailed, Peer, Pulse, Route, Standing
from tightrank.gateway.watchdog import frozen
from tightrank.records import Shed


def peer(name: str, role: str = "both", **changes: Any) -> Peer:
    base = Peer(name, name, "sglang", role, f"http://127.0.0.1/{name}", "m", "127.0.0.1", 8998)
    return replace(base, **changes)


def supervised(name: str, generation: int = 1, phase: str = "up", **changes: Any) -> Peer:
    return peer(name, supervisor="http://s", generation=generation, phase=phase, **changes)


# --- events -----------------------------------------------------------------------------------------------------------

EVENTS = [b"data: {}\n\n", b": beat\n\n", b"event: x\ndata: 1\n\n", b"data: a\r\n\r\n", b"data: [DONE]\n\n"]


@given(st.lists(st.sampled_from(EVENTS)), st.lists(st.integers(1, 7)))
def test_a_stream_is_cut_into_the_events_it_was_made_of(events: list[bytes], cuts: list[int]) -> None:
    splitter, stream, found = sse.Splitter(), b"".join(events), []
    while stream:
        size = cuts.pop() if cuts else 5
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found == events
    assert splitter.rest == b""


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\n\n", b"{\"a\": 1}\n\n", b"\xff\xfe\n\n"])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(sse.NotEvents):
        sse.Splitter().feed(data)


@pytest.mark.parametrize(("event", "comment"), [
    (b": beat\n\n", True), (b":\r\n\r\n", True), (b": half of o", True), (b"", True), (b"data: {}\n\n", False), (b"da", False),
    (b": beat\ndata: {}\n\n", False)])
def test_a_comment_is_told_from_a_word(event: bytes, comment: bool) -> None:
    assert sse.comment(event) is comment


def test_an_event_without_end_is_refused() -> None:
    splitter = sse.Splitter()
    splitter.feed(b"data: " + b"x" * (sse.EVENT_BYTES - 6))
    with pytest.raises(sse.NotEvents, match="more than"):
        splitter.feed(b"x")


@pytest.mark.parametrize(("answer", "why"), [
    ({"choices": [{"finish_reason": "abort", "text": "cut"}]}, "abort"),
    ({"choices": [{"finish_reason": "error"}]}, "error"),
    ({"meta_info": {"finish_reason": {"type": "abort", "message": "Decode transfer failed"}}}, "Decode transfer failed"),
    ({"error": {"message": "KV load failure", "code": 500}}, "KV load failure"),
    ({"object": "error", "message": "Decode transfer failed", "code": 500}, "Decode transfer failed"),
    ({"type": "response.failed", "response": {"status": "failed", "error": {"message": "gone"}}}, "gone"),
])
def test_a_request_given_up_under_status_200_is_seen(answer: dict[str, Any], why: str) -> None:
    assert why in sse.gave_up(answer)


@pytest.mark.parametrize("answer", [
    {"choices": [{"finish_reason": "stop", "text": "abort: error"}]}, {"choices": [{"finish_reason": None}]}, {"error": None},
    {"meta_info": {"finish_reason": {"type": "length"}}}, {"choices": "odd"}, {"choices": [1]}, [], None, "error"])
def test_a_good_answer_is_not_taken_for_one_given_up(answer: Any) -> None:
    assert sse.gave_up(answer) == ""


def test_only_an_error_of_the_client_is_the_clients() -> None:
    assert sse.clients_fault({"error": {"code": 400}})
    assert not any(map(sse.clients_fault, ({"error": {"code": 500}}, {"error": {"code": 429}}, {"error": "x"}, {}, None)))


@pytest.mark.parametrize(("event", "says"), [
    ({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, False),
    ({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, True),
    ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]}, True),
    ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, True),
    ({"choices": [{"text": "", "finish_reason": None}]}, False),
    ({"text": "", "output_ids": [], "meta_info": {"finish_reason": None}}, False),
    ({"text": "", "output_ids": [7], "meta_info": {"finish_reason": None}}, True),
    ({"type": "response.created", "response": {}}, False),
    ({"type": "response.output_text.delta", "delta": "a"}, True),
    ({"choices": [], "usage": {}}, True)])
def test_an_announcement_says_nothing_yet(event: dict[str, Any], says: bool) -> None:
    assert sse.says(b"data: " + json.dumps(event).encode() + b"\n\n") is says


# --- bodies -----------------------------------------------------------------------------------------------------------

@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none())), st.sampled_from(["", " ", "\n\t"]))
def test_what_the_protocol_adds_leaves_the_rest_as_it_was(body: dict[str, Any], space: str) -> None:
    written = json.dumps(body, ensure_ascii=False)[:-1] + space + "}" + space
    spliced = protocol.spliced(written.encode(), {"rid": "a"})
    assert spliced.startswith(written.rstrip()[:-1].encode())
    assert json.loads(spliced) == {**body, "rid": "a"}


def test_a_prefill_leg_of_vllm_asks_for_one_token_and_no_stream() -> None:
    body = b'{"model": "m", "messages": [], "stream": true, "max_completion_tokens": 99, "min_tokens": 5, "stream_options": {}}'
    sent = json.loads(protocol.vllm_prefill("/v1/chat/completions", body, json.loads(body)))
    assert (sent["max_tokens"], sent["max_completion_tokens"], sent["stream"], sent["stream_options"]) == (1, 1, False, None)
    assert sent["min_tokens"] == 0
    assert sent["kv_transfer_params"]["do_remote_decode"]


@pytest.mark.parametrize(("engine", "path", "body", "refused"), [
    ("vllm", "/v1/completions", {"prompt": "a"}, False), ("vllm", "/v1/completions", {"prompt": [1, 2]}, False),
    ("vllm", "/v1/completions", {"prompt": ["a", "b"]}, True), ("vllm", "/v1/completions", {"prompt": [[1], [2]]}, True),
    ("vllm", "/v1/completions", {"prompt": "a", "n": 2}, False), ("vllm", "/generate", {}, True),
    ("sglang", "/v1/completions", {"prompt": ["a", "b"]}, False), ("sglang", "/v1/chat/completions", {"n": 2}, True),
    ("sglang", "/generate", {"sampling_params": {"n": 2}}, True), ("sglang", "/v1/responses", {}, False)])
def test_what_no_pair_can_serve_is_known(engine: str, path: str, body: dict[str, Any], refused: bool) -> None:
    assert bool(protocol.unpairable(engine, path, body)) is refused


# --- routes -----------------------------------------------------------------------------------------------------------

def chosen(members: list[Member], avoid: set[str] = frozenset(), paired: bool = True) -> Route | None:  # type: ignore[assignment]
    return pick.pick(members, None, avoid, lambda prefill, decode: paired)


def member(name: str, role: str = "both", standing: Standing = Standing.UP, **changes: Any) -> Member:
    found = Member(peer(name, role), standing)
    for key, value in changes.items():
        setattr(found, key, value)
    return found


def test_prefill_goes_by_waiting_tokens_and_decode_by_running_requests() -> None:
    members = [member("p0", "prefill", queued_tokens=900, running=1), member("p1", "prefill", queued_tokens=10, running=9),
               member("d0", "decode", running=3), member("d1", "decode", running=2, queued_tokens=99)]
    assert chosen(members) == Route(peer("d1", "decode"), peer("p1", "prefill"))


def test_a_suspect_is_taken_only_where_none_is_up_and_one_that_is_out_never() -> None:
    members = [member("a", running=5), member("b", standing=Standing.SUSPECT), member("c", standing=Standing.OUT)]
    assert chosen(members) == Route(peer("a"))
    assert chosen(members, {"a"}) == Route(peer("b"))
    assert chosen(members, {"a", "b"}) is None


def test_a_plain_worker_is_preferred_to_a_pair_unless_only_the_pair_is_up() -> None:
    pair = [member("p", "prefill"), member("d", "decode")]
    assert chosen([*pair, member("a")]) == Route(peer("a"))
    assert chosen([*pair, member("a", standing=Standing.SUSPECT)]) == Route(peer("d", "decode"), peer("p", "prefill"))
    assert chosen([member("p", "prefill")]) is None


def test_a_pair_is_of_one_engine_and_one_model() -> None:
    other = Member(peer("d", "decode", model="n"), Standing.UP)
    assert chosen([member("p", "prefill"), other]) is None
    assert pick.pick([member("a")], "n", (), lambda p, d: True) is None
    assert pick.pick([Member(peer("a", model=""), Standing.UP)], "n", (), lambda p, d: True) is not None


# --- predictions ------------------------------------------------------------------------------------------------------

def test_a_prediction_needs_a_measurement_and_keeps_the_worst_for_a_while() -> None:
    pace = Pace()
    assert pace.prefill_seconds(1000) is None
    pace.first_byte(1.0, 1000)
    pace.first_byte(0.1, 1000)
    assert pace.prefill_seconds(2000) == pytest.approx(2.0, rel=0.1)
    assert pace.answer_seconds(2000, None) is None          # how long an answer becomes was not said
    assert pace.answer_seconds(2000, 0) == pace.prefill_seconds(2000)
    pace.whole(3.0, 1000, 100)
    assert pace.answer_seconds(1000, 200) == pytest.approx(1.0 + 4.0, rel=0.1)


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(1, 10**6)), min_size=1))
def test_a_prediction_is_never_under_the_last_measurement(measured: list[tuple[float, int]]) -> None:
    pace = Pace()
    for seconds, tokens in measured:
        pace.first_byte(seconds, tokens)
        predicted = pace.prefill_seconds(tokens)
        assert predicted is not None
        assert predicted >= seconds * 0.999
    assert joined([Pace(), pace]).prompt_seconds == pace.prompt_seconds


# --- what proves that an engine is frozen -----------------------------------------------------------------------------

def pulse(stopped: bool = False, age: float | None = 0.0, cpu: float | None = 10.0) -> Pulse:
    return Pulse(1, stopped, age, None, cpu)


@pytest.mark.parametrize(("now", "before", "silence", "step", "is_frozen"), [
    (pulse(stopped=True), None, 0.7, 60.0, True),
    (pulse(age=0.1), pulse(), 100.0, 0.1, False),           # its loop turns: slow is no fault
    (pulse(age=5.0), pulse(), 5.0, 0.1, True),
    (pulse(age=500.0), pulse(), 0.8, 0.1, False),           # an idle loop may be silent: only since we asked it counts
    (pulse(age=5.0), pulse(), 5.0, 4.0, False),             # one step may take that long
    (pulse(age=5.0, cpu=12.0), pulse(), 5.0, 0.1, False),   # it computes (a compiler)
    (pulse(age=50.0, cpu=12.0), pulse(), 50.0, 0.1, True),  # ... but not for ever
    (pulse(age=5.0), None, 5.0, 0.1, False),                # whether it computes is not known yet
    (pulse(age=None), pulse(), 50.0, 0.1, False)])          # without the adapter nothing is proved
def test_frozen_is_what_makes_no_progress_for_longer_than_any_step(now: Pulse, before: Pulse | None, silence: float,
                                                                   step: float, is_frozen: bool) -> None:
    assert bool(frozen(now, before, silence, step, 1.0)) is is_frozen


# --- standings --------------------------------------------------------------------------------------------------------

class Leg:
    opened = 0.0

    def __init__(self) -> None:
        self.failures: list[LegFailed] = []

    def fail(self, failure: LegFailed) -> None:
        self.failures.append(failure)


def test_the_end_of_a_generation_ends_its_legs_at_once() -> None:
    peers, leg = Peers(), Leg()
    peers.told("http://s", [supervised("a")])
    peers.members["a"].legs.add(leg)
    peers.told("http://s", [supervised("a", phase="stopping", reason="rank-died: scheduler 0 ended")])
    assert [failure.kind for failure in leg.failures] == [Failure.ENDED]
    assert "rank-died" in str(leg.failures[0])
    assert peers.members["a"].standing is Standing.OUT
    peers.told("http://s", [supervised("a", 2)])
    assert peers.members["a"].standing is Standing.UP


def test_a_draining_worker_gets_nothing_new_and_keeps_what_it_has() -> None:
    peers, leg = Peers(), Leg()
    peers.told("http://s", [supervised("a")])
    peers.members["a"].legs.add(leg)
    peers.told("http://s", [supervised("a", phase="draining")])
    assert peers.members["a"].standing is Standing.OUT
    assert leg.failures == []
    peers.told("http://s", [])
    assert [failure.kind for failure in leg.failures] == [Failure.ENDED]
    assert peers.members == {}


def test_a_worker_that_is_stopped_keeps_what_it_has_until_its_patience_is_over() -> None:
    peers, leg = Peers(), Leg()
    peers.told("http://s", [supervised("a")])
    peers.members["a"].legs.add(leg)
    peers.told("http://s", [supervised("a", phase="stopping", drains=True)])
    assert leg.failures == [] and peers.members["a"].standing is Standing.OUT
    peers.told("http://s", [supervised("a", phase="stopping", reason="being ended: on request")])
    assert [failure.kind for failure in leg.failures] == [Failure.ENDED]


def test_a_failure_of_an_older_generation_says_nothing_about_this_one() -> None:
    peers = Peers()
    peers.told("http://s", [supervised("a", 2)])
    peers.failed(LegFailed(Failure.LOST, supervised("a", 1), "cut"))
    assert peers.members["a"].standing is Standing.UP


@pytest.mark.parametrize(("kind", "standing"), [
    (Failure.REFUSED, Standing.OUT), (Failure.FROZEN, Standing.OUT), (Failure.LOST, Standing.SUSPECT),
    (Failure.ERROR, Standing.SUSPECT), (Failure.SILENT, Standing.SUSPECT), (Failure.GARBAGE, Standing.SUSPECT),
    (Failure.BUSY, Standing.UP), (Failure.ENDED, Standing.UP)])
def test_facts_put_an_engine_out_and_doubts_make_it_suspect_until_a_probe_answers(kind: Failure, standing: Standing) -> None:
    peers, asked = Peers(), []
    peers.on_doubt = asked.append
    peers.told("http://s", [supervised("a")])
    peers.failed(LegFailed(kind, supervised("a"), "x"))
    a = peers.members["a"]
    assert a.standing is standing
    assert asked == ([] if standing is Standing.UP else [a])
    peers.probed(a, LegFailed(Failure.ERROR, a.peer, "500"))
    assert a.standing is Standing.OUT
    peers.probed(a, None)
    assert a.standing is Standing.UP


def test_silent_to_a_probe_beside_our_own_legs_is_only_busy() -> None:
    peers = Peers()
    peers.named([peer("a")])
    a = peers.members["a"]
    a.legs.add(Leg())
    peers.probed(a, LegFailed(Failure.SILENT, a.peer, "3 s"))
    assert a.standing is Standing.SUSPECT
    a.legs.clear()
    peers.probed(a, LegFailed(Failure.SILENT, a.peer, "3 s"))
    assert a.standing is Standing.OUT


# --- memory that is short ---------------------------------------------------------------------------------------------

class Waiting:
    """A leg whose prompt waits for its first token."""

    def __init__(self, tokens: int) -> None:
        self.opened, self.waiting_tokens = 0.0, tokens
        self.failure: LegFailed | None = None

    def fail(self, failure: LegFailed) -> None:
        self.failure = failure


def test_an_abort_ends_the_longest_prompt_that_waits_there_and_nothing_else() -> None:
    peers, legs = Peers(), [Waiting(100), Waiting(9000), Waiting(0), Waiting(500)]
    other, why = supervised("b"), "ending the largest prefill in flight: host: 10 MiB over the floor"
    peers.told("http://s", [supervised("a", generation=2, aborts=5), other])
    peers.members["a"].legs |= set(legs[:3])
    peers.members["b"].legs.add(legs[3])
    peers.told("http://s", [supervised("a", generation=2, aborts=5), other])
    assert not any(leg.failure for leg in legs), "what was before we came, or is told again"
    peers.told("http://s", [supervised("a", generation=2, aborts=6, abort_why=why), other])
    assert [leg.failure is not None for leg in legs] == [False, True, False, False]
    failure = legs[1].failure
    assert failure is not None and failure.kind is Failure.ABORTED and why in str(failure)
    peers.failed(failure)
    assert peers.members["a"].standing is Standing.UP, "it is as well as before"
    peers.members["a"].legs = {legs[2]}
    peers.told("http://s", [supervised("a", generation=2, aborts=7), other])
    assert legs[2].failure is None, "nothing waits"


def test_a_long_prompt_is_kept_from_those_that_shed_without_counting_where_bytes_tell() -> None:
    shed = Shed(100, 10, "why")
    members = [Member(peer("a", shed=shed), Standing.UP), Member(peer("b"), Standing.UP)]

    def refused(**body: Any) -> list[str]:
        asked = understood(Asked("POST", "/v1/completions", "/v1/completions", {}, "id", json.dumps(body).encode()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admit, "_count", counted)
            return list(asyncio.run(admit.shedding(asked, members, None)))  # type: ignore[arg-type]

    async def counted(asked: Asked, *_: Any) -> int | None:
        counts.append(asked.prompt_limit)
        return answers.pop()

    counts: list[int] = []
    answers: list[int | None] = [101, 100, None]
    assert refused(prompt="x" * 10) == [] and refused(prompt=[1] * 100) == [] and refused(prompt=[1] * 101) == ["a"]
    assert counts == []
    assert refused(prompt="x" * 300) == [], "by its estimate, where nobody can count"
    assert refused(prompt="x" * 300) == [] and refused(prompt="x" * 300) == ["a"] and len(counts) == 3


def test_a_lost_supervisor_makes_suspect_and_a_word_of_it_asks_again() -> None:
    peers, asked = Peers(), []
    peers.told("http://s", [supervised("a")])
    peers.on_doubt = asked.append
    peers.unheard("http://s", "its stream ended")
    assert peers.members["a"].standing is Standing.SUSPECT
    peers.told("http://s", [supervised("a")])
    assert len(asked) == 2


@pytest.mark.parametrize(("engine", "path", "key", "kind"), [
    ("vllm", "/v1/completions", "prompt", list), ("sglang", "/generate", "input_ids", list),
    ("atom", "/v1/completions", "prompt", str)])
def test_the_probe_is_in_the_engines_own_words(engine: str, path: str, key: str, kind: type) -> None:
    asked, body = protocol.probe(peer("a", engine=engine))
    assert asked == path and isinstance(body[key], kind)
