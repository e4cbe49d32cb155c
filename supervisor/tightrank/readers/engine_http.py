"""Asks an engine's port: its health and, once that is well, one real request of ours. In threads with time limits; the
tick only looks.

A first request may compile kernels and take minutes; being slow is not a refusal, so only the start's progress limit
bounds it (see decide.start_stalled).
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import httpx2

from tightrank import engines
from tightrank.engines.base import Probe
from tightrank.records import ProbeResult, WorkerSpec

HEALTH_SECONDS = 25.0      # SGLang's own health check waits up to 20 s for a busy scheduler
CANARY_SECONDS = 600.0
ORDER_SECONDS = 30.0       # a scheduler takes it between two batches
PAUSE_SECONDS = 0.25


class Prober:
    """At most one probe of a worker at a time; a probe of an ended generation is left to time out and not looked at. Its
    thread is a daemon thread, since an executor's threads would hold up our own end for as long."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def start(self, spec: WorkerSpec, healthy: bool) -> Future[ProbeResult]:
        """Asks for its health, or (`healthy`: it was told already) sends the canary."""
        future: Future[ProbeResult] = Future()
        future.add_done_callback(lambda _: self._wake())
        try:
            threading.Thread(target=lambda: future.set_result(probe(spec, healthy)), name="probe", daemon=True).start()
        except RuntimeError as error:        # no thread may be made now; the next probe may find one
            future.set_result(ProbeResult(time.monotonic(), False, False, str(error)))
        return future

    def send(self, call: Probe) -> Future[str]:
        """One request; what refused it, or ""."""
        future: Future[str] = Future()
        future.add_done_callback(lambda _: self._wake())
        try:
            threading.Thread(target=lambda: future.set_result(_refusal(call, ORDER_SECONDS)), name="order", daemon=True).start()
        except RuntimeError as error:
            future.set_result(str(error))
        return future


def probe(spec: WorkerSpec, healthy: bool) -> ProbeResult:
    """Never raises; `why` names what refused."""
    asked = engines.get(spec.engine)
    time.sleep(PAUSE_SECONDS)
    if healthy:
        why = _refusal(asked.canary(spec), CANARY_SECONDS)
        return ProbeResult(time.monotonic(), True, not why, why)
    why = _refusal(asked.health(spec), HEALTH_SECONDS)
    return ProbeResult(time.monotonic(), not why, False, why)


def _refusal(call: Probe, seconds: float) -> str:
    """Empty when the engine answered 200. A proxy of the environment is not for our engines, nor is their key for it."""
    try:
        with httpx2.Client(trust_env=False, timeout=seconds) as client:
            response = client.request(call.method, call.url, json=call.body, headers=dict(call.headers))
    except UnicodeError:
        return f"{call.method} {call.url}: the API key is not ASCII and cannot be sent in a header"
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return f"{call.method} {call.url}: {type(error).__name__}: {error}"
    return "" if response.status_code == 200 else f"{call.method} {call.url}: {response.status_code} {response.text[:200]}"
