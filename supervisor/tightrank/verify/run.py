"""A ramp on what runs: one prompt after another, the supervisor watched meanwhile, the report saved after each."""
from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from tightrank.verify.client import Answer, Refused, Supervisor, complete
from tightrank.verify.progress import Display
from tightrank.verify.ramp import Chunk, Outcome, Ramp, Size, chain, judged, peaks, shared
from tightrank.verify.target import Json, NotThere, Settings, Target, concerns, trouble

LOOK_SECONDS = 0.5             # between looks at the supervisor; the guard itself looks 10 to 100 times a second
RECORDS_SECONDS = 3.0          # for the last records, which may come a moment after the answer
REASON_SECONDS = 3.0           # for the reason of a connection that broke: the supervisor sees a death within a second
SILENT_SECONDS = 5.0           # without a supervisor, the guard starts its daemon anew in less


@dataclass(slots=True)
class _Seen:
    """What was seen during one size."""
    began: float
    last_event: int = 0                # its number: what was before is not of this size
    guard_lowest: int | None = None    # before it: a lower one is of this size
    steps: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    lowest: dict[str, int] = field(default_factory=dict)

    def take(self, status: Json, worker: str) -> None:
        """Available memory of everyone who knows it."""
        at = time.monotonic() - self.began
        found = list(_available(status, worker, self.guard_lowest))
        for name, free in found:
            self.lowest[name] = min(self.lowest.get(name, free), free)
        hosts = [free for name, free in found if name in ("host", "guard")]
        if hosts:
            self.memory.append((round(at, 3), min(hosts)))


def _available(status: Json, worker: str, guard_lowest: int | None) -> Iterator[tuple[str, int]]:
    guard = status["guard"] or {}
    lowest = guard.get("lowest_available_bytes")
    new = lowest if lowest is not None and (guard_lowest is None or lowest < guard_lowest) else None
    found = [("host", status["memory"]["available_bytes"]), ("guard", guard.get("available_bytes")), ("guard", new)]
    found += [(f"rank {rank['rank']}", rank["available_bytes"]) for each in status["workers"] if each["name"] == worker
              for rank in each["ranks"] if rank["rank"] is not None and rank["alive"]]
    return ((name, free) for name, free in found if free is not None)


class _Stopped(Exception):
    """A size ended before it could pass."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome, self.why = outcome, why


class Runner:
    """Measures sizes of one worker."""

    def __init__(self, http: httpx2.AsyncClient, target: Target, settings: Settings, display: Display) -> None:
        self._http, self._target, self._settings, self._display = http, target, settings, display
        self._supervisor = Supervisor(http, target.supervisor)
        self._last_step: int | None = None     # that was read; None: the supervisor may keep thousands from before

    async def run(self, ramp: Ramp, save: Callable[[Ramp], None]) -> Ramp:
        """The ramp with its sizes done, up to the first that does not pass. `save` gets it after each."""
        ramp = replace(ramp, sizes=ramp.passed)
        for tokens in ramp.left:
            self._display.begin(ramp, tokens)
            size = await self.measure(tokens, ramp)
            ramp = replace(ramp, sizes=(*ramp.sizes, size))
            self._display.ended(ramp, size)
            save(ramp)
            if size.outcome is not Outcome.PASSED:
                break
        return ramp

    async def measure(self, tokens: int, ramp: Ramp) -> Size:
        """One prompt that nobody has sent before; never raises for what happens to it."""
        seed, started = secrets.randbits(32), time.time()
        seen = _Seen(time.monotonic())
        answer: Answer | None = None
        try:
            await self._before(seen)
            async with asyncio.timeout(self._settings.timeout_seconds):
                answer = await self._watched(self._prompt(seed, tokens), ramp.answer_tokens, seen, tokens)
            await self._after(seen, tokens)
            outcome, why = judged(_lowest(seen), ramp.floor_bytes)
        except _Stopped as stopped:
            outcome, why = stopped.outcome, stopped.why
        except NotThere as error:
            outcome, why = Outcome.LOST, str(error)
        except TimeoutError:
            outcome, why = Outcome.TIMEOUT, f"not answered within --timeout {self._settings.timeout_seconds:g} s"
        except asyncio.CancelledError:
            outcome, why = Outcome.INTERRUPTED, "ended by a signal"
        chunks = chain(seen.steps, tokens)
        return Size(
            tokens, outcome, why, seed, self._target.generation, started, time.monotonic() - seen.began,
            answer.first_token_seconds if answer else None, chunks, shared(seen.steps, chunks), tuple(seen.memory),
            dict(seen.lowest), peaks(seen.steps), tuple(each["sentence"] for each in seen.events))

    def _prompt(self, seed: int, tokens: int) -> list[int]:
        first, end = self._settings.token_range
        return random.Random(seed).choices(range(first, end), k=tokens)  # noqa: S311

    # --- watching -----------------------------------------------------------------------------------------------------

    async def _before(self, seen: _Seen) -> None:
        """Raises _Stopped where a level is in force already: nothing is sent then."""
        _, seen.last_event = await self._supervisor.events(10**15)
        if self._last_step is None:
            self._last_step = _last(await self._supervisor.steps(self._target.worker, 0), 0)
        status = await self._supervisor.status()
        seen.guard_lowest = (status["guard"] or {}).get("lowest_available_bytes")
        seen.take(status, self._target.worker)
        self._stop_for(trouble((), status, self._target))

    async def _watched(self, prompt: list[int], answer_tokens: int, seen: _Seen, tokens: int) -> Answer:
        """The answer; raises _Stopped for what ends it before. Ending closes the connection, and the engine lets it go."""
        asking = asyncio.ensure_future(complete(self._http, self._target, prompt, answer_tokens, self._settings.api_key))
        heard = time.monotonic()
        try:
            while not (await asyncio.wait({asking}, timeout=LOOK_SECONDS))[0]:
                try:
                    self._stop_for(await self._look(seen))
                    heard = time.monotonic()
                except NotThere:
                    if time.monotonic() - heard > SILENT_SECONDS:
                        raise
                self._display.progress(chain(seen.steps, tokens), _lowest(seen))
            answer = asking.result()
        except Refused as error:
            stopped = _Stopped(Outcome.REFUSED, str(error))
            raise stopped if error.ours else await self._explained(seen, stopped) from None
        except httpx2.HTTPError as error:
            why = f"the connection to {self._target.url} broke ({type(error).__name__})"
            raise await self._explained(seen, _Stopped(Outcome.LOST, why)) from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)     # closed, and what it raised beside us is nobody's
        routed = [each.partition("@")[0] for each in answer.route.split(",")]
        if answer.route and self._target.worker not in routed:
            raise _Stopped(Outcome.REFUSED, f"the gateway sent it to {answer.route}, not to {self._target.worker}; drain the "
                                            "others, or give the worker's own address with --endpoint")
        return answer

    async def _look(self, seen: _Seen) -> str:
        """Takes what is new and answers what is wrong. Raises NotThere."""
        status = await self._supervisor.status()
        seen.take(status, self._target.worker)
        events, seen.last_event = await self._supervisor.events(seen.last_event)
        ours = [event for event in events if concerns(event, self._target.worker)]
        seen.events += ours
        known = self._last_step or 0
        steps = await self._supervisor.steps(self._target.worker, known)
        seen.steps += steps
        self._last_step = _last(steps, known)
        return trouble(ours, status, self._target)

    def _stop_for(self, why: str) -> None:
        if why:
            raise _Stopped(Outcome.GUARD_EVENT, why)

    async def _after(self, seen: _Seen, tokens: int) -> None:
        """The last look, until the records are whole. A guard event at the end counts as one in the middle."""
        end = time.monotonic() + RECORDS_SECONDS
        while True:
            self._stop_for(await self._look(seen))
            chunks = chain(seen.steps, tokens)
            if (chunks and _end(chunks) == tokens) or time.monotonic() > end:
                return
            await asyncio.sleep(LOOK_SECONDS / 4)

    async def _explained(self, seen: _Seen, stopped: _Stopped) -> _Stopped:
        """With the supervisor's reason in its place, where it has one soon."""
        end = time.monotonic() + REASON_SECONDS
        while time.monotonic() < end:
            try:
                found = await self._look(seen)
            except NotThere as error:
                return _Stopped(Outcome.LOST, f"{stopped.why}; {error}")
            if found:
                return _Stopped(Outcome.GUARD_EVENT, found)
            await asyncio.sleep(LOOK_SECONDS / 2)
        return stopped


def _last(steps: Sequence[Json], known: int) -> int:
    return max((step["id"] for step in steps), default=known)


def _lowest(seen: _Seen) -> int | None:
    return min((free for _, free in seen.memory), default=None)


def _end(chunks: tuple[Chunk, ...]) -> int:
    return chunks[-1].prefix + chunks[-1].tokens


def client(**keywords: Any) -> httpx2.AsyncClient:
    """trust_env: a proxy of the environment must see neither prompts nor keys."""
    return httpx2.AsyncClient(trust_env=False, **keywords)
