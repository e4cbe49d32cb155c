"""What the prefill steps of one generation have told: how long they take, how wide they are, what they hold."""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tightrank.auto.peaks import Evidence, Peaks
from tightrank.plan.pace import PaceMeter
from tightrank.records import WorkerSpec

if TYPE_CHECKING:
    from tightrank_adapter.wire import Step

WIDTH_SECONDS = 10.0               # a prefill step is seldom longer


class Prefills:
    """`whole`: the engine waits for a step's end, so that its time is the step's also on a device."""

    def __init__(self, spec: WorkerSpec, whole: bool, now: float) -> None:
        self.over_line_steps = 0
        self.longest_seconds: float | None = None
        self.meter = PaceMeter()           # of what they take
        self._auto = spec.line is not None and spec.line.auto
        self._group, self._whole = spec.tensor_parallel, whole
        self._peaks: dict[int, Peaks] = {} # of each rank, where the line is `auto`
        self._width, self._monotonic = 0, now                # keys of the last one

    def learn(self, steps: Sequence[Step], on_device: set[int]) -> None:
        """`on_device`: pids of the ranks that compute on one."""
        for step in steps:
            self.over_line_steps += step.over
            if self._auto:
                self._peaks.setdefault(step.rank, Peaks(step.rank)).learn(step)
            if step.rank % self._group == 0:                 # the others of its group take as long
                self.meter.learn(step, self._whole or step.pid not in on_device)
            self.longest_seconds = max(self.longest_seconds or 0.0, step.milliseconds / 1000)
        if steps:
            self._width, self._monotonic = steps[-1].width, time.monotonic()

    def width_now(self, now: float) -> int:
        """Keys of the prefill under way, as far as the steps tell; 0 when there was none lately."""
        return self._width if now - self._monotonic < WIDTH_SECONDS else 0

    def evidence(self, now: float) -> tuple[Evidence, ...]:
        """What they tell of memory, rank by rank."""
        return tuple(peaks.evidence(now) for _, peaks in sorted(self._peaks.items()))
