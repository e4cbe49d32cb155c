"""How a worker is to be started: what the plan hands to the launch."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LineSpec:
    """The line of one worker: `budget` and `floor_budget` in token², the rest in tokens (see adapter line.py)."""
    budget: int
    floor_budget: int              # minimum x context: `tighten` never goes below it
    minimum: int
    maximum: int
    granule: int
    rule: str = "span"
    step: str = "granule"
    auto: bool = False             # `budget` is where it starts
    assumed_pair_bytes: int = 0    # auto: bytes for each (row, key) until steps have told; 0: the start was given, and stays

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `line.chunk_tokens`."""
        return {"minimum": self.minimum, "maximum": self.maximum, "granule": self.granule,
                "rule": self.rule, "step": self.step}


@dataclass(frozen=True, slots=True)
class ChunkBand:
    """One row of the chunk schedule: prefixes in [from_tokens, to_tokens] take chunks of `chunk_tokens` (0: none fits)."""
    from_tokens: int
    to_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How one worker is started; pure output of the plan. `argv` and `env` are those of the engine, ours included.

    `env` holds only what we set or change; launch lays it over the supervisor's environment less TIGHTRANK_*. Values may
    hold secrets: they go to the engine and nowhere else. `generation` and `run_directory` are filled in for each start
    (`for_generation` in plan.py).
    """
    name: str
    engine: str                    # vllm | sglang | atom
    role: str                      # both | prefill | decode
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str                      # where the engine listens
    port: int
    model: str                     # path of the model
    served_model: str              # the name a request must give
    tensor_parallel: int
    pipeline_parallel: int
    devices: tuple[str, ...]
    hooks: Mapping[str, Mapping[str, Any]]     # those wanted, each with its values as wire.Settings has them
    line: LineSpec | None
    context_tokens: int | None     # the engine's maximum length as we cap it; None: the engine's own choice
    schedule: tuple[ChunkBand, ...]
    drain_seconds: float
    start_stall_seconds: float     # a start without any progress for this long has stalled
    address: str = ""              # how other machines reach it; "": not known
    transfer_host: str = ""        # where it listens for its peers
    transfer_port: int | None = None    # None: nowhere
    api_key: str | None = None     # the engine's own, for our canary
    predicted: Mapping[str, float] = field(default_factory=dict)     # terms of calibration.py that the plan computes
    node: int = 0                  # of `nodes` hosts that its ranks are spread over; 0: the leader
    nodes: int = 1
    meeting: tuple[str, int] | None = None     # where the ranks of several hosts meet, on the leader; None: nowhere here
    notes: tuple[str, ...] = ()    # sentences for `tightrank plan`: what we set and why
    generation: int = 0
    run_directory: str = ""

    @property
    def ranks_here(self) -> int:
        """How many of its ranks run on this host."""
        return self.tensor_parallel * self.pipeline_parallel // self.nodes

    def sockets(self) -> tuple[tuple[str, str, int], ...]:
        """(key, host, port) of all its listening sockets that we name; keys without a dot are those of the worker."""
        transfer = () if self.transfer_port is None else (("transfer_port", self.transfer_host, self.transfer_port),)
        meeting = () if self.meeting is None else (("nodes.port", *self.meeting),)
        return (("port", self.host, self.port), *transfer, *meeting)

    def listens(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of them."""
        return tuple((host, port) for _, host, port in self.sockets())
