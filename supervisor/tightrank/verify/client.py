"""HTTP of a verification: what the supervisor knows, and one streamed completion of a prompt of token IDs."""
from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from tightrank.verify.target import Json, NotThere, Target

REQUEST_SECONDS = 10.0
STALE_SECONDS = 15.0           # a supervisor's loop that has not turned for so long is not believed; a calm one turns every 5 s
MOST_EVENTS = 2048             # that one request gives; the supervisor keeps no more
SHOWN_CHARACTERS = 500         # of what an engine says to a refused request


class Refused(Exception):
    """The endpoint answered, and not with what was asked for: a sentence with its own words. `ours`: our request is at
    fault."""

    def __init__(self, why: str, ours: bool = False) -> None:
        super().__init__(why)
        self.ours = ours


class Supervisor:
    """The supervisor's HTTP. Each method raises NotThere when nobody answers who could be one."""

    def __init__(self, http: httpx2.AsyncClient, url: str) -> None:
        self._http, self.url = http, url

    async def status(self) -> Json:
        body = await self._get("/status", "workers", "levels", "guard", "memory", "floor_bytes", "updated_age_seconds")
        age = body["updated_age_seconds"]
        if age > STALE_SECONDS:
            raise NotThere(f"the supervisor at {self.url} is stuck: its loop has not turned for {age:.0f} s")
        return body

    async def plan(self) -> Json:
        return await self._get("/plan", "workers")

    async def steps(self, worker: str, since: int) -> Sequence[Json]:
        """Those with an `id` over `since`."""
        body = await self._get(f"/steps?worker={worker}&since={since}", "steps")
        return list(body["steps"])

    async def events(self, since: int) -> tuple[Sequence[Json], int]:
        """(those after `since`, the number of the last)."""
        body = await self._get(f"/events?since={since}&limit={MOST_EVENTS}", "events")
        return list(body["events"]), int(body["last"])

    async def _get(self, path: str, *keys: str) -> Json:
        try:
            response = await self._http.get(self.url + path, timeout=REQUEST_SECONDS)
            body = response.json()
            if response.status_code == 200 and isinstance(body, dict) and body.keys() >= set(keys):
                return body
            why = f"its answer, status {response.status_code}, is not ours"
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = type(error).__name__
        except ValueError:
            why = "its answer is not ours"
        raise NotThere(f"no supervisor answers at {self.url} ({why}); start one with `tightrank up`")


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one prompt, as its client saw it."""
    first_token_seconds: float
    seconds: float
    route: str                     # the workers that a gateway chose; "": no gateway told


async def complete(http: httpx2.AsyncClient, target: Target, prompt: Sequence[int], answer_tokens: int, key: str | None
                   ) -> Answer:
    """Streams a greedy completion. Raises Refused; httpx2.HTTPError when the connection is gone."""
    body = {"model": target.served_model, "prompt": list(prompt), "max_tokens": answer_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True}
    began, first = time.monotonic(), None
    timeout = httpx2.Timeout(REQUEST_SECONDS, read=None, write=None)      # a prefill is silent for as long as it takes
    async with http.stream("POST", f"{target.url}/v1/completions", json=body, headers=authorization(key),
                           timeout=timeout) as response:
        if response.status_code != 200:
            raise Refused(refusal(response.status_code, await response.aread()), _ours(response.status_code))
        async for event in _events(response):
            if first is None and event.get("choices"):
                first = time.monotonic() - began
    if first is None:
        raise Refused("the answer ended without a token")
    return Answer(first, time.monotonic() - began, response.headers.get("x-tightrank-worker", ""))


async def _events(response: httpx2.Response) -> AsyncIterator[Json]:
    """Of a stream that ends as it should. Raises Refused."""
    async for line in _lines(response):
        if line.startswith(b"data:"):
            if line[5:].strip() == b"[DONE]":
                return
            yield _event(line[5:].decode(errors="replace"))
    raise Refused("the answer broke off before its end")


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Ended by a line feed alone. `aiter_lines` takes U+2028, U+0085 and others of a model's own text for line ends too."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _ours(status: int) -> bool:
    """429 is the gateway's: memory is short."""
    return status < 500 and status != 429


def _event(text: str) -> Json:
    """One event of a stream. Raises Refused for an error or for what is none."""
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict) or "error" in event:
        raise Refused(f"the answer broke off: {text.strip()[:SHOWN_CHARACTERS]}")
    return event


def authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def refusal(status: int, body: bytes) -> str:
    """Status and message of an answer that is an error; both engines and ours have OpenAI's shape, mostly."""
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed)
        text = str(error.get("message") or text) if isinstance(error, Mapping) else str(error)
    except (ValueError, AttributeError):
        pass
    return f"it answered {status}: {' '.join(text.split())[:SHOWN_CHARACTERS]}"


async def longest_request(http: httpx2.AsyncClient, url: str, key: str | None) -> int | None:
    """The engine's own limit of prompt and answer (tokens), from its list of models; None: it does not say. Raises NotThere."""
    try:
        response = await http.get(f"{url}/v1/models", headers=authorization(key), timeout=REQUEST_SECONDS)
        found: Any = response.json()["data"][0]["max_model_len"]
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise NotThere(f"nobody answers at {url} ({type(error).__name__})") from None
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return found if type(found) is int else None
