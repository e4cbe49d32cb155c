"""Ends legs that wait on an engine which makes no progress. Being slow is no fault: what is asked for is a proof.

Under a supervisor the proof is the engine's pulse: a process that is stopped, or a loop that has not turned for far longer
than any step takes while its processor time stands still. Without one there is only what answers took before: past that a
request goes elsewhere, where there is an elsewhere, and the engine is probed.
"""
from __future__ import annotations

import asyncio
import functools
import time

from tightrank.gateway.leg import Leg
from tightrank.gateway.peers import Member, Peers
from tightrank.gateway.records import Failure, LegFailed, Pulse
from tightrank.gateway.supervisors import Supervisors

LOOK_SECONDS, IDLE_SECONDS = 0.2, 0.5      # between two looks, with legs and without
ASK_SECONDS = 0.7              # of silence before the pulse is looked at
STILL_SECONDS = 1.5            # a loop that stands for less may be any Python pause
WAITING_SECONDS = 2.5          # ... of SGLang's decode side, which may sleep for 1 s while its partner computes
STEPS = 3.0                    # a step may take this many times the longest so far
BUSY_STEPS = 20.0              # ... when its processes compute all the while (a compiler, an autotuner)
BUSY_SHARE = 0.2               # of a core
LAG_SECONDS = 0.3              # of our own loop, before it counts
AGAIN_SECONDS = 0.4            # between two pulses of one engine
FORGET_SECONDS = 3.0           # a pulse that is older says nothing about now
LATE_SECONDS = 1.5             # over the prediction, without a supervisor


def frozen(pulse: Pulse, before: Pulse | None, silence: float, step: float, since: float, least: float = STILL_SECONDS) -> str:
    """Why an engine makes no progress, "" when it may. `silence`: of our leg; `step`: what one of its steps may take;
    `since`: between the two pulses; `least`: no loop that stands for less is frozen; all seconds. Pure."""
    if pulse.stopped:
        return "a process of it is stopped"
    if pulse.beat_age_seconds is None:
        return ""
    still = min(pulse.beat_age_seconds, silence)
    used = None if before is None or pulse.cpu_seconds is None or before.cpu_seconds is None else \
        pulse.cpu_seconds - before.cpu_seconds
    busy = used is None or used > BUSY_SHARE * since
    limit = max(least, step * (BUSY_STEPS if busy else STEPS) + 0.5, 30.0 if busy else 0.0)
    return f"its loop has not turned for {still:.1f} s" if still > limit else ""


class Watchdog:
    """Looks at all legs; asks supervisors about those that are silent."""

    def __init__(self, peers: Peers, supervisors: Supervisors, silence_seconds: float) -> None:
        self._peers, self._supervisors, self._silence = peers, supervisors, silence_seconds
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        while True:
            busy = any(member.legs for member in self._peers.members.values())
            pause, began = LOOK_SECONDS if busy else IDLE_SECONDS, time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if now - began > pause + LAG_SECONDS:
                self._forgive(now - began - pause)
            for member in list(self._peers.members.values()):
                fresh = member.pulse is not None and now - member.pulse[1] < AGAIN_SECONDS
                if not fresh and member.peer.id not in self._asking and self._silent(member, now):
                    task = asyncio.ensure_future(self._look(member))
                    self._asking[member.peer.id] = task
                    task.add_done_callback(functools.partial(self._looked, member.peer.id))

    def _forgive(self, seconds: float) -> None:
        """This process was held up: that silence is not the engines'."""
        for member in self._peers.members.values():
            for leg in member.legs:
                if isinstance(leg, Leg):
                    leg.forgive(seconds)

    def _looked(self, name: str, task: asyncio.Task[None]) -> None:
        self._asking.pop(name, None)

    def _silent(self, member: Member, now: float) -> list[Leg]:
        return [leg for leg in member.legs if isinstance(leg, Leg) and leg.silent_seconds(now) > ASK_SECONDS]

    async def _look(self, member: Member) -> None:
        asked = time.monotonic()
        pulse = await self._supervisors.pulse(member.peer) if member.peer.supervisor else None
        now = time.monotonic()
        if pulse is None:
            for leg in self._silent(member, now):
                self._late(member, leg, now)
            return
        before, member.pulse = member.pulse, (pulse, asked)
        self._judge(member, pulse, before, now)

    def _judge(self, member: Member, pulse: Pulse, before: tuple[Pulse, float] | None, now: float) -> None:
        if pulse.generation != member.peer.generation:
            return                         # the stream of events tells what becomes of it
        since = now - before[1] if before else 0.0
        recent = before[0] if before and before[0].generation == pulse.generation and since < FORGET_SECONDS else None
        for leg in self._silent(member, now):
            tokens = min(leg.ahead_tokens, member.peer.chunk_tokens or leg.ahead_tokens)
            step = self._peers.pace(member).step_seconds(tokens, pulse.longest_step_seconds)
            least = STILL_SECONDS if leg.alone else WAITING_SECONDS
            why = frozen(pulse, recent, leg.silent_seconds(now), step, since, least)
            if why:
                self._end(leg, LegFailed(Failure.FROZEN, leg.peer, why))

    def _late(self, member: Member, leg: Leg, now: float) -> None:
        """Without a pulse: past what was predicted, when the request can go elsewhere; past the longest silence, always."""
        waits = leg.silent_seconds(now)
        predicted = self._peers.pace(member).answer_seconds(leg.ahead_tokens, leg.call.new_tokens)
        early = leg.alone and leg.others and not leg.began and predicted is not None and waits > predicted + LATE_SECONDS
        if early or (waits if leg.began else now - leg.asked) > self._silence:
            self._end(leg, LegFailed(Failure.SILENT, leg.peer, f"no byte for {waits:.1f} s"
                                     + (f", {predicted:.1f} s were predicted" if predicted is not None else "")))

    def _end(self, leg: Leg, failure: LegFailed) -> None:
        leg.fail(failure)
        self._peers.failed(failure)
