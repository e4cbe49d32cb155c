"""The two modules that engine and supervisor share, `line` and `wire`, loaded by path, and where the adapter lies.

`adapter/inject` must never be on the supervisor's own import path: its sitecustomize and entry points are for
engines. So the files are loaded by path, from the wheel (`tightrank/inject`) or the checkout (`adapter/inject`).
"""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

_HERE = Path(__file__).resolve().parent


def _find() -> Path:
    """The directory that goes on an engine's PYTHONPATH. Raises ImportError when the installation is not whole."""
    candidates = (_HERE / "inject", _HERE.parent.parent / "adapter" / "inject")
    for candidate in candidates:
        if (candidate / "tightrank_adapter" / "wire.py").is_file():
            return candidate
    raise ImportError(f"the adapter is in none of {', '.join(map(str, candidates))}; install tightrank again")


def _load(name: str) -> ModuleType:
    full_name = f"tightrank._adapter_{name}"
    spec = importlib.util.spec_from_file_location(full_name, INJECT / "tightrank_adapter" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


INJECT = _find()

if TYPE_CHECKING:
    from tightrank_adapter import line, wire
else:
    line, wire = _load("line"), _load("wire")

__all__ = ["INJECT", "line", "wire"]
