"""Whether a request can be taken now: a pure answer from one Status and the request's own numbers.

400: it can never fit, so the client must change it. 503: there is no capacity now, so the client may try again. 429: memory is
short and the prompt is long; shorter ones are taken.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

from tightrank.adapter import line
from tightrank.errors import CAUSES
from tightrank.records import Phase, Shed, Status, WorkerStatus

STARTING_RETRY_SECONDS = 5     # a starting worker is asked about again soon: its real time to ready is not known
FAILED_RETRY_SECONDS = 60      # a person has to change something first
_RESTARTING = {Phase.STARTING, Phase.BACKING_OFF, Phase.STOPPING}


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """What a client asks about; tokens. `cached_tokens` of the prompt are in the KV cache already."""
    prompt_tokens: int
    cached_tokens: int = 0
    max_tokens: int = 1
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status` is the HTTP status, `code` names the reason ("" when admitted); None: no limit known."""
    status: int
    code: str
    message: str
    worker: str | None = None
    param: str | None = None
    largest_prompt_tokens: int | None = None
    retry_after_seconds: int | None = None
    cause: str | None = None       # of the worker that failed; an ID of errors.py

    @property
    def runbook(self) -> str | None:
        return CAUSES[self.cause].runbook if self.cause else None

    def body(self) -> Mapping[str, Any]:
        """The answer of an admitted request."""
        return {"admit": True, "worker": self.worker, "largest_prompt_tokens": self.largest_prompt_tokens}


def restart_seconds(worker: WorkerStatus, now_unix: float) -> int | None:
    """Seconds until asking again makes sense, or None when no start of this worker is under way or planned."""
    if worker.next_start_unix is not None:
        return max(1, ceil(worker.next_start_unix - now_unix)) + STARTING_RETRY_SECONDS
    return STARTING_RETRY_SECONDS if worker.phase in _RESTARTING else None


def largest_prompt_tokens(worker: WorkerStatus, request: AdmissionRequest) -> int | None:
    """The longest prompt this worker can take with the answer length asked for; None: it has no limit that we know.

    A remainder that fits the line in one step on the prefix already cached is taken whatever `minimum` says.
    """
    limits = []
    if worker.context_tokens is not None:
        limits.append(max(worker.context_tokens - request.max_tokens, 0))
    if worker.line is not None:
        spec, budget = worker.line, worker.line_budget or worker.line.budget
        rule = cast("line.Rule", spec.rule)
        longest = line.longest_prompt(budget, minimum=spec.minimum, granule=spec.granule, rule=rule)
        rest = request.prompt_tokens - request.cached_tokens
        if request.cached_tokens and line.fits(budget, request.cached_tokens, rest, rule=rule):
            longest = max(longest, request.prompt_tokens)
        limits.append(longest)
    return min(limits, default=None)


def admit(status: Status, request: AdmissionRequest, now_unix: float) -> Verdict:
    """Judges `request`. A prompt goes to a worker of role both or prefill; a prefill worker needs a decode worker."""
    takers = [w for w in status.workers if w.role != "decode" and request.worker in (None, w.name)]
    if not takers:
        known = ", ".join(w.name for w in status.workers if w.role != "decode") or "none"
        return Verdict(404, "worker_not_found", f"worker={request.worker!r}: takes no prompts (those that do: {known})",
                       param="worker")
    largest = {w.name: largest_prompt_tokens(w, request) for w in takers}
    fitting = [w for w in takers if _fits(largest[w.name], request)]
    if not fitting:
        return _never_fits(request, max(value for value in largest.values() if value is not None))
    ready = [w for w in fitting if w.ready and not status.draining and _has_decode(status, w)]
    if not ready:
        return _not_ready(status, fitting, now_unix)
    taking = [w for w in ready if (limit := _shed_tokens(status, w)) is None or _new_tokens(request) <= limit]
    if not taking:
        return _shed(status, ready, request)
    chosen = max(taking, key=lambda w: w.line_budget or 0)
    return Verdict(200, "", "", worker=chosen.name, largest_prompt_tokens=largest[chosen.name])


def _fits(largest: int | None, request: AdmissionRequest) -> bool:
    return largest is None or request.prompt_tokens <= largest


def _decodes(status: Status) -> list[WorkerStatus]:
    return [w for w in status.workers if w.role == "decode"]


def _has_decode(status: Status, worker: WorkerStatus) -> bool:
    decodes = _decodes(status)
    return worker.role != "prefill" or not decodes or any(w.ready for w in decodes)


def _new_tokens(request: AdmissionRequest) -> int:
    return request.prompt_tokens - request.cached_tokens


def _sheds(status: Status, worker: WorkerStatus) -> list[Shed]:
    """What stands against long prompts at `worker`; of the decode workers that would go on with them, where all say so."""
    decodes = [w.shed for w in _decodes(status) if w.ready] if worker.role == "prefill" else []
    behind = [shed for shed in decodes if shed is not None] if None not in decodes else []
    return ([worker.shed] if worker.shed else []) + behind


def _shed_tokens(status: Status, worker: WorkerStatus) -> int | None:
    """The most new tokens that are taken; None: no such limit now."""
    return min((shed.new_tokens for shed in _sheds(status, worker)), default=None)


def _shed(status: Status, ready: list[WorkerStatus], request: AdmissionRequest) -> Verdict:
    """Of the worker that takes the longest prompts."""
    sheds = [min(_sheds(status, w), key=lambda shed: shed.new_tokens) for w in ready]
    shed = max(sheds, key=lambda shed: shed.new_tokens)
    longest = shed.new_tokens + request.cached_tokens
    return Verdict(429, "memory_pressure", f"prompt_tokens={request.prompt_tokens}: memory is short, so at most {longest} "
                   f"prompt tokens are taken now ({shed.why}); try again later, or a shorter prompt", param="prompt_tokens",
                   largest_prompt_tokens=longest, retry_after_seconds=shed.retry_after_seconds)


def _never_fits(request: AdmissionRequest, largest: int) -> Verdict:
    return Verdict(400, "context_length_exceeded",
                   f"prompt_tokens={request.prompt_tokens}: with max_tokens={request.max_tokens} at most {largest} "
                   "prompt tokens can be served here; shorten the prompt",
                   param="prompt_tokens", largest_prompt_tokens=largest)


def _not_ready(status: Status, workers: list[WorkerStatus], now_unix: float) -> Verdict:
    if status.draining:
        return Verdict(503, "draining", "the deployment drains and takes no new requests",
                       retry_after_seconds=_retry_seconds(workers, now_unix))
    # Where those that take prompts are ready, it is decode workers that are not.
    down = [w for w in workers if not w.ready] or _decodes(status)
    worst = next((w for w in down if w.diagnosis), down[0])
    cause = worst.diagnosis.cause if worst.diagnosis else None
    kind = "decode worker" if worst.role == "decode" else "worker"
    return Verdict(503, cause or "not_ready", f"no {kind} is ready: {worst.name} is {worst.phase.value}"
                   + (f" ({worst.reason})" if worst.reason else ""), retry_after_seconds=_retry_seconds(down, now_unix),
                   cause=cause)


def _retry_seconds(workers: list[WorkerStatus], now_unix: float) -> int:
    waits = [seconds for w in workers if (seconds := restart_seconds(w, now_unix)) is not None]
    return min(waits, default=STARTING_RETRY_SECONDS if all(w.ready for w in workers) else FAILED_RETRY_SECONDS)
