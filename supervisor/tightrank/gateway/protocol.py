"""What the engines' P/D protocols add to a request, and requests of our own. Pure.

Bodies stay as the client wrote them: what is added goes to the end of the JSON object, where the last of two equal names
wins in both engines' parsers.
"""
from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping
from typing import Any

from tightrank.gateway.records import Peer

# A client that could set these could make an engine connect to any address, or take another request's KV.
RESERVED = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "kv_transfer_params")
FAKE_BOOTSTRAP_HOST = "2.2.2.2"    # SGLang, disaggregation/utils.py: a role answers such a request without its peer
CANARY_TOKENS = 80                 # over one block of 16 or 64: something has to be transferred
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
                 "remote_host": None, "remote_port": None}
_ONE_TOKEN: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1, "max_completion_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
}


def spliced(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """`body`, a JSON object, with `fields` at its end."""
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return body[:end] + comma + json.dumps(fields)[1:-1].encode() + body[end:]


def sglang_fields(prefill: Peer, path: str, rid: str) -> dict[str, Any]:
    """For both legs of one try: a fresh room, and a request ID of ours by which it can be aborted."""
    return {"bootstrap_host": prefill.transfer_host, "bootstrap_port": prefill.transfer_port,
            "bootstrap_room": secrets.randbelow(2**63), **sglang_name(path, rid)}


def sglang_name(path: str, rid: str) -> dict[str, str]:
    return {"request_id" if path == "/v1/responses" else "rid": rid}


def sglang_rid() -> str:
    """New for each try: an ID that was used is aborted once more some seconds after its stream (0.5.23). Aborting takes all
    IDs that begin with it, those of a list of prompts (RID_0, RID_1) too."""
    return f"tightrank-{secrets.token_hex(16)}"


def vllm_prefill(path: str, body: bytes, parsed: Mapping[str, Any]) -> bytes:
    """The prefill leg's body: one token, not streamed, its KV kept for a decode worker."""
    fields = {**_ONE_TOKEN[path], "stream": False, "kv_transfer_params": REMOTE_DECODE}
    # With n samples here the blocks of all but one would be kept until their lease ends.
    fields |= {name: value for name, value in (("stream_options", None), ("min_tokens", 0), ("n", 1)) if name in parsed}
    return spliced(body, fields)


def unpairable(engine: str, path: str, parsed: Mapping[str, Any]) -> str:
    """Why a pair of `engine` cannot serve this request ("" when it can)."""
    if engine == "sglang":
        return _unpairable_sglang(parsed)
    if path not in _ONE_TOKEN:
        return f"vLLM's P/D has no {path}"
    prompt = parsed.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "vLLM hands over the KV of one prompt only"     # 0.32.0 gives a second prompt the first one's, or dies of it
    if parsed.get("use_beam_search"):
        return "vLLM hands over no KV of a beam search"
    if parsed.get("prompt_logprobs") is not None or parsed.get("echo"):
        return "a decode worker has not seen the prompt"
    return ""


def _unpairable_sglang(parsed: Mapping[str, Any]) -> str:
    sampling = parsed.get("sampling_params")
    wanted = [parsed.get("n"), parsed.get("best_of"), sampling.get("n") if isinstance(sampling, dict) else None]
    # All samples share one room, and the decode side waits for its whole patience (0.5.23, run).
    return "SGLang's P/D gives one answer for each prompt" if any(_more_than(1, each) for each in wanted) else ""


def _more_than(limit: int, value: Any) -> bool:
    return type(value) is int and value > limit


def named(peer: Peer) -> dict[str, str]:
    """The field that names its model; nothing where nobody told the name."""
    return {"model": peer.model} if peer.model else {}


def probe(peer: Peer) -> tuple[str, dict[str, Any]]:
    """Path and body of a one-token request that this role answers alone."""
    if peer.engine == "atom":          # its prompt is text
        return "/v1/completions", {**named(peer), "prompt": "Is anybody there?", "max_tokens": 1, "temperature": 0}
    if peer.engine == "vllm":
        # 64 tokens: 4 as the first request ever end a bf16 worker of 0.32.0 on a CPU with AMX (SIGILL).
        return "/v1/completions", {**named(peer), "prompt": list(range(1, 65)), "max_tokens": 1, "temperature": 0}
    body: dict[str, Any] = {"input_ids": [1, 2, 3, 4],
                            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
    if peer.role != "both":
        body |= {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
    return "/generate", body


def canary(peer: Peer) -> tuple[str, dict[str, Any]]:
    """Path and body of a small request for a pair. Its prompt is new each time: a cached one would transfer nothing."""
    tokens = [random.randrange(5, 250) for _ in range(CANARY_TOKENS)]  # noqa: S311
    if peer.engine == "vllm":
        return "/v1/completions", {**named(peer), "prompt": tokens, "max_tokens": 2, "temperature": 0,
                                   "ignore_eos": True}
    return "/generate", {"input_ids": tokens,
                         "sampling_params": {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}}
