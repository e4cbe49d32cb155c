"""The engines that can be supervised: a name -> an import string, so that only those in use are loaded."""
from __future__ import annotations

import importlib

from tightrank.adapter import wire
from tightrank.engines.base import Engine
from tightrank.records import WorkerSpec

ENGINES = {"vllm": "tightrank.engines.vllm:ENGINE", "sglang": "tightrank.engines.sglang:ENGINE",
           "atom": "tightrank.engines.atom:ENGINE"}


def get(name: str) -> Engine:
    """Raises KeyError for a name that is no engine (the configuration has refused it before)."""
    module, _, attribute = ENGINES[name].partition(":")
    found: Engine = getattr(importlib.import_module(module), attribute)
    return found


def hook_roles(spec: WorkerSpec) -> tuple[tuple[str, str, int], ...]:
    """(hook, role, processes) of every wanted hook: where it must be in force on this host."""
    counts = {expected.role: expected.least for expected in get(spec.engine).processes(spec)}
    return tuple((hook, role, counts[role])
                 for hook in spec.hooks for role in wire.HOOK_ROLES[spec.engine].get(hook, ()) if role in counts)
