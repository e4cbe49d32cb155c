"""Prefill and decode workers: where they listen for each other, and what their engines must be told for it. Pure."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tightrank.config import Config
from tightrank.config.flags import has
from tightrank.config.units import WILDCARDS, is_loopback
from tightrank.engines.base import Engine, Peering, Setting


@dataclass(frozen=True, slots=True)
class Told:
    """How others reach a worker, and what is added to its command line and environment, with a sentence for each."""
    address: str                   # "": not known
    host: str = ""                 # where it listens for its peers
    port: int | None = None        # None: nowhere
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tell(config: Config, index: int, engine: Engine, environment: Mapping[str, str]) -> Told:
    """`environment`: what the engine would get anyway. Raises ConfigError."""
    worker = config.workers[index]
    # An address that means all of them tells nobody which.
    address = worker.address or ("" if worker.host in WILDCARDS else worker.host)
    port = _port(config, index, engine)
    if worker.role == "both":
        return Told(address)
    host = engine.transfer_host(worker.host, address)
    if port is not None:
        _refuse_unreachable(config, index, host, address)
    if config.pd.transfer is not None and engine.transfers and config.pd.transfer not in engine.transfers:
        raise config.error("pd.transfer", f"{config.pd.transfer}: for {engine.name} it is one of "
                           f"{', '.join(engine.transfers)}; for another leave it out and write the engine's own flag in args")
    peering = Peering(worker.role, address, port, config.pd.transfer, config.pd.patience_seconds)
    ours = [setting for setting in engine.peering(peering) if not _given(config, index, setting, environment)]
    return Told(address, host, port, _flags(ours), {each.name: each.text for each in ours if not each.is_flag},
                tuple(f"{setting.name}: {setting.why}" for setting in ours))


def _port(config: Config, index: int, engine: Engine) -> int | None:
    """Where its peers ask for KV. Without a key of its own: the engine's usual port, one more for each such worker before."""
    worker, listening = config.workers[index], engine.transfer_roles
    if worker.role in listening:
        before = sum(other.role in listening for other in config.workers[:index])
        return worker.transfer_port or engine.transfer_port + before
    if worker.transfer_port is not None:
        raise config.error(f"workers[{index}].transfer_port", f"a {engine.name} worker of role {worker.role} listens for no "
                           f"peers, {' and '.join(listening)} ones do; leave it out")
    return None


def _refuse_unreachable(config: Config, index: int, host: str, address: str) -> None:
    path = f"workers[{index}]"
    if not host:
        raise config.error(f"{path}.address", "is required, since the engine tells it to its peers and host is "
                           f"{config.workers[index].host}: give the address of this host that they reach")
    if is_loopback(host) and address and not is_loopback(address):
        raise config.error(f"{path}.host", f"{host} cannot be reached at {address} ({path}.address), where its peers ask "
                           "for KV; listen there or on 0.0.0.0")


def _given(config: Config, index: int, setting: Setting, environment: Mapping[str, str]) -> bool:
    """Whether the user has set it. One place says each thing: what has a key of ours is not taken from elsewhere."""
    worker, path = config.workers[index], f"workers[{index}]"
    given = has(worker.args, setting.name) if setting.is_flag else \
        setting.name in (worker.env if setting.key else environment)
    if given and setting.key and not config.as_written:
        key = setting.key.replace("workers[]", path)
        raise config.error(f"{path}.{'args' if setting.is_flag else 'env'}", f"{setting.name} has a key of its own; use {key}")
    return given


def _flags(settings: Sequence[Setting]) -> tuple[str, ...]:
    return tuple(word for setting in settings if setting.is_flag for word in (setting.name, setting.text))
