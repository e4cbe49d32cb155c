"""One idle connection to each engine without a supervisor: the kernel closes it the moment the engine dies.

An engine may close an idle connection too, so the close itself proves nothing; that the next one is refused does.
"""
from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

from tightrank.gateway.leg import CONNECT_SECONDS
from tightrank.gateway.peers import Member, Peers
from tightrank.gateway.records import Failure, LegFailed, Standing

LOOK_SECONDS = 0.4             # at a port that refuses
PAUSE_SECONDS = 0.1            # before the next connection, whatever became of the last


class Tripwire:
    """Watches the peers that nobody else watches."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def run(self) -> None:
        """For ever. Which engines have no supervisor is known from the start."""
        members = [member for member in self._peers.members.values() if member.peer.supervisor is None]
        await asyncio.gather(asyncio.Event().wait(), *(self._watch(member) for member in members))

    async def _watch(self, member: Member) -> None:
        at = urlsplit(member.peer.url)
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(at.hostname, at.port)
            except (OSError, TimeoutError) as error:
                if member.standing is not Standing.OUT:
                    self._peers.failed(LegFailed(Failure.REFUSED, member.peer, f"no connection: {error}"))
                await asyncio.sleep(LOOK_SECONDS)
                continue
            with contextlib.suppress(OSError):
                await reader.read(1)           # an engine says nothing unasked: what comes is the end
            writer.close()
            await asyncio.sleep(PAUSE_SECONDS)
