"""Hook `indexer` for SGLang >= 0.5.20: the bytes that a sparse-attention indexer may use for its scores at a time.

Three mechanisms, each told by what a release has. Module globals that are read at every call (one of them made from an
environment variable at import) get the budget as it was asked for. The functions that derive a budget from free memory
answer at most that, and on a device that uses the host's memory they count available memory, not MemFree. The dictionary
of the class Indexer, which keeps what was derived once, is lowered after the model is loaded.

`_SM120_INDEXER_M_CHUNK` and `_PREFILL_GRAPH_INDEXER_ROW_CHUNK` are left alone: they count rows that a kernel or a graph
can take, not bytes. No collective lies within the pieces, so ranks may differ in them.
"""
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .. import fault, imports, memory, rank, wire
from .. import indexer as arithmetic

HOOK = "indexer"
_ATTENTION = "sglang.srt.layers.attention."
_DERIVED = ("mqa_logits_budget_bytes", "mqa_logits_static_budget_bytes")
_CLASS_MODULE = _ATTENTION + "dsa.dsa_indexer"

# Where budgets are globals that are read at every call. The last three are those of branches before their release.
MODULES = (
    _ATTENTION + "dsv4.v41_indexer.scoring",
    _ATTENTION + "dsv4.low_ratio_backend_hip",
    _ATTENTION + "qsa.qsa_indexer",
    "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip",
    _ATTENTION + "deepseek_v4_backend",
    _ATTENTION + "dsv4.low_ratio_backend",
    _ATTENTION + "dsv4.dense_prefill_indexer",
)
# name -> bytes of its unit
NAMES: Dict[str, int] = {
    "_TORCH_SCORE_BUDGET_BYTES": 1,
    "_DEEP_GEMM_SCORE_BUDGET_BYTES": 1,
    "_CANDIDATE_SCORE_BUDGET_BYTES": 1,
    "_QSA_PREFILL_LOGITS_BUDGET_BYTES": 1,
    "_TORCH_INDEXER_SCORE_BUDGET_BYTES": 1,
    "_DENSE_INDEXER_LOGITS_BUDGET_BYTES": 1,
    "_SCORE_BUDGET_BYTES": 1,
    "_LOGITS_BUDGET_ELEMS": 4,  # fp32, from SGLANG_DSV4_FP4_LOGITS_BUDGET_MB at import
}


class _Global(NamedTuple):
    """A budget that is a global of an engine's module; `value` is what we set it to, in its own unit."""
    module: Any
    name: str
    value: int

    @property
    def path(self) -> str:
        return "%s.%s" % (self.module.__name__, self.name)

    def read(self, observed: bool) -> int:
        """What is there now. Raises fault.Missing when that is not ours, unless it is only observed."""
        found: int = getattr(self.module, self.name)
        if found != self.value and not observed:
            raise fault.Missing("%s = %d" % (self.path, self.value), "%d" % found)
        return found


_globals: List[_Global] = []
_complete = False  # the scheduler is: from here on the budgets are facts of its hello


def _wanted_bytes() -> int:
    return int(rank.settings().hooks[HOOK]["budget_bytes"])


def derived(module: Any) -> None:
    """Gets sglang.srt.layers.attention.mqa_logits_utils (0.5.21 on). Raises fault.Missing for a release without its parts."""
    if rank.settings().observes(HOOK):
        return
    lowered = _lowered(fault.require(module, _DERIVED[0]), fault.require(module, "mqa_logits_free_mem_fraction"))
    _wrap(module, _DERIVED[0], lowered)
    _wrap(module, _DERIVED[1], lambda token, own, **kwargs: fault.Answer(min(own, _wanted_bytes())))


def _wrap(module: Any, name: str, after: Any) -> None:
    """Also where the function was taken over by name before: SGLang's plugin door opens when its modules are loaded."""
    original = fault.require(module, name)
    fault.wrap(module, name, HOOK, after=after)
    for path, other in list(sys.modules.items()):
        if path.startswith(_ATTENTION) and vars(other).get(name) is original:
            setattr(other, name, getattr(module, name))


def _lowered(original: Any, fraction: Any) -> Any:
    def after(token: None, own: int, *, device_index: int, allow_sync: bool) -> fault.Answer:
        """`allow_sync` False, under graph capture, is the engine's budget without free memory."""
        found = memory.rank_memory(rank.settings().hooks[HOOK].get("ranks", 1)) if allow_sync else None
        if found is None or not found.shared:
            return fault.Answer(min(own, _wanted_bytes()))
        fixed = original(device_index=device_index, allow_sync=False)
        return fault.Answer(arithmetic.derived_budget_bytes(_wanted_bytes(), fixed, fraction(), found.free_bytes))

    return after


def install(module: Any) -> None:
    """Gets sglang.srt.managers.scheduler. Raises fault.Missing for a release without what is hooked."""
    scheduler = fault.require(module, "Scheduler")
    for name in MODULES:
        imports.after_import(name, fault.contained(HOOK, name, fault.drilled(name, _set_globals)))
    finish = fault.contained(HOOK, "Scheduler.__init__", fault.drilled("indexer.finish", _finish))
    fault.wrap(scheduler, "__init__", HOOK, after=lambda token, result, self, *args, **kwargs: finish(self))


def _set_globals(module: Any) -> None:
    found = [_Global(module, name, max(1, _wanted_bytes() // unit)) for name, unit in NAMES.items()
             if type(vars(module).get(name)) is int]
    if not rank.settings().observes(HOOK):
        for each in found:
            _set(each)
    _globals.extend(found)
    if _complete:  # a module that is imported at the first prefill
        _tell()


def _set(each: _Global) -> None:
    if getattr(each.module, "_LOGITS_POOL", None):  # the block has its size already, and slices of it are taken by this
        raise fault.Missing("%s set before its first use" % each.path, "a block in _LOGITS_POOL")
    setattr(each.module, each.name, each.value)


def _finish(scheduler: Any) -> None:
    """The model is loaded, its KV cache allocated; no request has been served."""
    global _complete
    runner = scheduler.tp_worker.model_runner
    _pin(runner.gpu_id)
    found = budgets()
    if not found:
        raise fault.Missing("one of %s" % ", ".join((*NAMES, *_DERIVED)), "none of them in %s" % fault.engine_release())
    # SGLang imports the modules of all models in each scheduler: a name that is there need not be one that is read.
    if not arithmetic.has_indexer(fault.require(runner, "model")):
        names = sorted({path.rpartition(".")[2] for path in found})
        raise fault.Missing("a model with an indexer, which reads %s" % ", ".join(names),
                            "%s has none" % type(runner.model).__name__)
    _complete = True
    _tell()
    rank.hook(HOOK, wire.IN_FORCE)


def _pin(device: int) -> None:
    """Lowers what the class Indexer keeps for `device`, where it has such a dictionary and there is a GPU.

    The engine's own getter fills it first, so that 0.5.20, which derives in there, is only ever lowered.
    """
    owner, kept = _class_budgets()
    if memory.device() is None or kept is None or rank.settings().observes(HOOK):
        return
    own = fault.require(owner, "_get_mqa_logits_budget_bytes")(owner, device)  # of its object it reads the class alone
    kept[device] = min(int(own), _wanted_bytes())


def _class_budgets() -> Tuple[Any, Optional[Dict[int, int]]]:
    owner = getattr(sys.modules.get(_CLASS_MODULE), "Indexer", None)
    kept = getattr(owner, "_mqa_logits_budget_bytes", None)
    return owner, kept if isinstance(kept, dict) else None


def budgets() -> Dict[str, int]:
    """Bytes of each budget of this process by its path, as read now; of a derived one, the most that it can be.

    Raises fault.Missing for one that should have been set and reads otherwise.
    """
    observed = rank.settings().observes(HOOK)
    found = {each.path: each.read(observed) * NAMES[each.name] for each in _globals}
    if not observed:
        found.update(_derived_budgets())
    _, kept = _class_budgets()
    for device, value in (kept or {}).items():
        if value > _wanted_bytes() and not observed:
            raise fault.Missing("Indexer._mqa_logits_budget_bytes[%d] <= %d" % (device, _wanted_bytes()), "%d" % value)
        found["%s.Indexer._mqa_logits_budget_bytes[%d]" % (_CLASS_MODULE, device)] = value
    return found


def _derived_budgets() -> Dict[str, int]:
    """The modules that hold a derived budget's function by name must hold the one with the hook."""
    found = {}
    for path, module in list(sys.modules.items()):
        for name in _DERIVED if path.startswith(_ATTENTION) else ():
            function = vars(module).get(name)
            if function is not None and not fault.is_wrapped(function, HOOK):
                raise fault.Missing("%s.%s with the hook" % (path, name), "taken over before it")
            if function is not None:
                found["%s.%s" % (function.__module__, name)] = _wanted_bytes()
    return found


def _tell() -> None:
    rank.fact(HOOK, budgets())
    if rank.settings().observes(HOOK):
        rank.fact("indexer_wanted", {each.path: each.value * NAMES[each.name] for each in _globals})
