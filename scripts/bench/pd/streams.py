"""The scenes of the fault bench that look at one request: broken off in its stream, given up by its client, refused, slow."""
import asyncio
import time

from pd.cells import Cell, scene
from pd.scenes import EVENT, FROZEN, freeze, kill
from pd.stand import SILENCE_SECONDS, ask, off

TOLD, OTHER_LEG = 1.0, 0.1         # targets, seconds: a client has left; the other leg has failed
ERROR = ("error event",)


async def streaming(stand, tokens=600):
    """A stream in the midst of its tokens: (its task, its decode worker)."""
    count = len(await off(stand.legs, "decode"))
    work = asyncio.ensure_future(stand.ask(tokens=tokens, stream=True))
    leg = await stand.leg("decode", count + 1)
    await asyncio.sleep(0.5)
    return work, stand.fleet[leg["peer"]]


@scene("D killed mid-stream", quick=("supervised",))
async def killed(stand):
    cell = Cell()
    work, peer = await streaming(stand)
    await off(kill, peer)
    struck = time.monotonic()
    answer = await work
    cell.outcome("", answer, *ERROR)
    cell.figure("after", answer.ended - struck, EVENT)
    return cell


@scene("P killed mid-stream")
async def prefill_killed(stand):
    """The KV has gone over: the stream does not need it any more."""
    cell = Cell()
    work, _ = await streaming(stand, tokens=200)
    for peer in stand.fleet.role("prefill"):
        await off(kill, peer)
    cell.outcome("", await work, "ok")
    return cell


@scene("D cut mid-stream", ("alone",), quick=("alone",))
async def cut(stand):
    cell = Cell()
    for how in ("rst", "fin"):
        for peer in stand.fleet.role("decode"):
            await off(peer.fault, "cut", how=how, after=20)
        answer = await stand.ask(tokens=40, stream=True)
        cell.outcome(how.upper(), answer, *ERROR)
        cell.figure("after", answer.times[-1] - answer.times[-2] if len(answer.times) > 1 else None, EVENT)
        await stand.recover()
    return cell


@scene("D SIGSTOP mid-stream", quick=("supervised",))
async def stopped(stand):
    """Of its main process and, under a supervisor, of its rank alone."""
    cell = Cell()
    for what in ("main", "rank") if stand.supervised else ("main",):
        work, peer = await streaming(stand)
        if what == "rank":
            peer.known_pid = await off(stand.fleet.rank, peer.name)
        await off(freeze, peer)
        struck = time.monotonic()
        answer = await work
        cell.outcome(what, answer, *ERROR)
        cell.figure("after", answer.ended - struck, FROZEN if stand.supervised else SILENCE_SECONDS + 2)
        await stand.recover()
    return cell


@scene("D's rank blocked mid-stream", ("supervised",))
async def blocked(stand):
    cell = Cell()
    work, peer = await streaming(stand)
    await off(peer.fault, "block")
    struck = time.monotonic()
    answer = await work
    cell.outcome("", answer, *ERROR)
    cell.figure("after", answer.ended - struck, FROZEN)
    await off(kill, peer)
    return cell


@scene("the other leg when one fails", ("alone",), quick=("alone",))
async def other_leg(stand):
    """SGLang: ended at its engine. vLLM has no decode leg before the prefill is done, so none may start."""
    cell = Cell()
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        for kind in ("status",) if stand.quick else ("status", "drop", "garbage"):
            for peer in stand.fleet.role(role):
                await off(peer.fault, kind)
            answer = await stand.ask(stream=True)
            cell.expect(answer.status >= 500, f"{role} {kind}: ended as {answer.outcome}")
            failed, others = await off(stand.legs, role), await off(stand.legs, other)
            if stand.engine == "sglang":
                told = await stand.until(lambda others=others: stand.told(others), 5)
                last = max(leg["at"] for leg in failed)
                cell.figure(f"{other} told after {role} {kind}", told and stand.told(others) - last, OTHER_LEG)
            elif role == "prefill":
                cell.expect(not others, f"{kind}: a decode leg was started")
            await stand.recover()
    if stand.engine == "vllm":
        cell.say("no decode leg was started")
    return cell


@scene("client leaves", quick=("alone",))
async def client_leaves(stand):
    cell = Cell()
    for phase in ("prefill", "decode"):
        for stream in (False, True):
            if phase == "prefill":
                for peer in stand.fleet.role("prefill"):
                    await off(peer.fault, "slow-prefill", seconds=5)
            work = asyncio.ensure_future(stand.ask(tokens=600, stream=stream))
            await stand.leg(phase)
            await asyncio.sleep(0.3)
            legs = [leg for leg in await off(stand.legs) if phase == "prefill" or leg["peer"][0] == "d"]
            work.cancel()
            left = time.monotonic()
            told = await stand.until(lambda legs=legs: stand.told(legs), 5)
            cell.figure(f"{phase} {'stream' if stream else 'whole'}: told after", told and stand.told(legs) - left, TOLD)
            await asyncio.sleep(0.2)
            cell.expect(not await off(stand.running), f"{phase}: legs run on for nobody")
            await stand.recover()
    return cell


@scene("engine busy; gateway full", ("alone",))
async def full(stand):
    cell = Cell()
    for role, status, seconds in (("prefill", 429, 7), ("decode", 503, None)):
        for peer in stand.fleet.role(role):
            await off(peer.fault, "status", status=status, **({"retry_after": seconds} if seconds else {}))
        answer = await stand.ask()
        cell.outcome(f"{role} {status}:", answer, str(status))
        cell.say(f"Retry-After {answer.retry_after}")
        cell.expect(int(answer.retry_after or 0) >= 1 and answer.retry_after == str(seconds or answer.retry_after),
                    f"{role} {status}: Retry-After {answer.retry_after}")
        cell.expect(set((await off(stand.standings)).values()) == {"up"}, "a busy engine was condemned")
        await stand.recover()
    small = await off(stand.new_gateway(in_flight=4).start)
    try:
        answers = await asyncio.gather(*(ask(stand.http, small.url, tokens=100) for _ in range(20)))
    finally:
        await off(small.close)
    refused = [answer for answer in answers if answer.outcome == "429" and int(answer.retry_after or 0) >= 1]
    cell.say(f"20 at once, 4 allowed: {sum(answer.good for answer in answers)} ok, {len(refused)} x 429 + Retry-After")
    cell.expect(len(refused) == 16 and sum(answer.good for answer in answers) == 4, f"{[a.outcome for a in answers]}")
    return cell


@scene("healthy but slow")
async def slow(stand):
    """A prefill that takes 5 s in place of nothing, tokens 4 s apart: both are served, nobody is condemned."""
    cell = Cell()
    await stand.normal()
    for peer in stand.fleet.role("prefill"):
        await off(peer.fault, "slow-prefill", seconds=5)
    for stream in (False, True):
        answer = await stand.ask(stream=stream)
        cell.outcome("slow prefill", answer, "ok")
        cell.say(f"{answer.seconds:.1f} s")
    cell.expect("out" not in (await off(stand.standings)).values(), f"condemned: {await off(stand.standings)}")
    await stand.recover()
    for peer in stand.fleet.role("decode"):
        await off(peer.fault, "slow", seconds=4)
    cell.outcome("slow stream", await stand.ask(tokens=3, stream=True), "ok")
    cell.expect(set((await off(stand.standings)).values()) == {"up"}, f"condemned: {await off(stand.standings)}")
    return cell


async def long_streams(stand, seconds):
    """Healthy streams of 10 minutes, one with a token each 0.1 s and one with a token each 5 s: neither is cut."""
    cell, (peer,) = Cell(), stand.fleet.role("decode")
    quick = asyncio.ensure_future(stand.ask(tokens=int(seconds / 0.1), stream=True, limit=seconds * 2))
    await stand.leg("decode")
    await off(peer.fault, "slow", seconds=5)
    rare = await stand.ask(tokens=int(seconds / 5), stream=True, limit=seconds * 2)
    for name, answer in (("many tokens", await quick), ("a token each 5 s", rare)):
        cell.outcome(name, answer, "ok")
        cell.say(f"{answer.seconds:.0f} s")
    return cell
