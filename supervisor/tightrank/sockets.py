"""Listening sockets, bound before anything is started."""
from __future__ import annotations

import socket


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
