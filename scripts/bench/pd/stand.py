"""Where the fault bench stands: fakes with a gateway over them, a steady load of requests, and what became of each."""
import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from fleet import Fleet, GatewayProcess, Supervised, completion, digest

HANG_SECONDS = 25.0            # no answer for so long is a hang: over every limit that is measured here
SILENCE_SECONDS = 8            # gateway.silence: without a supervisor nobody can tell frozen from slow before it
COMPLETIONS = "/v1/completions"
off = asyncio.to_thread        # the fleet's calls block, and the load must not feel it


@dataclass
class Answer:
    """One request: `sent`, `ended` and `times` (of each event) are CLOCK_MONOTONIC seconds; `status` 0 is no answer."""
    sent: float
    stream: bool
    tokens: int
    status: int = 0
    ended: float = 0.0
    text: str = ""
    retry_after: str | None = None
    error: dict = field(default_factory=dict)
    times: list = field(default_factory=list)
    done: bool = False
    hang: bool = False
    broken: bool = False

    @property
    def seconds(self):
        return self.ended - self.sent

    @property
    def good(self):
        """The whole answer, its first word from a real prefill."""
        words = digest("hello") + "".join(f" {number}" for number in range(1, self.tokens))
        return self.status == 200 and self.text == words and not self.error and (self.done or not self.stream)

    @property
    def outcome(self):
        if self.hang:
            return "HANG"
        if self.good:
            return "ok"
        if self.error and self.status == 200:
            return "error event" + (" then [DONE]" if self.done else "")
        return "CUT" if self.broken or not self.status else "WRONG" if self.status == 200 else str(self.status)


async def ask(http, url, tokens=4, stream=False, limit=HANG_SECONDS):
    """One completion, whatever becomes of it."""
    answer = Answer(time.monotonic(), stream, tokens)
    body = completion(tokens=tokens, stream=stream)
    try:
        async with asyncio.timeout(limit), http.post(url + COMPLETIONS, json=body) as response:
            answer.status, answer.retry_after = response.status, response.headers.get("Retry-After")
            await (read_events if stream and response.status == 200 else read_whole)(response, answer)
    except TimeoutError:
        answer.hang = True
    except (aiohttp.ClientError, OSError, ValueError):
        answer.broken = True
    answer.ended = time.monotonic()
    return answer


async def read_whole(response, answer):
    body = json.loads(await response.read())
    answer.error = body.get("error") or {}
    answer.text = "".join(choice["text"] for choice in body.get("choices", ()))


async def read_events(response, answer):
    async for line in response.content:
        if line.startswith(b"data: "):
            answer.times.append(time.monotonic())
            answer.done = line.startswith(b"data: [DONE]")
            if not answer.done:
                part = json.loads(line[6:])
                answer.error = part.get("error") or answer.error
                answer.text += "".join(choice["text"] for choice in part.get("choices", ()))


class Lag:
    """How late this process was woken at most, seconds: what other programs on the machine cost us, they cost the gateway
    and the engines too."""

    def __init__(self):
        self.most = 0.0
        self.task = asyncio.ensure_future(self.watch())

    async def watch(self):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.most = max(self.most, time.monotonic() - before - 0.01)

    def end(self):
        self.task.cancel()
        return self.most


class Stand:
    """`pairs` prefill and as many decode workers of one engine, `supervised` or on their own, and a gateway over them."""

    def __init__(self, directory, engine, supervised, quick, pairs=2, flags=()):
        directory.mkdir()
        self.directory, self.engine, self.supervised, self.quick = directory, engine, supervised, quick
        self.row = engine + (" supervised" if supervised else "")
        self.fleet = Supervised(directory, engine) if supervised else Fleet(engine, pairs, pairs, flags=flags)
        self.gateway = self.http = None

    async def __aenter__(self):
        try:
            await off(self.fleet.start)
            self.gateway = await off(self.new_gateway().start)
            self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0),
                                              timeout=aiohttp.ClientTimeout(total=None))
            self.ask = partial(ask, self.http, self.gateway.url)
            await self.recover()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_):
        for end in (self.gateway and self.gateway.close, self.fleet.close):
            if end:
                await off(end)
        if self.http is not None:
            await self.http.close()

    def new_gateway(self, **settings):
        workers = [] if self.supervised else [peer.entry() for peer in self.fleet.peers]
        urls = [self.fleet.url] if self.supervised else []
        return GatewayProcess(self.directory, workers, urls, silence=f"{SILENCE_SECONDS}s", **settings)

    # --- load ---------------------------------------------------------------------------------------------------------

    async def load(self, per_second, seconds, until=None):
        """Requests at a steady rate, every third a stream, for `seconds` or until `until` is set: all answers."""
        begun, tasks = time.monotonic(), []
        while (until is None or not until.is_set()) and time.monotonic() - begun < seconds:
            tasks.append(asyncio.ensure_future(self.ask(stream=len(tasks) % 3 == 2)))
            await asyncio.sleep(max(0.0, begun + len(tasks) / per_second - time.monotonic()))
        return await asyncio.gather(*tasks)

    async def normal(self):
        """The slowest of some answers while all is well, seconds."""
        answers = await self.load(8, 1 if self.quick else 3)
        if not all(answer.good for answer in answers):
            raise RuntimeError(f"{self.row}: not well at rest: {[answer.outcome for answer in answers]}")
        return max(answer.seconds for answer in answers)

    # --- state --------------------------------------------------------------------------------------------------------

    async def until(self, predicate, seconds=20.0):
        """The time at which it became true; None when it did not within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if await off(predicate):
                return time.monotonic()
            await asyncio.sleep(0.02)
        return None

    def standings(self):
        return {each["name"]: each["standing"] for each in self.gateway.status()["workers"]}

    def well(self):
        status, fleet = self.gateway.status(), self.fleet
        return len(status["pairs"]) == len(fleet.role("prefill")) * len(fleet.role("decode")) and \
            all(pair["paired"] for pair in status["pairs"]) and \
            all(each["standing"] == "up" and not each["legs"] for each in status["workers"])

    async def recover(self):
        await off(self.fleet.recover)
        if await self.until(self.well) is None:
            raise RuntimeError(f"{self.row}: the gateway does not hold all for up: {self.gateway.status()}")
        for peer in self.fleet.peers:
            await off(peer.reset)

    # --- what the engines saw -----------------------------------------------------------------------------------------

    def legs(self, role=None, since=0.0):
        """Starts of requests of ours: the supervisor's have no generation, the gateway's own no user agent."""
        return [event for event in self.fleet.log("start", since=since) if event["path"] == COMPLETIONS
                and event["generation"] and "user-agent" in event["headers"]
                and role in (None, self.fleet[event["peer"]].role)]

    async def leg(self, role, count=1):
        """The leg of the latest request, once there are `count` at engines of this role."""
        await self.until(lambda: len(self.legs(role)) >= count, 5)
        return self.legs(role)[-1]

    def used(self, peer, since):
        """When it first got a request after `since` that it also served; None: not yet. A process that was stopped reads
        at first what others have given up."""
        served = {event["number"] for event in peer.log("end", since=since) if event["status"] == 200}
        return next((leg["at"] for leg in self.legs(since=since) if leg["peer"] == peer.name and leg["number"] in served), None)

    def told(self, legs):
        """When the engines had learned that these legs are over, the last of them; None while one has not."""
        ends = [[event["at"] for event in self.fleet.log("gone", "abort") if event["peer"] == leg["peer"] and
                 (event["number"] == leg["number"] or (leg["rid"] and event.get("rid") == leg["rid"]))] for leg in legs]
        return max(min(each) for each in ends) if legs and all(ends) else None

    def running(self):
        """Legs that have not ended, at engines that can be asked."""
        over = {(event["peer"], event["number"]) for event in self.fleet.log("end", "gone")}
        return [leg for leg in self.legs() if (leg["peer"], leg["number"]) not in over]
