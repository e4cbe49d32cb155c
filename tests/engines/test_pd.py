"""Real prefill/decode pairs under `tightrank up` with `tightrank gateway` before them: right answers, and every death told.

The tests of a pair run in this order on the same pair: each leaves it as it found it.
"""
from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from fleet import events
from helpers import free_ports, wait_until
from raw_engine import RawEngine, interpreter
from real_pair import ARGUMENTS, ENVIRONMENTS, RANK, ROLES, Outcome, Question, RealPair, questions, send, text_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CLIENTS, REQUESTS = 6, 200
LONG = [(place * 11) % 250 + 3 for place in range(8000)]          # seconds of prefill
ENDLESS = {"prompt": LONG[:300], "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "model": "tiny", "stream": True}


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
         dense_model: str) -> Iterator[tuple[RealPair, list[Question]]]:
    """A pair, and the questions with the answers of a single worker."""
    directory = tmp_path_factory.mktemp(request.param)
    asked = list(questions(request.param))
    if request.param == "sglang":          # its decode role computes no prompt, so another worker has to be asked
        asked = alone(directory / "alone", dense_model, asked)
    pair = RealPair(request.param, directory, dense_model)
    try:
        pair.start()
        if request.param == "vllm":        # a decode worker that is handed nothing computes the prompt itself
            asked = [replace(each, expected=text_of(pair.ask("decode", each.path, each.body).json())) for each in asked]
        yield pair, asked
    finally:
        pair.close()


def alone(directory: Path, model: str, asked: list[Question]) -> list[Question]:
    port = free_ports(1)[0]
    argv = [interpreter("sglang"), "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port",
            str(port), *ARGUMENTS["sglang"], "--served-model-name", "tiny"]
    engine = RawEngine(directory, argv, port, None, env=ENVIRONMENTS["sglang"])
    try:
        engine.wait_ready()
        return [replace(each, expected=text_of(engine.request("POST", each.path, each.body)[1])) for each in asked]
    finally:
        engine.stop()


@pytest.fixture
def pair(both: tuple[RealPair, list[Question]]) -> RealPair:
    return both[0]


@pytest.fixture
def asked(both: tuple[RealPair, list[Question]]) -> list[Question]:
    return both[1]


def mixed(pair: RealPair, asked: list[Question]) -> None:
    """REQUESTS of all kinds, several at once, streamed and not: every answer is the single worker's."""
    with httpx2.Client(base_url=pair.gateway.url, timeout=120, trust_env=False) as client, ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = list(pool.map(lambda i: send(client, asked[i * 7 % len(asked)], i % 2 == 0), range(REQUESTS)))
    wrong = [outcome for outcome in outcomes if not outcome.right]
    assert not wrong, f"{len(wrong)} of {REQUESTS}: {wrong[0]}"
    wait_until(pair.idle, 5, "no request left at an engine")


def test_answers_are_those_of_a_single_worker_and_the_kv_went_over(pair: RealPair, asked: list[Question]) -> None:
    before = {role: max((step["id"] for step in pair.steps(role)), default=0) for role in ROLES}
    mixed(pair, asked)
    chunks = {role: [chunk for step in pair.steps(role, before[role]) for chunk in step["chunks"]] for role in ROLES}
    assert len({new for _, new in chunks["prefill"]}) > 5, "the line cuts the prefill worker's chunks"
    # The decode worker of vLLM computes the last token of a prompt, that of SGLang nothing: all else was handed over.
    assert all(new == 1 for _, new in chunks["decode"]), chunks["decode"]
    [rank] = [rank for rank in pair.worker("prefill")["ranks"] if rank["role"] == RANK[pair.engine]]
    assert rank["facts"]["cache_releases"] > 0, "the hook empty-cache sees the chunks of a prefill worker"


class Load:
    """Clients that ask all the time, each its next question when the last one is answered."""

    def __init__(self, pair: RealPair, asked: list[Question]) -> None:
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []
        self._over, self._asked = threading.Event(), asked
        self._client = httpx2.Client(base_url=pair.gateway.url, timeout=120, trust_env=False)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(3)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            number += 1
            try:
                outcome = send(self._client, self._asked[number * 5 % len(self._asked)], number % 2 == 0)
            except (httpx2.TransportError, AssertionError) as error:
                self.broken.append(repr(error))
                continue
            self.outcomes.append(outcome)
            self._over.wait(0.0 if outcome.text is not None else 0.5)

    def since(self, monotonic: float) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.began + outcome.seconds > monotonic]


class Endless:
    """A stream of many tokens, read by a thread of its own."""

    def __init__(self, pair: RealPair) -> None:
        self.count, self.last, self.ended = 0, "", 0.0
        self._thread = threading.Thread(target=self._run, args=(pair.gateway.url,))
        self._thread.start()
        wait_until(lambda: self.count > 5 or not self._thread.is_alive(), 60, "the stream goes")

    def _run(self, url: str) -> None:
        with httpx2.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=120, trust_env=False) as response:
            for _, event in events(response):
                self.count, self.last = self.count + 1, event
        self.ended = time.monotonic()

    def end(self) -> str:
        """Its last event."""
        self._thread.join()
        return self.last


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.full)])
def test_a_role_is_killed_under_load_and_comes_back(pair: RealPair, asked: list[Question], role: str) -> None:
    before = {each: pair.worker(each)["generation"] for each in ROLES}
    with Load(pair, asked) as load:
        wait_until(lambda: len(load.outcomes) > 20, 60, "load")
        stream, killed = Endless(pair), time.monotonic()
        pair.signal(role, signal.SIGKILL)
        wait_until(lambda: not pair.ready(), 2, "the gateway is not ready any more")
        refused = pair.gateway.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 1})
        pair.wait_up(role, before[role] + 1)
        up_unix = pair.up_unix(role)
        wait_until(lambda: any(outcome.right and outcome.unix > up_unix for outcome in load.outcomes), 10, "work again")
    assert not load.broken, "a client was left without an answer"
    answered = [outcome for outcome in load.outcomes if outcome.text is not None]
    assert all(outcome.right for outcome in answered), "an answer from a transfer that failed"
    slowest = max(outcome.seconds for outcome in load.since(killed))
    first = min(outcome.unix for outcome in answered if outcome.unix > up_unix)
    print(f"{pair.engine}, {role} killed: slowest answer {slowest:.2f} s, work {first - up_unix:.2f} s after up, "
          f"{len(load.outcomes) - len(answered)} of {len(load.outcomes)} got an error; stream: {stream.end()[:200]}")
    assert slowest < 10 and first - up_unix < 3
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0, refused.text
    if role == "prefill":
        assert stream.end() == "[DONE]", "who has its KV needs no prefill worker"
    else:
        assert '"error"' in stream.end() and stream.ended - killed < 3
    other = next(each for each in ROLES if each != role)
    assert pair.worker(other)["generation"] == before[other], "the other role lives on"
    mixed(pair, asked)


def healed(pair: RealPair) -> None:
    wait_until(pair.ready, 30, "the gateway is ready again")
    wait_until(pair.idle, 10, f"no request left at an engine: {[pair.busy(role) for role in ROLES]}")


def test_a_prefill_that_stands_still_is_told_within_seconds(pair: RealPair) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.gateway.post, "/v1/completions", {**ENDLESS, "prompt": LONG, "stream": False})
        wait_until(lambda: pair.busy("prefill"), 30, "the prompt is being computed")
        pair.signal("prefill", signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            response = answer.result(timeout=30)
            seconds = time.monotonic() - stopped
            wait_until(lambda: not pair.ready(), 2, "the gateway is not ready any more")
        finally:
            pair.signal("prefill", signal.SIGCONT)
    print(f"{pair.engine}, prefill stopped: {response.status_code} after {seconds:.2f} s, {response.text}")
    assert response.status_code == 503 and "a process of it is stopped" in response.json()["error"]["message"]
    assert seconds < 6
    healed(pair)


def test_a_decode_that_stands_still_ends_the_stream_with_an_error(pair: RealPair) -> None:
    stream, stopped = Endless(pair), time.monotonic()
    pair.signal("decode", signal.SIGSTOP)
    try:
        last = stream.end()
    finally:
        pair.signal("decode", signal.SIGCONT)
    print(f"{pair.engine}, decode stopped: {last} after {stream.ended - stopped:.2f} s")
    assert '"error"' in last and stream.ended - stopped < 6
    healed(pair)


@pytest.mark.parametrize(("role", "prompt"), [("prefill", LONG[::-1]), ("decode", LONG[:300])])
def test_a_client_that_leaves_is_told_to_both_engines(pair: RealPair, role: str, prompt: list[int]) -> None:
    body = json.dumps({**ENDLESS, "prompt": prompt, "stream": False}).encode()
    with socket.create_connection(("127.0.0.1", pair.gateway.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: pair.busy(role), 30, f"the request is at the {role} worker")
    left = time.monotonic()
    wait_until(pair.idle, 10, "no request left at an engine")
    print(f"{pair.engine}, {role}: idle {time.monotonic() - left:.2f} s after the client left")
    assert time.monotonic() - left < 3
