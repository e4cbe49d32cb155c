"""Greedy answers with logprobs from a live endpoint, for parity."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from tightrank.verify.client import REQUEST_SECONDS, Refused, authorization, refusal
from tightrank.verify.parity import Answer, Prompt, read, request
from tightrank.verify.target import NotThere


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine's own HTTP, or a gateway of ours before vLLM."""
    url: str
    engine: str
    model: str                     # as a request must name it
    api_key: str | None


async def look(http: httpx2.AsyncClient, url: str, api_key: str | None) -> Endpoint:
    """Which engine answers there, and the name of its model. Raises NotThere."""
    headers = authorization(api_key)
    try:
        models = await http.get(f"{url}/v1/models", headers=headers, timeout=REQUEST_SECONDS)
        model = str(models.json()["data"][0]["id"])
        info = await http.get(f"{url}/get_model_info", headers=headers, timeout=REQUEST_SECONDS)      # SGLang alone has it
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise NotThere(f"nobody answers at {url} ({type(error).__name__})") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise NotThere(f"{url}/v1/models names no model (status {models.status_code})") from None
    return Endpoint(url, "sglang" if info.status_code == 200 else "vllm", model, api_key)


async def answers(http: httpx2.AsyncClient, endpoint: Endpoint, prompts: Sequence[Prompt], answer_tokens: int,
                  timeout_seconds: float) -> tuple[Answer, ...]:
    """One after another: what shares a batch may add up in another order. Raises Refused, NotThere."""
    return tuple([await _answer(http, endpoint, prompt, answer_tokens, timeout_seconds) for prompt in prompts])


async def _answer(http: httpx2.AsyncClient, endpoint: Endpoint, prompt: Prompt, answer_tokens: int, timeout_seconds: float
                  ) -> Answer:
    path, body = request(endpoint.engine, endpoint.model, prompt, answer_tokens)
    try:
        response = await http.post(endpoint.url + path, json=body, headers=authorization(endpoint.api_key),
                                   timeout=httpx2.Timeout(timeout_seconds, connect=REQUEST_SECONDS))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise NotThere(f"the connection to {endpoint.url} broke ({type(error).__name__})") from None
    if response.status_code != 200:
        raise Refused(f"{endpoint.url}: {refusal(response.status_code, response.content)}")
    try:
        return read(endpoint.engine, prompt, response.json())
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Refused(f"{endpoint.url}{path}: its answer has no logprobs of token IDs ({type(error).__name__}: {error}); give "
                      "the address of the engine itself") from None
