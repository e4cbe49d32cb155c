"""The modules that engine and supervisor share, loaded by path, and where the adapter lies.

`adapter/inject` must never be on the supervisor's own import path: its sitecustomize and entry points are for
engines. So the adapter's folder becomes a package of ours, from the wheel (`tightrank/inject`) or the checkout
(`adapter/inject`). What is loaded of it imports the standard library and its neighbours here, and nothing else.
"""
from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

_HERE = Path(__file__).resolve().parent
_PACKAGE = "tightrank._adapter"


def _find() -> Path:
    """The directory that goes on an engine's PYTHONPATH. Raises ImportError when the installation is not whole."""
    candidates = (_HERE / "inject", _HERE.parent.parent / "adapter" / "inject")
    for candidate in candidates:
        if (candidate / "tightrank_adapter" / "wire.py").is_file():
            return candidate
    raise ImportError(f"the adapter is in none of {', '.join(map(str, candidates))}; install tightrank again")


INJECT = _find()

if TYPE_CHECKING:
    from tightrank_adapter import headroom, heads, indexer, line, memory, pages, wire
else:
    _package = module_from_spec(ModuleSpec(_PACKAGE, None, is_package=True))
    _package.__path__ = [str(INJECT / "tightrank_adapter")]
    sys.modules[_PACKAGE] = _package
    headroom, heads, indexer, line, memory, pages, wire = (import_module(f"{_PACKAGE}.{name}")
                                           for name in ("headroom", "heads", "indexer", "line", "memory", "pages", "wire"))

__all__ = ["INJECT", "headroom", "heads", "indexer", "line", "memory", "pages", "wire"]
