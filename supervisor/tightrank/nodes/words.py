"""What the supervisors of one worker's hosts say to each other: the body of POST /nodes and its answer."""
from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tightrank.errors import CAUSES
from tightrank.records import Diagnosis, Phase, Shed

SCHEMA = 1
_TEXT, _LINES = 4000, 20


class _Words(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Trouble(_Words):
    """Why a member ended its ranks."""
    cause: str = Field(max_length=64)
    summary: str = Field(max_length=_TEXT)
    evidence: list[str] = Field(max_length=_LINES)
    change: str = Field(max_length=_TEXT)
    confidence: str = Field(max_length=16)

    @classmethod
    def of(cls, found: Diagnosis) -> Trouble:
        return cls(cause=found.cause, summary=found.summary[:_TEXT], evidence=[each[:_TEXT // 4] for each in
                   found.evidence[:_LINES]], change=found.change[:_TEXT], confidence=found.confidence)

    def diagnosis(self, where: str) -> Diagnosis:
        """Of the whole worker; `where` names the host. A cause that this release does not know is `rank-died`."""
        cause = self.cause if self.cause in CAUSES else "rank-died"
        return Diagnosis(cause, f"{where}: {self.summary}", tuple(self.evidence), self.change, CAUSES[cause].restart_helps, {},
                         self.confidence)


class Refusal(_Words):
    """What a member's levels refuse: `Shed`."""
    new_tokens: int = Field(ge=0)
    retry_after_seconds: int = Field(ge=0)
    why: str = Field(max_length=_TEXT)

    @classmethod
    def of(cls, shed: Shed) -> Refusal:
        return cls(new_tokens=shed.new_tokens, retry_after_seconds=shed.retry_after_seconds, why=shed.why[:_TEXT])

    def shed(self, where: str) -> Shed:
        return Shed(self.new_tokens, self.retry_after_seconds, f"{where}: {self.why}")


class Report(_Words):
    """How a member is. `supervisor` is its daemon's name for this life of it; `leader` and `generation` are of the ranks that
    it has, or had last; `clean`: it has none; `ready`: all of them are there and every wanted hook is in force; `last`: the
    highest number that it ever took; `heard` and `heard_from`: the orders on which it has acted (0: none). Without these a
    report that it is clean could be older than an order to start, which it then still obeys."""
    schema_version: int = SCHEMA
    node: int = Field(ge=1, le=255)
    supervisor: str = Field(max_length=64)
    agreement: dict[str, str] = Field(max_length=16)
    leader: str = Field(max_length=64)
    generation: int = Field(ge=0)
    phase: Phase = Field(strict=False)
    clean: bool
    ready: bool
    stopping: bool
    last: int = Field(ge=0)
    heard: int = Field(ge=0)
    heard_from: str = Field(max_length=64)
    trouble: Trouble | None
    available_bytes: int | None
    floor_bytes: int
    budget: int | None
    shed: Refusal | None
    aborts: int = Field(ge=0)
    abort_why: str = Field(max_length=_TEXT)


class Orders(_Words):
    """What a member is to do. `generation` None: to run nothing, for the reason `why`. `number` grows with each other
    `generation`."""
    schema_version: int = SCHEMA
    number: int = Field(ge=1)
    leader: str = Field(max_length=64)
    generation: int | None
    admitted: bool
    why: str
