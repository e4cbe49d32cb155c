"""Listening sockets, bound before anything is started, and uvicorn on them."""
from __future__ import annotations

import asyncio
import resource
import socket

import uvicorn

DESCRIPTORS = 1 << 16              # as many as we may have: HTTP clients must not take those that readings need


def raise_descriptors() -> None:
    """As many as DESCRIPTORS for this process, where the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for an HTTP server: who connects before it serves waits. Raises OSError (in use, not of this host)."""
    # The protocol by name: asyncio sets TCP_NODELAY only where it sees it; without, each answer waits 40 ms for an ACK.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


class QuietServer(uvicorn.Server):
    """uvicorn without its ten looks a second whether it should exit, which cost 0.6 % of a core. They also keep the Date
    header fresh, so that is off."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()
        self._running_loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._running_loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._end.wait()

    def ask_to_exit(self) -> None:
        """From any thread."""
        self.should_exit = True
        if self._running_loop is not None and not self._running_loop.is_closed():
            self._running_loop.call_soon_threadsafe(self._end.set)
