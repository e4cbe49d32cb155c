"""A client's request, read within its limits and understood as far as routing needs it. Raises Refusal."""
from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope

from tightrank.gateway.protocol import RESERVED
from tightrank.gateway.refusal import Refusal

BODY_SECONDS = 10.0            # of silence while a body comes
BYTES_PER_TOKEN = 4            # of English prose; only for loads and predictions
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate")
METHODS: Mapping[str, str] = {**dict.fromkeys((*GENERATING, "/v1/embeddings", "/tokenize", "/detokenize"), "POST"),
                              "/v1/models": "GET"}
_OURS = re.compile(r"(?i)connection|keep-alive|proxy-.*|te|trailer|transfer-encoding|upgrade|host|content-length|expect|"
                   r"accept-encoding|x-request-id|x-tightrank-.*")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NEW_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. Tokens: `prompt_tokens` is an estimate, `prompt_limit` no less than there can be (exact where the client
    sent token IDs: `counted`), `new_tokens` the most that are wanted (0 for a stream: until its first; None: not said)."""
    method: str
    path: str
    target: str                            # path and query
    headers: Mapping[str, str]             # to the engine
    request_id: str
    body: bytes
    parsed: Mapping[str, Any] | None = None
    stream: bool = False
    model: str | None = None
    prompt_tokens: int = 0
    prompt_limit: int = 0
    counted: bool = False
    new_tokens: int | None = 0
    since: float = field(default_factory=time.monotonic)

    @property
    def generates(self) -> bool:
        return self.path in GENERATING


async def read(scope: Scope, receive: Receive, limit_bytes: int) -> Asked:
    """The request of one ASGI scope. Raises Refusal: 404, 405, 400, 408, 413."""
    path = scope["path"]
    wanted = METHODS.get(path)
    if wanted is None:
        raise Refusal(404, "path_not_found", f"{scope['method']} {path[:200]}: not served here; there are {', '.join(METHODS)}")
    if scope["method"] != wanted:
        raise Refusal(405, "method_not_allowed", f"{scope['method']} {path}: use {wanted}")
    request_id = _request_id(scope)
    body = await _body(scope, receive, limit_bytes)
    query = scope["query_string"].decode("ascii", "replace")
    plain = Asked(scope["method"], path, f"{path}?{query}" if query else path, _headers(scope, request_id), request_id, body)
    return understood(plain) if wanted == "POST" else plain


def understood(asked: Asked) -> Asked:
    """`asked` with what its JSON says. Raises Refusal."""
    parsed = _object(asked.body)
    stream, model = parsed.get("stream"), parsed.get("model")
    if stream not in (None, True, False):
        raise Refusal(400, "invalid_type", f"stream={_shown(stream)}: must be true or false", param="stream")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "invalid_type", f"model={_shown(model)}: must be a string", param="model")
    if asked.path == "/v1/responses" and parsed.get("background"):
        raise Refusal(400, "not_supported", "background=true: an answer cannot be fetched later here; leave it out",
                      param="background")
    for name in RESERVED:
        if name in parsed:
            raise Refusal(400, "reserved_parameter", f"{name}: is set by the gateway alone; leave it out", param=name)
    count = _token_ids(parsed)
    return Asked(asked.method, asked.path, asked.target, asked.headers, asked.request_id, asked.body, parsed, bool(stream),
                 model, count if count is not None else len(asked.body) // BYTES_PER_TOKEN + 1,
                 count if count is not None else len(asked.body), count is not None, 0 if stream else _new_tokens(parsed),
                 asked.since)


async def _body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_long(limit_bytes)
    parts, size = [], 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), BODY_SECONDS)
        except TimeoutError:
            raise Refusal(408, "body_timeout", f"nothing of the body came for {BODY_SECONDS:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise _too_long(limit_bytes)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_long(limit_bytes: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body is over {limit_bytes} bytes (gateway.body_limit)")


def _object(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body.decode())
    except RecursionError:
        raise Refusal(400, "invalid_json", "the body is nested without end", param="body") from None
    except ValueError as error:                # not UTF-8, not JSON, a number of thousands of digits
        raise Refusal(400, "invalid_json", f"the body is not JSON: {str(error)[:200]}", param="body") from None
    if not isinstance(parsed, dict):
        raise Refusal(400, "invalid_json", "the body must be a JSON object", param="body")
    return parsed


def _headers(scope: Scope, request_id: str) -> dict[str, str]:
    given = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    # What Connection names is for this hop only (RFC 9110, 7.6.1).
    hop = {part.strip().lower() for name, value in given if name == "connection" for part in value.split(",")}
    kept = {name: value for name, value in given if not _OURS.fullmatch(name) and name not in hop}
    return {**kept, "X-Request-Id": request_id}


def _request_id(scope: Scope) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _token_ids(parsed: Mapping[str, Any]) -> int | None:
    """How many token IDs the client sent in place of text (of the longest prompt); None: it sent text."""
    prompt = parsed.get("input_ids", parsed.get("prompt"))
    if not isinstance(prompt, list) or not prompt:
        return None
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    if not all(isinstance(each, list) and (not each or type(each[0]) is int) for each in prompts):
        return None
    return max(map(len, prompts))


def _new_tokens(parsed: Mapping[str, Any]) -> int | None:
    sampling = parsed.get("sampling_params")
    given = [parsed.get(name) for name in _NEW_TOKENS]
    given += [sampling.get("max_new_tokens")] if isinstance(sampling, dict) else []
    return next((each for each in given if type(each) is int and each > 0), None)


def _shown(value: Any) -> str:
    return repr(value)[:60] if not isinstance(value, int) or -10**30 < value < 10**30 else "a number of over 30 digits"
