"""What supervisors tell: one stream of events each, which nudges us to read /status, and pulses on request.

A stream that is silent for longer than its heartbeat allows is lost: its workers are suspect, and probes say what they are.
"""
from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tightrank.gateway.peers import Peers
from tightrank.gateway.records import Peer, Pulse
from tightrank.records import Shed

BEAT_SECONDS = 0.5             # asked of the stream
LOST_SECONDS = 2.0             # without a beat or an event
AGAIN_SECONDS = 0.5
REQUEST_SECONDS = 2.0
PULSE_SECONDS = 0.5
STALE_SECONDS = 15.0           # a supervisor whose loop has not turned for so long is not believed; a calm one turns every 5 s
_NEWS = ("phase", "cause", "daemon", "decision")
_LOOPS = ("scheduler", "engine-core")      # roles whose beat is the engine's own loop
_WILDCARDS = ("0.0.0.0", "::", "")
_BAD = (aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError, KeyError, AttributeError)


class Supervisors:
    """All supervisors of this gateway."""

    def __init__(self, http: aiohttp.ClientSession, peers: Peers, urls: Sequence[str]) -> None:
        self._http, self._peers, self._urls = http, peers, urls
        self.states: dict[str, str] = dict.fromkeys(urls, "not reached yet")      # "" when all is well

    async def run(self) -> None:
        """For ever, with none to follow too."""
        await asyncio.gather(asyncio.Event().wait(), *(self._follow(url) for url in self._urls))

    async def pulse(self, peer: Peer) -> Pulse | None:
        """None when its supervisor cannot tell now."""
        try:
            async with asyncio.timeout(PULSE_SECONDS):
                return _pulse(await self._get(f"{peer.supervisor}/workers/{peer.name}/pulse"))
        except _BAD:
            return None

    # --- one supervisor -----------------------------------------------------------------------------------------------

    async def _follow(self, url: str) -> None:
        while True:
            try:
                await self._listen(url)
                why = "its stream ended"
            except _BAD as error:
                why = f"{type(error).__name__}: {str(error)[:200]}"
            if not self.states[url]:
                self._peers.unheard(url, f"its supervisor {url} is not heard: {why}")
            self.states[url] = why
            await asyncio.sleep(AGAIN_SECONDS)

    async def _listen(self, url: str) -> None:
        stale = asyncio.Event()
        stale.set()
        reading = asyncio.ensure_future(self._refresh(url, stale))
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=LOST_SECONDS)
            async with self._http.get(f"{url}/events", params={"beat": str(BEAT_SECONDS)}, timeout=timeout,
                                      headers={"Accept": "text/event-stream"}, allow_redirects=False) as response:
                if response.status != 200:
                    raise ValueError(f"/events answered {response.status}")
                async for line in response.content:
                    if reading.done():
                        break
                    if line.startswith(b"data:") and (event := json.loads(line[5:]))["kind"] in _NEWS:
                        self._hear(url, event)
                        stale.set()
            if reading.done():
                reading.result()
        finally:
            reading.cancel()

    def _hear(self, url: str, event: Mapping[str, Any]) -> None:
        """The end of a generation, without waiting for the status: every request of it is told now."""
        if event["kind"] == "phase" and event["data"].get("to") == "stopping" and not event["data"].get("drains"):
            self._peers.ended(self._id(event["worker"], url), event["generation"], event["sentence"])

    def _id(self, worker: str, url: str) -> str:
        return f"{worker}@{urlsplit(url).netloc}" if len(self._urls) > 1 else worker

    async def _refresh(self, url: str, stale: asyncio.Event) -> None:
        """Reads /status each time that it is stale."""
        while True:
            await stale.wait()
            stale.clear()
            async with asyncio.timeout(REQUEST_SECONDS):
                status = await self._get(f"{url}/status")
            if status["updated_age_seconds"] > STALE_SECONDS:
                raise ValueError(f"its loop has not turned for {status['updated_age_seconds']:.0f} s")
            self._peers.told(url, [_peer(worker, self._id(worker["name"], url), url) for worker in status["workers"]])
            self.states[url] = ""

    async def _get(self, url: str) -> Any:
        async with self._http.get(url, allow_redirects=False) as response:
            body = await response.read()
            if response.status != 200:
                raise ValueError(f"{urlsplit(url).path} answered {response.status} {body[:200].decode(errors='replace')}")
            return json.loads(body)


def _peer(worker: Mapping[str, Any], peer_id: str, supervisor: str) -> Peer:
    """One worker of /status. Raises KeyError, TypeError or ValueError for what is none."""
    here = urlsplit(supervisor)
    host = str(worker["address"] or (here.hostname if worker["host"] in _WILDCARDS else worker["host"]))
    diagnosis, line, shed = worker["diagnosis"] or {}, worker["line"] or {}, worker.get("shed")
    next_start = worker["next_start_unix"]
    reason = worker["reason"]
    return Peer(
        id=peer_id, name=worker["name"], engine=worker["engine"],
        role=worker["role"], url=f"http://[{host}]:{worker['port']}" if ":" in host else f"http://{host}:{worker['port']}",
        model=worker["served_model"], transfer_host=host, transfer_port=int(worker["transfer_port"] or 0),
        supervisor=supervisor, generation=int(worker["generation"]), phase=worker["phase"],
        reason=reason or worker["phase"], cause=diagnosis.get("cause"), change=diagnosis.get("change") or "",
        runbook=diagnosis.get("runbook") or "",
        retry_after_seconds=max(1, math.ceil(next_start - time.time())) if next_start else None,
        longest_prompt_tokens=worker["longest_prompt_tokens"], chunk_tokens=line.get("maximum"),
        drains=worker["drains"],
        shed=Shed(int(shed["new_tokens"]), int(shed["retry_after_seconds"]), str(shed["why"])) if shed else None,
        aborts=int(worker.get("aborts", 0)), abort_why=str(worker.get("abort_why", "")))


def _pulse(body: Mapping[str, Any]) -> Pulse:
    ages = [rank["beat_age_seconds"] for rank in body["ranks"] if rank["role"] in _LOOPS and rank["loops"]]
    known = [age for age in ages if age is not None]
    return Pulse(int(body["generation"]), bool(body["stopped"]), max(known, default=None), body["longest_step_seconds"],
                 body.get("cpu_seconds"))
