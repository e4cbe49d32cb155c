"""Asks an engine's port: its health, then one real request of ours. In threads with time limits; the tick only looks.

A first request may compile kernels and take minutes; being slow is not a refusal, so only the start's progress limit
bounds it (see decide.start_stalled).
"""
from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2

from tightrank import engines
from tightrank.engines.base import Probe
from tightrank.records import ProbeResult, WorkerSpec

HEALTH_SECONDS = 25.0      # SGLang's own health check waits up to 20 s for a busy scheduler
CANARY_SECONDS = 600.0
PAUSE_SECONDS = 0.25


class Prober:
    """At most one probe of a worker at a time; a probe of an ended generation is left to time out and not looked at."""

    def __init__(self, wake: Callable[[], None], most: int = 8) -> None:
        self._pool = ThreadPoolExecutor(max_workers=most, thread_name_prefix="probe")
        self._wake = wake

    def start(self, spec: WorkerSpec) -> Future[ProbeResult]:
        future = self._pool.submit(probe, spec)
        future.add_done_callback(lambda _: self._wake())
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def probe(spec: WorkerSpec) -> ProbeResult:
    """Health, then the canary. Never raises; `why` names what refused."""
    asked = engines.get(spec.engine)
    time.sleep(PAUSE_SECONDS)
    with httpx2.Client() as client:
        why = _refusal(client, asked.health(spec), HEALTH_SECONDS)
        if why:
            return ProbeResult(time.monotonic(), False, False, why)
        why = _refusal(client, asked.canary(spec), CANARY_SECONDS)
        return ProbeResult(time.monotonic(), True, not why, why)


def _refusal(client: httpx2.Client, call: Probe, seconds: float) -> str:
    """Empty when the engine answered 200."""
    try:
        response = client.request(call.method, call.url, json=call.body, headers=dict(call.headers), timeout=seconds)
    except httpx2.HTTPError as error:
        return f"{call.method} {call.url}: {type(error).__name__}: {error}"
    return "" if response.status_code == 200 else f"{call.method} {call.url}: {response.status_code} {response.text[:200]}"
