"""What a configuration is: frozen records, and their form on disk. `keys.py` says which keys fill them.

Keys hold secrets as paths to files. Engine arguments and variables stay as given, whatever they hold: the file is 0600.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightrank.errors import ConfigError

SCHEMA = 4
AUTO = "auto"
FIRST_BUDGET = 200_000_000         # token², of the published analysis


@dataclass(frozen=True, slots=True)
class Http:
    """Where the supervisor answers. `token_file`: the token that writes need on a public address."""
    host: str
    port: int
    token_file: str | None


@dataclass(frozen=True, slots=True)
class Level:
    """When one level before the floor acts. `threshold_bytes` counts from the floor, `hysteresis_bytes` from there."""
    mode: str                      # act | dry-run | off
    threshold_bytes: int
    duration_seconds: float
    pause_seconds: float
    hysteresis_bytes: int


@dataclass(frozen=True, slots=True)
class Guard:
    """The memory floor: under `floor_bytes` of available memory all ranks are ended. `margin_bytes` lies above it."""
    floor_bytes: int
    margin_bytes: int
    priority: int
    tighten: Level
    shed: Level
    abort: Level
    stop_mode: str                 # act | dry-run: what the guard does under the floor


@dataclass(frozen=True, slots=True)
class Line:
    """The line as asked for (token², tokens). None: the plan chooses. In force when `hooks` holds "line"."""
    budget: int | str              # or AUTO
    start: int | None
    minimum: int
    maximum: int | None
    granule: int | None
    rule: str
    step: str
    context: int | None

    @property
    def first_budget(self) -> int:
        """What the engine starts with."""
        return self.budget if isinstance(self.budget, int) else self.start or FIRST_BUDGET


@dataclass(frozen=True, slots=True)
class Indexer:
    """The hook `indexer`: what the scores of an attention indexer may take at once."""
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Headroom:
    """The hook `headroom`. `reserve`: a fraction of a rank's memory, bytes (one for all ranks, or one each), or "derived"."""
    reserve: float | str | tuple[int, ...]
    pair_bytes: int


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """The hook `empty-cache`. `mark_bytes` None: the plan chooses."""
    when: str                      # never | pressure | every-chunk
    mark_bytes: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Times and counts of the worker's life."""
    drain_seconds: float
    start_stall_seconds: float
    hang_seconds: float            # 0: nothing is taken for a hang
    hang_factor: int
    hang_busy_seconds: float
    restarts: int
    backoff_first_seconds: float
    backoff_longest_seconds: float


@dataclass(frozen=True, slots=True)
class Hygiene:
    """What must be as before between two generations."""
    limit_seconds: float
    tolerance_bytes: int           # of device memory
    drop_page_cache: str           # never | weights


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine instance as asked for."""
    name: str
    role: str
    tensor_parallel: int
    pipeline_parallel: int
    devices: tuple[str, ...]
    host: str
    port: int
    args: tuple[str, ...]
    env: Mapping[str, str]
    api_key_file: str | None
    address: str | None
    transfer_port: int | None


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts that the one worker spans; no addresses: this one alone. `rank`: which of them this is, 0: the leader."""
    addresses: tuple[str, ...]
    rank: int | None               # None only without addresses
    port: int                      # on the leader, where the engine's ranks meet
    token_file: str | None
    lease_seconds: float

    @property
    def count(self) -> int:
        return max(len(self.addresses), 1)


@dataclass(frozen=True, slots=True)
class Pd:
    """How prefill and decode workers work together. `transfer` None: the engine's usual one."""
    transfer: str | None
    patience_seconds: float
    restart: str                   # one | pair


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """An engine without a supervisor. `context`: the longest request it takes, tokens; None: not known."""
    name: str
    url: str                       # http://host:port
    engine: str                    # vllm | sglang | atom
    role: str                      # both | prefill | decode
    model: str                     # served name; "": as the engine says
    transfer_port: int
    context: int | None


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway: where it listens, whom it knows, what it allows. `engine_key` is the secret itself: read where the
    gateway starts (`load_gateway`), stored nowhere."""
    host: str
    port: int
    supervisors: tuple[str, ...]   # http://host:port
    engine_key_file: str | None
    body_limit_bytes: int
    in_flight: int
    silence_seconds: float
    canary_seconds: float
    drain_seconds: float           # of limits.drain
    workers: tuple[GatewayWorker, ...]
    engine_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Config:
    """One deployment. `places` says where each key came from, for messages; `as_written`: `command` is a whole command
    line that already names model, address and parallelism (`tightrank run`)."""
    name: str
    model: str
    engine: str
    command: tuple[str, ...]
    served_model: str | None
    state_directory: str
    hooks: tuple[str, ...]
    observe: tuple[str, ...]
    on_failed: str                 # hold | exit
    http: Http
    guard: Guard
    line: Line
    indexer: Indexer
    headroom: Headroom
    empty_cache: EmptyCache
    limits: Limits
    hygiene: Hygiene
    nodes: Nodes
    pd: Pd
    gateway: Gateway
    workers: tuple[Worker, ...]
    as_written: bool = False
    places: Mapping[str, str] = field(default_factory=dict)

    def error(self, key: str, sentence: str, cause: str = "config-invalid") -> ConfigError:
        """The one-line error of a key: place, key, what is wrong and what to do."""
        return ConfigError(f"{self.places.get(key, 'default')}: {key}: {sentence}", cause=cause)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Raises ConfigError when `text` is not what `to_json` of this version writes."""
        try:
            values = json.loads(text)
            if values.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            return cls(**{name: _restore(name, value) for name, value in values.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"stored configuration: of another version ({error}); `tightrank up` it again") from None


_SECTIONS = {"http": Http, "line": Line, "indexer": Indexer, "headroom": Headroom, "empty_cache": EmptyCache,
             "limits": Limits, "hygiene": Hygiene, "nodes": Nodes, "pd": Pd}


def _restore(name: str, value: Any) -> Any:
    if name == "workers":
        return tuple(Worker(**_tuples(worker)) for worker in value)
    if name == "gateway":
        return Gateway(**{**_tuples(value), "workers": tuple(GatewayWorker(**worker) for worker in value["workers"])})
    if name == "guard":
        return Guard(**{**value, **{level: Level(**value[level]) for level in ("tighten", "shed", "abort")}})
    if name in _SECTIONS:
        return _SECTIONS[name](**_tuples(value))
    return tuple(value) if isinstance(value, list) else value


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
