"""Prefill and decode workers: the ports where they look for each other. Pure."""
from __future__ import annotations

from tightrank.config import Config
from tightrank.engines.base import Engine


def transfer_port(config: Config, engine: Engine, index: int) -> int | None:
    """Where the peers of this worker ask it for KV; None: nowhere. Without a key of its own: the engine's usual port, and
    one more for each worker before it that needs one too."""
    worker = config.workers[index]
    if worker.role not in engine.transfer_roles:
        return None
    before = sum(other.role in engine.transfer_roles for other in config.workers[:index])
    return worker.transfer_port or engine.transfer_port + before
