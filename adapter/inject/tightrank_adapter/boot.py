"""Which engine's modules get which hook, and the ways in: sitecustomize and the engines' own plugin doors.

`start` is cheap: it looks at the run directory and leaves the rest to the import of the modules in `HOOKS`. Neither this
file nor imports.py imports `typing`: that alone takes longer than the rest of a start (scripts/bench/adapter).
"""
from __future__ import annotations

import os
import stat
import sys

from . import imports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# engine: (hook, module of the engine, function of ours that gets that module). Rows of a module run in this order.
HOOKS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "sglang": (
        ("ranks", "sglang.srt.managers.scheduler", "tightrank_adapter.sglang.ranks:scheduler"),
        ("ranks", "sglang.srt.managers.detokenizer_manager", "tightrank_adapter.sglang.ranks:detokenizer"),
        ("ranks", "sglang.srt.managers.data_parallel_controller", "tightrank_adapter.sglang.ranks:controller"),
        ("ranks", "sglang.srt.entrypoints.engine", "tightrank_adapter.sglang.ranks:main"),
        ("line", "sglang.srt.managers.scheduler", "tightrank_adapter.sglang.line:install"),
        ("indexer", "sglang.srt.layers.attention.mqa_logits_utils", "tightrank_adapter.sglang.indexer:derived"),
        ("indexer", "sglang.srt.managers.scheduler", "tightrank_adapter.sglang.indexer:install"),
        ("headroom", "sglang.srt.mem_cache.kv_cache_configurator", "tightrank_adapter.sglang.headroom:install"),
        ("empty-cache", "sglang.srt.managers.scheduler", "tightrank_adapter.sglang.empty_cache:install"),
    ),
    "vllm": (
        ("ranks", "vllm.v1.engine.utils", "tightrank_adapter.vllm.ranks:main"),
        ("ranks", "vllm.v1.engine.core", "tightrank_adapter.vllm.ranks:core"),
        ("ranks", "vllm.v1.worker.worker_base", "tightrank_adapter.vllm.ranks:worker"),
        ("ranks", "vllm.v1.worker.gpu_worker", "tightrank_adapter.vllm.steps:install"),
        ("line", "vllm.config.scheduler", "tightrank_adapter.vllm.line:install"),
        ("indexer", "vllm.v1.worker.worker_base", "tightrank_adapter.vllm.indexer:worker"),
        ("headroom", "vllm.v1.worker.gpu_worker", "tightrank_adapter.vllm.headroom:gpu"),
        ("headroom", "vllm.v1.worker.cpu_worker", "tightrank_adapter.vllm.headroom:cpu"),
        ("headroom", "vllm.v1.worker.xpu_worker", "tightrank_adapter.vllm.headroom:refuse"),
        ("empty-cache", "vllm.v1.worker.gpu_worker", "tightrank_adapter.vllm.empty_cache:install"),
        ("empty-cache", "vllm.v1.worker.xpu_worker", "tightrank_adapter.vllm.empty_cache:refuse"),
        ("heads", "vllm.v1.attention.backends.mla.rocm_aiter_mla", "tightrank_adapter.vllm.heads:install"),
        ("heads", "vllm.v1.worker.gpu_worker", "tightrank_adapter.vllm.heads:worker"),
    ),
    "atom": (
        ("ranks", "atom.model_engine.engine_core_mgr", "tightrank_adapter.atom.ranks:main"),
        ("ranks", "atom.model_engine.engine_core", "tightrank_adapter.atom.ranks:core"),
        ("ranks", "atom.model_engine.model_runner", "tightrank_adapter.atom.ranks:runner"),
        ("indexer", "atom.model_engine.model_runner", "tightrank_adapter.atom.indexer:install"),
        ("headroom", "atom.model_engine.model_runner", "tightrank_adapter.atom.headroom:install"),
        ("empty-cache", "atom.model_engine.model_runner", "tightrank_adapter.atom.empty_cache:install"),
    ),
}

_started = False


def start() -> None:
    """Installs the hooks of this run. Idempotent. Raises OSError for a run directory that is not ours alone."""
    global _started
    directory = os.environ.get("TIGHTRANK_ADAPTER")
    if _started or not directory:
        return
    _check(directory)
    _started = True
    for engine, rows in HOOKS.items():
        for hook, module, target in rows:
            imports.after_import(module, _installer(directory, engine, hook, target))


def register() -> None:
    """The engines' plugin doors (entry points sglang.srt.plugins and vllm.general_plugins) come in here."""
    start()


def _check(directory: str) -> None:
    found = os.stat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError("%s: must be a directory of user %d with mode 0700, found user %d, mode %04o"
                              % (directory, os.geteuid(), found.st_uid, stat.S_IMODE(found.st_mode)))


def _installer(directory: str, engine: str, hook: str, target: str) -> Callable[[Any], None]:
    def install(module: Any) -> None:
        try:
            from . import fault, rank
            wanted = rank.settings(directory)
            if hook not in wanted.hooks or wanted.engine != engine:  # ATOM is also a plugin of the other two
                return
        except Exception as error:  # noqa: BLE001 - without settings there is nobody to tell but stderr
            complain("hook %s: %s: %s" % (hook, type(error).__name__, error))
            return
        fault.contained(hook, target, _resolve, target)(module)

    return install


def _resolve(target: str, module: Any) -> None:
    from importlib import import_module
    name, _, function = target.partition(":")
    getattr(import_module(name), function)(module)


def complain(text: str) -> None:
    """A line on stderr, for what cannot be said otherwise; an engine may run without one."""
    try:
        sys.stderr.write("tightrank adapter: %s\n" % text)
    except (AttributeError, OSError, ValueError):  # there is none, its reader is gone, it is closed
        pass
