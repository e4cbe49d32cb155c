"""The gateway's nouns. A peer is an engine as the gateway sees it: told by a supervisor, or named in the configuration."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tightrank.records import Shed


class Standing(StrEnum):
    """Whether a peer gets requests."""
    UP = "up"
    SUSPECT = "suspect"            # only when no other is there; a probe is under way
    OUT = "out"                    # never; a fact spoke against it


class Failure(StrEnum):
    """How one leg failed."""
    REFUSED = "refused"            # no connection: the engine has seen nothing of the request
    LOST = "lost"                  # the connection ended before the answer did
    ERROR = "error"                # it answered 5xx, or gave the request up
    BUSY = "busy"                  # it answered 429 or 503
    GARBAGE = "garbage"            # what it answered is no answer
    SILENT = "silent"              # nothing for longer than was predicted
    FROZEN = "frozen"              # its processes are stopped, or make no progress
    ENDED = "ended"                # its supervisor has ended this generation
    ABORTED = "aborted"            # memory is short there: its supervisor had its largest prefill ended


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine. `generation` is 0 and `phase` is "" where no supervisor tells them."""
    id: str                                # unique: NAME, or NAME@SUPERVISOR where names repeat
    name: str
    engine: str                            # vllm | sglang | atom (role both)
    role: str                              # both | prefill | decode
    url: str                               # http://host:port
    model: str                             # the name that a request must give
    transfer_host: str                     # SGLang: where decode workers find this prefill worker's bootstrap server
    transfer_port: int
    supervisor: str | None = None          # its URL
    generation: int = 0
    phase: str = ""
    reason: str = ""                       # why it is not up
    cause: str | None = None               # an ID of errors.py
    change: str = ""                       # what to change
    runbook: str = ""
    retry_after_seconds: int | None = None
    longest_prompt_tokens: int | None = None
    chunk_tokens: int | None = None        # the largest chunk of its prefill
    drains: bool = False                   # it is being ended on request and still serves what it has
    shed: Shed | None = None               # what it refuses while memory is short
    aborts: int = 0                        # how often its largest prefill was to be ended, in this generation
    abort_why: str = ""

    @property
    def up(self) -> bool:
        """As its supervisor sees it; without one it is for the probes to say."""
        return self.supervisor is None or self.phase == "up"

    @property
    def running(self) -> bool:
        """Whether requests that it has may end well."""
        return self.up or self.phase == "draining" or self.drains


@dataclass(frozen=True, slots=True)
class Route:
    """Where one try of a request goes: a worker alone, or a pair (`prefill` first)."""
    worker: Peer
    prefill: Peer | None = None

    @property
    def peers(self) -> tuple[Peer, ...]:
        return (self.worker,) if self.prefill is None else (self.prefill, self.worker)


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a supervisor says of a worker at this moment: GET /workers/NAME/pulse. Ages in seconds."""
    generation: int
    stopped: bool                          # a process of its tree is in state T
    beat_age_seconds: float | None         # of the engine's own loop, the oldest of its ranks; None: no rank beats
    longest_step_seconds: float | None     # prefill steps so far
    cpu_seconds: float | None              # of the whole tree


class LegFailed(Exception):
    """One leg of a request failed at `peer`. `answer`: what a busy engine said, to be handed on."""

    def __init__(self, kind: Failure, peer: Peer, sentence: str, answer: Answered | None = None) -> None:
        super().__init__(f"{peer.id} ({peer.role}): {sentence}")
        self.kind, self.peer, self.sentence, self.answer = kind, peer, sentence, answer


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer of an engine."""
    status: int
    headers: Mapping[str, str]
    body: bytes
