"""Answers of the gateway itself when it does not serve a request: OpenAI's error shape, and they say that they are ours."""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


class Refusal(Exception):
    """An answer with an error status. `more` goes into the error object (cause, runbook, ...)."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, retry_after: int | None = None,
                 more: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after, self.more = status, code, param, retry_after, more or {}

    def error(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"message": str(self), "type": kind, "param": self.param, "code": self.code, **self.more}

    def body(self) -> bytes:
        return json.dumps({"error": self.error(), "source": "tightrank-gateway"}).encode()

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "X-Tightrank-Reason": self.code}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return headers

    def event(self, path: str) -> bytes:
        """The terminal event of a stream that has begun. No [DONE] follows: the answer is not complete."""
        if path == "/v1/responses":
            error = {"type": "error", "code": self.code, "message": str(self), "param": self.param}
            return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
        return b"data: " + json.dumps({"error": self.error()}).encode() + b"\n\n"
