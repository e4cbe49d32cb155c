"""HTTP/1.1 for the fake P/D engine: a server that knows at once when its client is gone, and a small client.

Raw asyncio, because the faults need the bytes. A client that closes or half-closes is gone, as under uvicorn.
"""
import asyncio
import json
import socket
import struct
from http import HTTPStatus


class Request:
    """One request: `headers` by lower-case name, `body` as it came, `connection` a number (keep-alive shows in it)."""

    def __init__(self, head, body, connection):
        line, *rest = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = line.split(" ", 2)
        self.path = self.target.partition("?")[0]
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        self.body, self.connection = body, connection

    def json(self):
        """The body's object. Raises ValueError when it is none."""
        body = json.loads(self.body or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body


class Connection(asyncio.Protocol):
    """One client's connection. `serve(request, connection)` answers each request; it is cancelled when the client goes."""
    count = 0

    def __init__(self, serve, open_ones):
        self.serve, self.open_ones = serve, open_ones
        self.buffer, self.wake, self.writable = bytearray(), asyncio.Event(), asyncio.Event()
        self.writable.set()
        self.busy = self.gone = False
        Connection.count += 1
        self.number = Connection.count

    def connection_made(self, transport):
        self.transport = transport
        self.open_ones.add(self)
        self.task = asyncio.get_running_loop().create_task(self._run())

    def data_received(self, data):
        self.buffer += data
        self.wake.set()

    def connection_lost(self, error):
        self.gone = True
        self.open_ones.discard(self)
        self.writable.set()
        self.task.cancel()

    def pause_writing(self):
        self.writable.clear()

    def resume_writing(self):
        self.writable.set()

    async def _run(self):
        try:
            again = True
            while again:
                request = await self._read()
                self.busy = True
                await self.serve(request, self)
                self.busy = False
                again = request.headers.get("connection", "").lower() != "close"
        finally:
            self.transport.close()

    async def _read(self):
        while (end := self.buffer.find(b"\r\n\r\n")) < 0:
            await self._more()
        request = Request(bytes(self.buffer[:end]), b"", self.number)
        del self.buffer[:end + 4]
        request.body = await self._body(request.headers)
        return request

    async def _body(self, headers):
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int((await self._take_line()).partition(b";")[0], 16):
                body += await self._take(size)
                await self._take(2)
            await self._take(2)
            return body
        return await self._take(int(headers.get("content-length", 0)))

    async def _take_line(self):
        while (end := self.buffer.find(b"\r\n")) < 0:
            await self._more()
        return (await self._take(end + 2))[:-2]

    async def _take(self, size):
        while len(self.buffer) < size:
            await self._more()
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def _more(self):
        self.wake.clear()
        await self.wake.wait()

    async def write(self, data):
        self.transport.write(data)
        await self.writable.wait()

    def reset(self):
        """RST: with SO_LINGER 0 the close drops what is unsent."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def head(status, headers):
    """The head of an answer; `headers` as pairs."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Odd"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


async def call(host, port, path, body, timeout):
    """POSTs JSON: (status, answer). Raises OSError or EOFError (asyncio's IncompleteReadError) when the peer is gone, and
    TimeoutError after `timeout` seconds of silence."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
    try:
        data = json.dumps(body).encode()
        writer.write(head_of_call(host, path, len(data)) + data)
        async with asyncio.timeout(timeout):
            top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(top.partition("content-length:")[2].split("\r\n")[0])
            return int(top.split()[1]), json.loads(await reader.readexactly(length))
    finally:
        writer.close()


def head_of_call(host, path, length):
    return (f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
            "Connection: close\r\n\r\n").encode()
