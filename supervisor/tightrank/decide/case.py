"""What a rule may look at, and how it answers."""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tightrank.config import Config
from tightrank.errors import CAUSES
from tightrank.hang import HangLimits, limits_of
from tightrank.records import ActionKind, Decision, Diagnosis, Snapshot, WorkerReading, WorkerView

_HANG = HangLimits()


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of the configuration that decisions need. `jitter` is added to a back-off, as a share of it."""
    floor_bytes: int
    margin_bytes: int
    restarts: int
    backoff_first_seconds: float
    backoff_longest_seconds: float
    restart_pairs: bool = False                 # pd.restart: pair
    hang: HangLimits = _HANG
    jitter: Callable[[], float] = lambda: random.uniform(0.0, 0.2)  # noqa: S311 - spreads restarts, keeps no secret

    @classmethod
    def of(cls, config: Config) -> Policy:
        guard, limits = config.guard, config.limits
        return cls(guard.floor_bytes, guard.margin_bytes, limits.restarts, limits.backoff_first_seconds,
                   limits.backoff_longest_seconds, config.pd.restart == "pair", limits_of(limits))


@dataclass(frozen=True, slots=True)
class Case:
    """One worker with all that a rule may look at."""
    view: WorkerView
    reading: WorkerReading
    snapshot: Snapshot
    policy: Policy

    def decision(self, kind: ActionKind, sentence: str, diagnosis: Diagnosis | None = None,
                 delay_seconds: float = 0.0, reason: str = "") -> Decision:
        return Decision(kind, self.view.name, self.view.generation, sentence, diagnosis, delay_seconds,
                        reason or (diagnosis.cause if diagnosis else kind.value))

    def stop(self, diagnosis: Diagnosis) -> Decision:
        return self.decision(ActionKind.STOP, f"ending generation {self.view.generation}: {diagnosis.summary}",
                             diagnosis)


Rule = Callable[[Case], Decision | None]


def fatal(cause: str, summary: str, change: str, evidence: tuple[str, ...] = (), confidence: str = "certain",
          numbers: Mapping[str, float] | None = None) -> Diagnosis:
    return Diagnosis(cause, summary, evidence, change, CAUSES[cause].restart_helps, numbers or {}, confidence)
