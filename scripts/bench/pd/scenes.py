"""The scenes of the fault bench with some of the engines ill: what is done, what the clients saw, the target beside it.

Columns are named as in the tables of public routers that they are compared with. Each scene finds all well.
"""
import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from pd.cells import Cell, scene
from pd.stand import SILENCE_SECONDS, off

OVER_NORMAL, FROZEN, MUTE, ANSWER, EVENT, BACK, READY = 0.1, 3.0, 3.0, 0.1, 0.05, 1.0, 1.0     # targets, seconds
QUICK_SECONDS = 2.0
ROLES = {"P": "prefill", "D": "decode"}


@dataclass(frozen=True)
class Illness:
    """`cure` None: nothing is to be done. `restarts`: a supervisor starts it again, once it was cured."""
    strike: Callable
    cure: Callable | None
    over_normal: float
    restarts: bool = False
    seconds: float = 20.0
    per_second: float = 4.0


def kill(peer):
    peer.kill()


def freeze(peer):
    peer.send(signal.SIGSTOP)


def thaw(peer):
    peer.send(signal.SIGCONT)


def fault(kind, **fields):
    return lambda peer: peer.fault(kind, **fields)


KILLED = Illness(kill, lambda peer: peer.start(), OVER_NORMAL, seconds=30)
KILLED_SUPERVISED = Illness(kill, None, OVER_NORMAL, restarts=True, seconds=30)
STOPPED = Illness(freeze, thaw, FROZEN, per_second=2)
BLOCKED = Illness(fault("block"), kill, FROZEN, restarts=True, per_second=2)
FAULTS = {"mute, /health 200": Illness(fault("mute"), lambda peer: peer.reset(), MUTE, per_second=2),
          "says 500": Illness(fault("status"), lambda peer: peer.reset(), OVER_NORMAL),
          "refuses": Illness(fault("refuse"), lambda peer: peer.reset(), OVER_NORMAL),
          "sends garbage": Illness(fault("garbage"), lambda peer: peer.reset(), OVER_NORMAL)}


async def one_of_two(stand, role, illness):
    """Struck under a steady load of which nothing may fail; then how soon after its return it gets work."""
    cell, normal = Cell(), await stand.normal()
    peer, stop = stand.fleet.role(role)[0], asyncio.Event()
    before = await off(generation, stand, peer)
    load = asyncio.ensure_future(stand.load(illness.per_second, 600, stop))
    await asyncio.sleep(0.3)
    await off(illness.strike, peer)
    returned = asyncio.ensure_future(stand.until(lambda: is_back(stand, peer, illness, before), 90))
    await asyncio.sleep(QUICK_SECONDS if stand.quick else illness.seconds)
    if illness.cure is not None:
        returned.cancel()
        await off(illness.cure, peer)
        returned = asyncio.ensure_future(stand.until(lambda: is_back(stand, peer, illness, before)))
    back = await returned
    more = asyncio.ensure_future(stand.load(20, 600, stop))          # or the wait for the next request would be measured
    used = None if back is None else await stand.until(lambda: stand.used(peer, back), 20)
    stop.set()
    cell.load([*await load, *await more], normal, illness.over_normal)
    cell.figure("back", used and stand.used(peer, back) - back, BACK)
    left = await stand.until(lambda: not stand.running(), 3)
    cell.expect(left, f"legs left running at {[leg['peer'] for leg in stand.running()]}")
    return cell


def generation(stand, peer):
    return stand.fleet.workers()[peer.name]["generation"] if stand.supervised else 0


def is_back(stand, peer, illness, before):
    if not illness.restarts:
        return peer.ready()
    worker = stand.fleet.workers().get(peer.name, {})
    return worker.get("phase") == "up" and worker["generation"] > before


async def all_killed(stand, role):
    """Every answer is a 503 at once, with what is the matter; /readyz agrees; both are right again after the return."""
    cell, peers = Cell(), stand.fleet.role(role)
    for peer in peers:
        await off(peer.kill)
    dead = time.monotonic()
    ready = asyncio.ensure_future(stand.until(lambda: not stand.gateway.answers("/readyz"), 10))
    window = 0.7 if stand.supervised else QUICK_SECONDS if stand.quick else 15    # a supervisor starts them again at once
    answers = await stand.load(10, window)
    for answer in answers:
        cell.expect(answer.status == 503 and int(answer.retry_after or 0) >= 1,
                    f"{answer.outcome}, Retry-After {answer.retry_after}, {answer.error}")
    outcomes = "/".join(sorted({answer.outcome for answer in answers}))
    cell.say(f"{len(answers)} x {outcomes} + Retry-After {answers[0].retry_after}")
    cell.figure("slowest answer", max(answer.seconds for answer in answers), ANSWER)
    told = [answer.ended for answer in answers if named(stand, peers, answer.error)]
    cell.figure("with the cause after", min(told) - dead if told else None, ANSWER + 0.1)     # ten requests a second
    not_ready = await ready
    cell.figure("/readyz 503 after", not_ready and not_ready - dead, READY)
    await all_back(stand, cell, peers)
    return cell


def named(stand, peers, error):
    """Whether it tells what is the matter: the supervisor's cause and runbook, or at least who does not answer."""
    if stand.supervised:
        return error.get("cause") and error.get("runbook")
    return peers[0].name in error.get("message", "")


async def all_back(stand, cell, peers):
    if not stand.supervised:
        for peer in peers:
            await off(peer.start)

    def back():
        return any(stand.fleet.workers().get(peer.name, {}).get("phase") == "up" for peer in peers) if stand.supervised else \
            any(peer.ready() for peer in peers)
    since = await stand.until(back)
    ready = asyncio.ensure_future(stand.until(lambda: stand.gateway.answers("/readyz")))
    while not (answer := await stand.ask()).good and time.monotonic() - since < 20:
        await asyncio.sleep(0.05)
    cell.figure("first ok after the return", answer.ended - since if answer.good else None, BACK)
    readied = await ready
    cell.figure("/readyz 200 after", readied and readied - since, READY)


async def all_stopped(stand, role):
    """Nobody can answer; the client is told so. Without a supervisor that takes gateway.silence."""
    cell, peers = Cell(), stand.fleet.role(role)
    await stand.normal()
    for peer in peers:
        await off(freeze, peer)
    answers = await asyncio.gather(stand.ask(), stand.ask(stream=True))
    for answer in answers:
        cell.outcome("stream" if answer.stream else "whole", answer, "502", "503", "504")
    limit = FROZEN if stand.supervised else SILENCE_SECONDS + 2
    cell.figure("slowest answer", max(answer.seconds for answer in answers), limit)
    later = await stand.ask()
    cell.outcome("the next", later, "502", "503", "504")
    cell.figure("in", later.seconds, limit)
    for peer in peers:
        await off(thaw, peer)
    since = await stand.until(lambda: all(peer.ready() for peer in peers))
    while not (answer := await stand.ask()).good and time.monotonic() - since < 20:
        await asyncio.sleep(0.05)
    cell.figure("first ok after the return", answer.ended - since if answer.good else None, BACK)
    return cell


async def killed_in_flight(stand, role):
    """Before the first byte: the request is done again by others, and costs what it costs once more."""
    cell = Cell()
    for stream in (False, True) if role == "prefill" else (False,):
        if role == "prefill":
            for peer in stand.fleet.role(role):
                await off(peer.fault, "slow-prefill", seconds=1.0)
        tokens = 4 if role == "prefill" else 100
        usual = (await stand.ask(tokens=tokens, stream=stream)).seconds
        count = len(await off(stand.legs, role))
        work = asyncio.ensure_future(stand.ask(tokens=tokens, stream=stream))
        leg = await stand.leg(role, count + 1)
        await asyncio.sleep(0.4)
        await off(kill, stand.fleet[leg["peer"]])
        killed = time.monotonic()
        answer = await work
        cell.outcome("stream" if stream else "whole", answer, "ok")
        cell.figure("late by", answer.ended - killed - usual, OVER_NORMAL)
        await stand.recover()
    return cell


def register(letter, role):
    def ill(illness):
        return lambda stand: one_of_two(stand, role, illness)

    async def killed(stand):
        return await one_of_two(stand, role, KILLED_SUPERVISED if stand.supervised else KILLED)

    scene(f"1 of 2 {letter} killed", quick=("alone",) if letter == "P" else ())(killed)
    scene(f"all {letter} killed", quick=("alone", "supervised") if letter == "D" else ())(lambda stand: all_killed(stand, role))
    scene(f"{letter} killed in flight", quick=("alone",) if letter == "P" else ())(lambda stand: killed_in_flight(stand, role))
    scene(f"1 of 2 {letter} SIGSTOP", quick=("supervised",) if letter == "P" else ())(ill(STOPPED))
    scene(f"1 of 2 {letter} a rank blocked", ("supervised",), quick=("supervised",) if letter == "D" else ())(ill(BLOCKED))
    scene(f"all {letter} SIGSTOP")(lambda stand: all_stopped(stand, role))
    for name, illness in FAULTS.items():
        quick = ("alone",) if (letter, illness.over_normal) == ("D", MUTE) else ()
        scene(f"1 of 2 {letter} {name}", ("alone",), quick=quick)(ill(illness))


for letter, role in ROLES.items():
    register(letter, role)
