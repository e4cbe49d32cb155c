"""What an engine must tell us. Its answers are strings and small records; nothing here does any work."""
from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tightrank.config import Worker
from tightrank.config.flags import FLAGS, value
from tightrank.config.units import local_url
from tightrank.records import StartStep, WorkerSpec

LEAST_GRANULE = 64   # slivers can end an engine: IndexError in vLLM 0.32's CPU indexer at a chunk under 4 tokens
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Probe:
    """One HTTP request of ours to an engine. `headers` may hold its API key. Success is status 200."""
    method: str
    url: str
    headers: Mapping[str, str]
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """How many processes of a role a whole worker has: at least `least`, at most `most`."""
    role: str
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Place:
    """Which of several hosts this is, and where all their ranks meet. `rank` 0: the leader, which serves the API."""
    rank: int
    count: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What the plan wants from an engine's command line. None: leave it to the engine. Tokens and seconds."""
    worker: Worker
    model: str
    served_model: str | None
    as_written: bool                   # the command line names model, address and parallelism already
    command: tuple[str, ...]
    maximum: int | None                # largest chunk
    context: int | None                # largest length, where it must be set
    drain_seconds: float
    hooks: tuple[str, ...]
    place: Place | None = None         # None: one host


@dataclass(frozen=True, slots=True)
class Peering:
    """What a prefill or decode worker is to know of its peers."""
    role: str
    address: str                       # how they reach it; "": not known
    port: int | None                   # where they ask it for KV; None: nowhere
    transfer: str | None               # what carries the KV, as asked for; None: the engine's usual one
    patience_seconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag or a variable of the engine and why we set it, unless the user did. `key`: the key of ours that alone says it."""
    name: str
    text: str
    why: str
    key: str = ""

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("--")


class Engine(Protocol):
    """An engine's answers. `args` are always the user's own arguments for it."""

    name: str
    distribution: str                          # of its Python package
    releases: Mapping[str, tuple[int, ...]]    # hook -> first release whose hook points we know; without it there is none
    namesake: tuple[str, str]                  # a file of its package, and what the package is that has its name and not that
    plugins_variable: str                      # whitelist of plugins; ours must be on it when it is set
    transfer_roles: tuple[str, ...]            # roles that listen for their peers
    transfer_port: int                         # where the first of them does
    transfers: tuple[str, ...]                 # what may carry KV; empty: the engine knows
    address_variable: str                      # where its ranks are reached by those of other hosts; "": it runs on one host
    whole_steps: bool                          # on a device its step records end with the result, else with the last launch

    def transfer_host(self, host: str, address: str) -> str:
        """Where a worker that serves on `host` and is reached at `address` listens for its peers."""
        ...

    def peering(self, peering: Peering) -> tuple[Setting, ...]:
        """What a prefill or decode worker must be told."""
        ...

    def arguments(self, wish: Wish) -> tuple[str, ...]:
        """All arguments of ours: what a command line needs to be whole, then what we set on purpose."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Variables that we set unless the user did, each with its reason in the source."""
        ...

    def score_variables(self, budget_bytes: int) -> Mapping[str, str]:
        """Variables that bound what an attention indexer's scores take at once; whole MiB."""
        ...

    def refusal(self, worker: Worker, hooks: Sequence[str]) -> str | None:
        """Why these arguments cannot be supervised (a sentence that says what to change), or None."""
        ...

    def own_context(self, model: Mapping[str, Any]) -> int:
        """The longest request (tokens) that the engine derives from the model's config.json by itself."""
        ...

    def granule(self, args: Sequence[str], model: Mapping[str, Any]) -> int:
        """Chunks should be multiples of this (tokens), as far as can be told before the engine runs."""
        ...

    def start_step(self, text: str) -> StartStep | None:
        """The step of a start that a line of output announces; None: it announces none."""
        ...

    def processes(self, spec: WorkerSpec) -> tuple[Expected, ...]:
        """The processes, by the role in their hello, that a whole worker has on this host."""
        ...

    def health(self, spec: WorkerSpec) -> Probe: ...

    def canary(self, spec: WorkerSpec) -> Probe:
        """A real request of a few tokens, answerable by this role alone."""
        ...

    def budget(self, spec: WorkerSpec, budget: int) -> Probe | None:
        """The control request that tells all ranks a new line budget (token²); None: the control page is read."""
        ...


def url(spec: WorkerSpec, path: str) -> str:
    """A URL at the engine, reached from this host."""
    return local_url(spec.host, spec.port) + path


def is_address(text: str) -> bool:
    """Whether `text` is a numeric address."""
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def authorization(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def match_step(patterns: Sequence[tuple[StartStep, re.Pattern[str]]], text: str) -> StartStep | None:
    return next((step for step, pattern in patterns if pattern.search(text)), None)


def number(engine: str, args: Sequence[str], flag: str) -> int | None:
    """The whole number that `flag` (a name of `config.flags`) has in `args`; None when it is not there.

    Reads what both parsers read: 2048, 2k (2000), 2K (2048), -1, auto (-1). Raises ValueError otherwise.
    """
    text = value(args, *FLAGS[engine][flag])
    if text is None:
        return None
    if text.lower() == "auto":
        return -1
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([kmgtKMGT])", text)
    return int(float(match[1]) * _SUFFIXES[match[2]]) if match else int(text)


def sections(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model (multimodal models nest it)."""
    nested = model.get("text_config")
    return {**model, **nested} if isinstance(nested, Mapping) else model


def given(flag: str, value: str | int | None, unless: str | int | None = None) -> tuple[str, ...]:
    """`flag value`, or nothing when the value is the engine's own default anyway."""
    return () if value is None or value == unless else (flag, str(value))
