"""Calls back once a named module has been imported. The only code that touches sys.meta_path.

The module's own loader does the work and stays in its place, so inspect.getsource, pickling by name and __spec__ see
nothing of us: for one import, `exec_module` is shadowed on the loader's instance.
"""
from __future__ import annotations

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_waiting: dict[str, list[Callable[[Any], None]]] = {}


class _Finder:
    """Finds what the finders after it find, and shadows the loader of a module that somebody waits for."""

    def __init__(self) -> None:
        self._searching: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        key = (get_ident(), name)
        if name not in _waiting or key in self._searching:  # the second: another finder like this one asks us back
            return None
        self._searching.add(key)
        try:
            spec = self._search(name, path, target)
        finally:
            self._searching.discard(key)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _shadow(spec.loader, name)
        return spec

    def _search(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return spec
        return None


_finder = _Finder()


def _shadow(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        loader.__dict__.pop("exec_module", None)
        execute(module)
        _fire(name, module)

    loader.exec_module = exec_module


def _fire(name: str, module: Any) -> None:
    for callback in _waiting.pop(name, ()):
        callback(module)


def after_import(name: str, callback: Callable[[Any], None]) -> None:
    """Calls `callback(module)` once, right after `name` was executed; at once when it already was.

    `callback` must not raise (`fault.contained` makes such a one): what it raises would break the engine's import.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        callback(module)
        return
    _waiting.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
