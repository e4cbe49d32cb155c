"""Server-sent events as bytes: splitting a stream into whole events, and what an event says about its request."""
from __future__ import annotations

import json
import re
from typing import Any

EVENT_BYTES = 16 << 20             # logprobs of a whole prompt may come as one event
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":", b"data", b"event")
DONE = b"data: [DONE]"
_BLANK = re.compile(rb"\n\n|\r\n\r\n")
_ANNOUNCEMENTS = ("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
_LAST_OF_RESPONSES = (b"response.completed", b"response.incomplete", b"response.failed")


class NotEvents(ValueError):
    """What came is no event stream; the text says what came."""


class Splitter:
    """Cuts what arrives into whole events, each with its blank line, byte for byte."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0                 # no event ends before

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now. Raises NotEvents."""
        self._rest += data
        events, start = [], 0
        while found := _BLANK.search(self._rest, max(start, self._searched)):
            events.append(bytes(self._rest[start:found.end()]))
            _check(events[-1])
            start = self._searched = found.end()
        del self._rest[:start]
        self._searched = max(len(self._rest) - 3, 0)       # a blank line may be half here
        if len(self._rest) > EVENT_BYTES:
            raise NotEvents(f"an event of more than {EVENT_BYTES} bytes")
        return events

    @property
    def rest(self) -> bytes:
        """What came of an event that is not whole."""
        return bytes(self._rest)


def _check(event: bytes) -> None:
    for line in event.splitlines():
        if line and not line.startswith(_FIELDS):
            raise NotEvents(f"a line that is no field of an event: {line[:80]!r}")


def comment(event: bytes) -> bool:
    """Whether it is a comment (or nothing): all of its lines begin with a colon."""
    return all(line.startswith(b":") for line in event.splitlines() if line)


def last(event: bytes) -> bool:
    """Whether a stream ends well after this event."""
    return event.startswith(DONE) or (event.startswith(b"event:") and any(name in event for name in _LAST_OF_RESPONSES))


def payload(event: bytes) -> Any:
    """The JSON of its data; None when it has none."""
    data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    try:
        return json.loads(data)
    except ValueError:
        return None


def check_payload(event: bytes) -> None:
    """Raises NotEvents when the data of an event is neither JSON nor [DONE]."""
    if b"data:" in event and not event.startswith((DONE, b":")) and payload(event) is None:
        raise NotEvents(f"data that is not JSON: {event[:80]!r}")


def says(event: bytes) -> bool:
    """Whether an event holds more than the announcement of an answer (a role, an empty text, `response.created`)."""
    data = payload(event)
    if not isinstance(data, dict):
        return event.startswith(b"data:")          # [DONE]; a comment says nothing
    if isinstance(data.get("type"), str) and data["type"].startswith("response."):
        return data["type"] not in _ANNOUNCEMENTS
    choices = data.get("choices")
    parts = choices if isinstance(choices, list) and choices else [data]
    return any(_part_says(part) for part in parts)


def _part_says(part: Any) -> bool:
    if not isinstance(part, dict):
        return True
    meta, delta = part.get("meta_info"), part.get("delta")
    if part.get("finish_reason") or (isinstance(meta, dict) and meta.get("finish_reason")):
        return True
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return "text" not in part or bool(part["text"] or part.get("output_ids"))


def gave_up(answer: Any) -> str:
    """Why an engine gave a request up, from the JSON of its answer or of one event; "" when it did not.

    vLLM ends a request whose KV transfer failed with finish_reason "error", SGLang with "abort": both under status 200.
    """
    if not isinstance(answer, dict):
        return ""
    if answer.get("object") == "error":            # SGLang's bodies have no wrapper
        return f"error: {str(answer.get('message'))[:300]}"
    if isinstance(answer.get("error"), dict | str) and answer["error"]:
        return f"error: {str(_message(answer['error']))[:300]}"
    if isinstance(answer.get("response"), dict):           # an event of /v1/responses
        return gave_up(answer["response"]) or ("failed" if answer["response"].get("status") == "failed" else "")
    meta = answer.get("meta_info")
    reasons = [choice.get("finish_reason") for choice in answer.get("choices") or () if isinstance(choice, dict)]
    reasons += [meta.get("finish_reason")] if isinstance(meta, dict) else []
    for reason in reasons:
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind in ("abort", "error"):
            return f"{kind}: {reason.get('message', '')[:300]}" if isinstance(reason, dict) else str(kind)
    return ""


def clients_fault(answer: Any) -> bool:
    """Whether an error inside a stream is one that no other engine would answer otherwise (4xx)."""
    error = answer.get("error") if isinstance(answer, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return type(code) is int and 400 <= code < 500 and code != 429


def _message(error: Any) -> Any:
    return error.get("message", error) if isinstance(error, dict) else error
