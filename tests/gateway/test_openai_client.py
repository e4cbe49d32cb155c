"""OpenAI's official Python client as the gateway's user: answers, streams, tools, its exceptions, its own retries."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fleet import Fleet, GatewayProcess, digest
from helpers import wait_until

Stack = Any
HELLO: Any = [{"role": "user", "content": "hello"}]
TEXT = digest("<user>hello") + " 1 2 3"
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}}}}}


def client_of(gateway: GatewayProcess, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-any", max_retries=retries, timeout=30)


@pytest.fixture
def client(pairs: Stack) -> openai.OpenAI:
    return client_of(pairs.gateway)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
    assert answer.choices[0].message.content == TEXT and answer.usage is not None and answer.usage.completion_tokens == 4
    assert answer._request_id                                   # X-Request-Id


def test_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, stream=True,
                                            stream_options={"include_usage": True})
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == TEXT
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 4


def test_completions_models_and_extra_fields(client: openai.OpenAI, pairs: Stack) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=4, extra_body={"top_k": 3},
                                       extra_headers={"X-Request-Id": "mine"})
    assert answer.choices[0].text == digest("hello") + " 1 2 3" and answer._request_id == "mine"
    assert all('"top_k":3' in leg["body"].replace(" ", "") for leg in pairs.legs())
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_responses_and_embeddings(plain: Stack) -> None:
    client = client_of(plain.gateway)
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=4)
    assert answer.output_text == digest("hello") + " 1 2 3"
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=4) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    assert kinds[-1] == "response.completed"
    assert len(client.embeddings.create(model="tiny", input=["a", "b"]).data) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: openai.OpenAI, pairs: Stack, stream: bool) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"}
    if stream:
        with client.chat.completions.stream(**asked) as found:
            choice: Any = found.until_done().get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls" and call.function.name == "look" and TEXT.split()[0] in call.function.arguments
    told = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
    messages = [*HELLO, choice.message.model_dump(exclude_none=True), told]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=4).choices[0].message.content


def test_errors_are_its_exceptions(client: openai.OpenAI, pairs: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"bootstrap_room": 1})
    assert bad.value.param == "bootstrap_room" and bad.value.code
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")                    # a path that is not served
    for peer in pairs.fleet.role("prefill"):
        peer.fault("status", status=429, retry_after=3)
    with pytest.raises(openai.RateLimitError) as busy:
        client.chat.completions.create(model="tiny", messages=HELLO)
    assert busy.value.response.headers["retry-after"] == "3"


def test_an_unknown_model_is_not_found(vllm: Stack) -> None:
    with pytest.raises(openai.NotFoundError):
        client_of(vllm.gateway).chat.completions.create(model="other", messages=HELLO)
    assert set(vllm.standings().values()) == {"up"}


def test_all_dead_is_its_server_error(client: openai.OpenAI, pairs: Stack) -> None:
    for peer in pairs.fleet.role("decode"):
        peer.kill()
    wait_until(lambda: not pairs.gateway.answers("/readyz"), 5)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as error:
            client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert error.value.status_code == 503 and int(error.value.response.headers["retry-after"]) >= 1
        assert "d0" in error.value.message


def test_a_stream_that_breaks_off_raises(client: openai.OpenAI, pairs: Stack) -> None:
    """Not a short answer that looks complete."""
    for peer in pairs.fleet.role("decode"):
        peer.fault("cut", after=2)
    parts = []
    with pytest.raises(openai.APIError) as error:
        parts += list(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=6, stream=True))
    assert error.value.message and "d" in error.value.message


def test_its_own_retries_wait_as_long_as_they_are_told(pairs: Stack) -> None:
    """Busy engines say 1 s; the client waits for it, and then there is room."""
    for peer in pairs.fleet.role("prefill"):
        peer.fault("status", status=503, retry_after=1, count=1)
    started = time.monotonic()
    answer = client_of(pairs.gateway, retries=2).chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
    assert answer.choices[0].message.content == TEXT and time.monotonic() - started >= 1


def test_its_own_retries_bridge_a_restart(sglang: Stack) -> None:
    pairs = sglang
    for peer in pairs.fleet.role("prefill"):
        peer.kill()
    wait_until(lambda: not pairs.gateway.answers("/readyz"), 5)
    timer = threading.Timer(1, lambda: [peer.start() for peer in pairs.fleet.role("prefill")])
    timer.start()
    answer = client_of(pairs.gateway, retries=5).chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
    timer.join()
    assert answer.choices[0].message.content == TEXT


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Engines of which the configuration says that they take 100 tokens."""
    fleet = Fleet("vllm", 0, 0, alone=1)
    gateway = GatewayProcess(tmp_path_factory.mktemp("limited"), [{**peer.entry(), "context": 100} for peer in fleet.peers])
    try:
        fleet.start()
        yield client_of(gateway.start())
    finally:
        gateway.close()
        fleet.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_never_fits_is_a_bad_request_with_the_largest_that_does(limited: openai.OpenAI, stream: bool) -> None:
    assert limited.completions.create(model="tiny", prompt="x" * 80, max_tokens=4).choices
    with pytest.raises(openai.BadRequestError) as error:
        limited.completions.create(model="tiny", prompt="x" * 101, max_tokens=4, stream=stream)
    assert error.value.code == "context_length_exceeded" and "100" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        limited.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 200}])
    assert error.value.code == "context_length_exceeded"
