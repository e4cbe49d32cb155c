"""How an answer goes out: `Reply` is the healthy way, each subclass one fault of an engine's HTTP.

POST /fault {"kind": NAME, ...} on the control port; every fault takes "paths" (a list of prefixes; default: what
generates, GENERATES) and "count" (so many requests, then healthy; default: until /reset).
    mute            accepts and never answers ("paths": ["/"] is a server that answers nothing at all)
    status          answers "status" (500) with "retry_after" if given, in the engine's error shape or "body"
    drop            closes without an answer
    garbage         is not HTTP        no-colon    a header line without a colon
    long-line       a header line of "bytes" (1 MiB)         many-headers    "headers" lines (5000)
    flood-1xx       "times" (1000) informational answers, then mute (or "then": "answer")
    redirect        307 to "location"
    bad-json        200, JSON cut in half; streamed: one event's JSON is cut in half
    bad-sse         streamed: a line that is no SSE in place of token "after" (0); else text/plain
    long-event      streamed: one event of "bytes" (64 MiB) without an end
    cut             "how": "rst" | "fin" after "after" tokens (not streamed: in the middle of the body)
    slow            one token each "seconds" (1)
    stall           nothing after "after" tokens; "comments": true sends SSE comments for ever
    headers-only    the head, then nothing
    truncated       Content-Length of the whole, half of the body, FIN
    wrong-length    Content-Length is no number
    twice           the whole answer two times
    wrong-type      the right body as text/html
    no-done         streamed: ends without [DONE]
    no-params       vLLM prefill: no kv_transfer_params      odd-params    they are a list
Not of one answer, and so done elsewhere: slow-prefill ("tokens_per_second", "seconds"), abort (after "after" tokens it ends
the request as if it had been told to: 200, finish_reason abort), transfer-fails, refuse ("seconds"), block.
"""
import asyncio
import json

from peer_http import chunk, head

GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/generate")


class Answered(Exception):
    """A fault has answered (or closed) in place of the engine."""


class Reply:
    """The healthy way. `status` is what the client was told, None before that."""

    def __init__(self, connection, fault):
        self.connection, self.fault, self.status, self.events = connection, fault, None, 0

    async def before(self):
        """Called with the request read and nothing done yet."""

    async def whole(self, status, body, headers=()):
        self.status = status
        await self.connection.write(self.head(status, body, headers) + body)

    def head(self, status, body, headers=(), kind="application/json"):
        return head(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *headers])

    async def json(self, status, answer, headers=()):
        await self.whole(status, json.dumps(answer).encode(), headers)

    async def begin(self):
        if self.status is None:
            self.status = 200
            await self.connection.write(head(200, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")]))

    async def event(self, data, token=False):
        """One SSE event; `token`: it carries one."""
        await self.begin()
        await self.connection.write(chunk(data))
        self.events += token

    async def end(self):
        await self.connection.write(chunk(b""))

    async def hold(self):
        """Nothing more until /reset, which closes."""
        await self.fault["over"].wait()
        self.connection.transport.close()
        raise Answered

    def at_token(self, token):
        return token and self.events == self.fault.get("after", 0)


class Mute(Reply):
    async def before(self):
        await self.hold()


class Status(Reply):
    async def before(self):
        status = self.fault.get("status", 500)
        error = {"message": f"the fake engine says {status}", "type": "FakeError", "param": None, "code": status}
        seconds = self.fault.get("retry_after")
        await self.json(status, self.fault.get("body", {"error": error}),
                        [("Retry-After", str(seconds))] if seconds is not None else [])
        raise Answered


class Drop(Reply):
    async def before(self):
        self.connection.transport.close()
        raise Answered


class Raw(Reply):
    """Sends bytes that are no good answer, and closes."""

    def bytes(self):
        kind, fault = self.fault["kind"], self.fault
        if kind == "garbage":
            return b"\x16\x03\x01\x00\xa5 this is not HTTP \xff\xfe\r\n\r\n" * 20
        if kind == "no-colon":
            return b"HTTP/1.1 200 OK\r\nContent-Length 2\r\n\r\n{}"
        if kind == "long-line":
            return b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * fault.get("bytes", 1 << 20) + b"\r\nContent-Length: 2\r\n\r\n{}"
        return head(200, [(f"X-{i}", "a") for i in range(fault.get("headers", 5000))]) + b"{}"

    async def before(self):
        self.status = 200
        await self.connection.write(self.bytes())
        self.connection.transport.close()
        raise Answered


class Flood(Reply):
    async def before(self):
        for _ in range(self.fault.get("times", 1000)):
            await self.connection.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        if self.fault.get("then") != "answer":
            await self.hold()


class Redirect(Reply):
    async def before(self):
        await self.whole(307, b"", [("Location", self.fault.get("location", "http://127.0.0.1:9/elsewhere"))])
        raise Answered


class BadJson(Reply):
    async def whole(self, status, body, headers=()):
        await super().whole(status, body[:len(body) // 2], headers)

    async def event(self, data, token=False):
        await super().event(data[:len(data) // 2].rstrip(b"\n") + b"\n\n" if self.at_token(token) else data, token)


class BadSse(Reply):
    async def whole(self, status, body, headers=()):
        self.status = status
        await self.connection.write(self.head(status, b"nothing to see", headers, "text/plain") + b"nothing to see")

    async def event(self, data, token=False):
        await super().event(b"\x00\xff no field name, no JSON\n\n" if self.at_token(token) else data, token)


class LongEvent(Reply):
    async def event(self, data, token=False):
        if self.at_token(token):
            for _ in range(self.fault.get("bytes", 64 << 20) >> 16):
                await super().event(b"a" * (1 << 16))
            await self.hold()
        await super().event(data, token)


class Cut(Reply):
    async def whole(self, status, body, headers=()):
        self.status = status
        await self.connection.write(self.head(status, body, headers) + body[:len(body) // 2])
        self.close()

    async def event(self, data, token=False):
        if self.at_token(token):
            self.close()
        await super().event(data, token)

    def close(self):
        close = self.connection.reset if self.fault.get("how", "rst") == "rst" else self.connection.transport.close
        close()
        raise Answered


class Slow(Reply):
    async def event(self, data, token=False):
        if token:
            await asyncio.sleep(self.fault.get("seconds", 1))
        await super().event(data, token)


class Stall(Reply):
    async def whole(self, status, body, headers=()):
        await self.hold()

    async def event(self, data, token=False):
        while self.at_token(token) and self.fault.get("comments"):
            await asyncio.sleep(0.2)
            await super().event(b": keep-alive\n\n")
        if self.at_token(token):
            await self.hold()
        await super().event(data, token)


class HeadersOnly(Reply):
    async def whole(self, status, body, headers=()):
        self.status = status
        await self.connection.write(self.head(status, body, headers))
        await self.hold()

    async def event(self, data, token=False):
        await self.begin()
        await self.hold()


class Truncated(Cut):
    def close(self):
        self.connection.transport.close()
        raise Answered


class WrongLength(Reply):
    def head(self, status, body, headers=(), kind="application/json"):
        return head(status, [("Content-Type", kind), ("Content-Length", "many"), *headers])


class Twice(Reply):
    async def whole(self, status, body, headers=()):
        for _ in range(2):
            await super().whole(status, body, headers)

    async def end(self):
        await super().end()
        await self.connection.write(head(200, [("Content-Length", "2")]) + b"{}")


class WrongType(Reply):
    def head(self, status, body, headers=(), kind="application/json"):
        return super().head(status, body, headers, "text/html")

    async def begin(self):
        if self.status is None:
            self.status = 200
            await self.connection.write(head(200, [("Content-Type", "text/html"), ("Transfer-Encoding", "chunked")]))


class NoDone(Reply):
    async def event(self, data, token=False):
        if data != b"data: [DONE]\n\n":
            await super().event(data, token)


KINDS = {"mute": Mute, "status": Status, "drop": Drop, "garbage": Raw, "no-colon": Raw, "long-line": Raw,
         "many-headers": Raw, "flood-1xx": Flood, "redirect": Redirect, "bad-json": BadJson, "bad-sse": BadSse,
         "long-event": LongEvent, "cut": Cut, "slow": Slow, "stall": Stall, "abort": Reply, "headers-only": HeadersOnly,
         "truncated": Truncated, "wrong-length": WrongLength, "twice": Twice, "wrong-type": WrongType, "no-done": NoDone,
         "no-params": Reply, "odd-params": Reply, "slow-prefill": Reply, "transfer-fails": Reply, "refuse": Reply,
         "block": Reply}


class Faults:
    """The faults that are on, the newest first."""

    def __init__(self):
        self.on, self.over = [], asyncio.Event()

    def add(self, fault):
        """Raises ValueError for a kind that is not there."""
        if fault.get("kind") not in KINDS:
            raise ValueError(f"kind {fault.get('kind')!r}: one of {', '.join(KINDS)}")
        self.on.insert(0, {**fault, "over": self.over})

    def clear(self):
        """All off; what they hold is let go."""
        self.over.set()
        self.on, self.over = [], asyncio.Event()

    def take(self, path):
        """The fault for a request to `path`, counted; {} when it is to be served well."""
        for fault in self.on:
            wanted = fault.get("paths", GENERATES)
            if any(path.startswith(each) for each in wanted) and fault.get("count", 1) > 0:
                if "count" in fault:
                    fault["count"] -= 1
                return fault
        return {}

    def reply(self, path, connection):
        fault = self.take(path)
        return KINDS.get(fault.get("kind"), Reply)(connection, fault)
