"""Whether a request can ever fit, before a byte of it goes to an engine.

The limit is the tightest rank's line and the engine's own length, as the supervisor tells them. A prompt has no more tokens
than bytes (a byte-level tokenizer never makes more), so most requests are admitted without asking; only one whose bytes are
too many is counted, by an engine's own /tokenize.
"""
from __future__ import annotations

import json
from collections.abc import Iterable

import aiohttp

from tightrank.gateway.intake import Asked
from tightrank.gateway.leg import Call, Leg, answered
from tightrank.gateway.peers import Member
from tightrank.gateway.pick import any_role, serves
from tightrank.gateway.protocol import named
from tightrank.gateway.records import LegFailed
from tightrank.gateway.refusal import Refusal
from tightrank.records import Shed

_RENDERED = ("messages", "prompt", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
             "add_special_tokens")


def largest_prompt_tokens(members: Iterable[Member], model: str | None) -> int | None:
    """The longest prompt that any peer of `model` takes; None: one of them has no limit that is known."""
    limits = [member.peer.longest_prompt_tokens for member in members
              if serves(member, model) and member.peer.role != "decode"]
    return None if not limits or None in limits else max(limit for limit in limits if limit is not None)


async def refuse_too_long(asked: Asked, members: list[Member], http: aiohttp.ClientSession) -> None:
    """Raises Refusal (400) for a prompt that can never fit. One that cannot be counted is left to the engine."""
    largest = largest_prompt_tokens(members, asked.model)
    if not asked.generates or largest is None or asked.prompt_limit <= largest:
        return
    count = asked.prompt_limit if asked.counted else await _count(asked, members, http)
    if count is None or count <= largest:
        return
    how = "the token IDs that were sent" if asked.counted else "as the engine's tokenizer counts"
    raise Refusal(400, "context_length_exceeded",
                  f"the longest prompt that fits is {largest} tokens, this one has {count} ({how})",
                  param="messages" if asked.path == "/v1/chat/completions" else "prompt",
                  more={"largest_prompt_tokens": largest, "prompt_tokens": count})


async def shedding(asked: Asked, members: list[Member], http: aiohttp.ClientSession) -> dict[str, Shed]:
    """By ID the peers that do not take this prompt now: memory is short there and it is long. Counted where bytes do not
    tell; a prompt that no engine can count goes by its estimate."""
    sheds = {member.peer.id: member.peer.shed for member in members if member.peer.shed is not None}
    least = min((shed.new_tokens for shed in sheds.values()), default=None)
    if least is None or not asked.generates or asked.prompt_limit <= least:
        return {}
    count = asked.prompt_limit if asked.counted else await _count(asked, members, http)
    tokens = asked.prompt_tokens if count is None else count
    return {peer: shed for peer, shed in sheds.items() if tokens > shed.new_tokens}


async def _count(asked: Asked, members: list[Member], http: aiohttp.ClientSession) -> int | None:
    """Tokens of the prompt; None when no engine can tell."""
    assert asked.parsed is not None
    route = any_role(members, asked.model, ())
    question = {name: asked.parsed[name] for name in _RENDERED if name in asked.parsed}
    if "text" in asked.parsed:
        question["prompt"] = asked.parsed["text"]
    if route is None or not {"messages", "prompt"} & set(question):
        return None
    body = json.dumps({**named(route.worker), **question}).encode()
    member = next(member for member in members if member.peer.id == route.worker.id)
    leg = Leg(http, member, Call("POST", "/tokenize", asked.headers, body))
    try:
        answer = json.loads((await answered(leg)).body)
    except (LegFailed, ValueError):
        return None
    finally:
        leg.close()
    count = answer.get("count") if isinstance(answer, dict) else None
    counts = count if isinstance(count, list) else [count]
    return max(counts) if counts and all(type(each) is int for each in counts) else None
