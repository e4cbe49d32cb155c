"""The engines that can be supervised: a name -> an import string, so that only those in use are loaded."""
from __future__ import annotations

import importlib

from tightrank.engines.base import Engine

ENGINES = {"vllm": "tightrank.engines.vllm:ENGINE", "sglang": "tightrank.engines.sglang:ENGINE",
           "atom": "tightrank.engines.atom:ENGINE"}


def get(name: str) -> Engine:
    """Raises KeyError for a name that is no engine (the configuration has refused it before)."""
    module, _, attribute = ENGINES[name].partition(":")
    found: Engine = getattr(importlib.import_module(module), attribute)
    return found
