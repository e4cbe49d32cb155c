"""What the supervisors of one worker's hosts say to each other: the body of POST /nodes and its answer."""
from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tightrank.errors import CAUSES
from tightrank.records import Diagnosis, Phase

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


class Report(_Words):
    """How a member is. `supervisor` is its daemon's name for this life of it; `leader` and `generation` are of the ranks that
    it has, or had last; `clean`: it has none; `ready`: all of them are there and every wanted hook is in force; `last`: the
    highest number that it ever took."""
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
    trouble: Trouble | None
    available_bytes: int | None
    floor_bytes: int
    budget: int | None


class Orders(_Words):
    """What a member is to do. `generation` None: to run nothing, for the reason `why`."""
    schema_version: int = SCHEMA
    leader: str = Field(max_length=64)
    generation: int | None
    admitted: bool
    draining: bool
    why: str
