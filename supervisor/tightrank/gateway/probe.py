"""Asks a doubtful engine with one real token, until it has answered. What an engine says of its own health is not asked."""
from __future__ import annotations

import asyncio
import json
import time

import aiohttp

from tightrank.gateway import protocol, sse
from tightrank.gateway.leg import Call, Leg, answered
from tightrank.gateway.peers import Member, Peers
from tightrank.gateway.records import Failure, LegFailed, Standing

PAUSE_SECONDS = 0.3            # an engine that came back gets work within 1 s
ANSWER_SECONDS = 3.0           # for one token, beside what waits at it already; with each try that was too short, twice that
FACT_SECONDS = 4 * ANSWER_SECONDS
LONGEST_SECONDS = 60.0         # an engine that needs longer for a token serves nobody


class Prober:
    """At most one probe of a member at a time; each ends when the member is up, gone, or not to be asked."""

    def __init__(self, http: aiohttp.ClientSession, peers: Peers, key: str | None) -> None:
        self._http, self._peers = http, peers
        self._headers = own_headers(key)
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self, member: Member) -> None:
        """Begins to ask, when nobody does."""
        running = self._running.get(member.peer.id)
        if running is None or running.done():
            self._running[member.peer.id] = asyncio.ensure_future(self._ask(member))

    async def _ask(self, member: Member) -> None:
        patience, late = ANSWER_SECONDS, False
        while self._peers.members.get(member.peer.id) is member and member.peer.up:
            began = time.monotonic()
            failure = await self._once(member, patience)
            seconds = time.monotonic() - began
            if failure is None and seconds > ANSWER_SECONDS and not late:
                late = True                # it may have been frozen till now: what it takes from now on is what counts
                continue
            if failure is None:
                member.pace.first_byte(seconds, 1)
            silent = failure is not None and failure.kind is Failure.SILENT
            if not silent or patience >= FACT_SECONDS:         # slow is no fact yet: it stays suspect
                self._peers.probed(member, failure)
            if member.standing is Standing.UP:
                return
            if silent:
                patience = min(2 * patience, LONGEST_SECONDS)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _once(self, member: Member, patience: float) -> LegFailed | None:
        peer = member.peer
        path, body = protocol.probe(peer)
        leg = Leg(self._http, member, Call("POST", path, self._headers, json.dumps(body).encode()))
        patience += self._peers.pace(member).prefill_seconds(member.queued_tokens) or 0.0
        try:
            async with asyncio.timeout(patience):
                whole = await answered(leg)
            if whole.status != 200 or sse.gave_up(_json(whole.body)):
                return LegFailed(Failure.ERROR, peer, f"it answered {whole.status} to one token: {whole.body[:200]!r}")
        except TimeoutError:
            return LegFailed(Failure.SILENT, peer, f"no answer to one token within {patience:.0f} s")
        except LegFailed as failure:
            return None if failure.kind is Failure.BUSY else failure
        finally:
            leg.close()
        return None


def own_headers(key: str | None) -> dict[str, str]:
    """For requests of the gateway's own."""
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def _json(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return {"error": "not JSON"}
