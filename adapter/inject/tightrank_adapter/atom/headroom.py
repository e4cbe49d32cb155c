"""Hook `headroom` on ATOM: what a runner takes off its budget for the KV cache, so that the tightest rank decides for all.

`ModelRunner.get_num_blocks` runs on every rank, and only rank 0's answer reaches the engine core, which gives it to all
(atom/model_engine/async_proc.py): so the ranks must agree inside it. Its sum, in v0.1.2 to 2026-08-22:

    budget = int(total * utilization) - peak of torch [- what is held outside torch] - graphs - 2 % [- extra reserve]
    available = min(budget, free)

The parts in brackets came on 2026-07-21 and 07-23. The extra reserve is ATOM's own place for such a thing; before it there
was only the estimate for graphs, which is asked nowhere else. What we take off there is nothing where the rank's own number
is the smallest of all and holds the headroom already.

The ranks are those of a pipeline stage; ATOM takes the smallest block count over the stages itself.
"""
import functools
import inspect
from importlib import import_module
from typing import Any, Callable, NamedTuple, Optional, Sequence

from .. import fault, headroom, rank, sizing, wire
from . import ranks

HOOK = sizing.HOOK
SIZING, ESTIMATE, RESERVE = "get_num_blocks", "_estimate_cudagraph_overhead", "_kv_budget_extra_reserve"
WHERE = "ModelRunner." + SIZING
_SAFETY = 0.02  # of the device's memory
_NAMES = ("mem_get_info", "memory_stats", "gpu_memory_utilization", ESTIMATE)


class _Budget(NamedTuple):
    """What ATOM itself comes to: before the clamp to what is free, and after it. Bytes."""
    unclamped: int
    own: int


class _Sizing:
    """One call of `get_num_blocks`."""

    def __init__(self, runner: Any, outside: bool) -> None:
        self.runner, self.outside = runner, outside
        self.graph_bytes = 0
        self.entered = False
        number = rank.number()
        self.number: int = runner.rank if number is None else number

    def agree(self, own: Callable[[], int]) -> int:
        self.entered = True
        return sizing.agree(own, self.number, _gather, WHERE, lambda: self.graph_bytes)

    def cut_bytes(self, reserved_bytes: int) -> int:
        """What is to come off the budget. Raises sizing.HeadroomError, on all ranks alike."""
        failed = _Budget(headroom.FAILED, headroom.FAILED)
        found = fault.tried(HOOK, WHERE, self._budget, failed, True, reserved_bytes)
        agreed = self.agree(lambda: found.own)
        return 0 if agreed >= found.own else found.unclamped - agreed

    def _budget(self, reserved_bytes: int) -> _Budget:
        cuda = import_module("torch").cuda
        free, total = cuda.mem_get_info()
        stats = cuda.memory_stats()
        held = max(stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]) + self.graph_bytes
        if self.outside:
            held += max(total - free - cuda.memory_reserved(), 0)
        left = int(total * self.runner.config.gpu_memory_utilization) - held - int(total * _SAFETY) - reserved_bytes
        return _Budget(left, min(left, free))


_now: Optional[_Sizing] = None  # a runner sizes in one thread


def install(module: Any) -> None:
    """Gets atom.model_engine.model_runner. Raises fault.Missing for a release whose sum is another one."""
    owner = fault.require(module, "ModelRunner", ranks.release())
    code = inspect.unwrap(fault.require(owner, SIZING, ranks.release())).__code__
    _check(code)
    _surround_sizing(owner, "memory_reserved" in code.co_names)
    if RESERVE in code.co_names:
        _add(owner, ESTIMATE, _note_graphs)
        _add(owner, RESERVE, _Sizing.cut_bytes)
    else:
        _add(owner, ESTIMATE, _cut_at_graphs)


def _check(code: Any) -> None:
    missing = [name for name in _NAMES if name not in code.co_names]
    if missing or _SAFETY not in code.co_consts:
        raise fault.Missing("%s with %s" % (WHERE, missing[0] if missing else "a margin of %g" % _SAFETY),
                            "another sum in %s" % ranks.release())


def _note_graphs(sizing_now: _Sizing, graph_bytes: int) -> int:
    sizing_now.graph_bytes = graph_bytes
    return 0


def _cut_at_graphs(sizing_now: _Sizing, graph_bytes: int) -> int:
    sizing_now.graph_bytes = graph_bytes
    return sizing_now.cut_bytes(0)


def _add(owner: Any, name: str, more: Callable[[_Sizing, int], int]) -> None:
    """Adds to the bytes that `owner.name` answers, while a runner sizes. fault.wrap would keep the ranks' error from it."""
    original = fault.require(owner, name, ranks.release())

    @functools.wraps(original)
    def added(*args: Any, **kwargs: Any) -> int:
        answer = original(*args, **kwargs)
        return int(answer + more(_now, answer)) if _now is not None else answer

    added.__tightrank__ = HOOK  # type: ignore[attr-defined]
    setattr(owner, name, added)


def _surround_sizing(owner: Any, outside: bool) -> None:
    """A rank that fails before the ranks have agreed tells the others, who wait for it."""
    original = getattr(owner, SIZING)

    @functools.wraps(original)
    def sized(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _now
        mine = _now = _Sizing(self, outside)
        raised = True
        try:
            answer = original(self, *args, **kwargs)
            raised = False
        finally:
            _now = None
            if raised and not mine.entered:  # no collective of ATOM's comes before ours
                fault.tried(HOOK, WHERE, _gather, None, False, sizing.absent(mine.number))
        if not mine.entered:
            rank.hook(HOOK, wire.FAILED, "%s asking %s" % (WHERE, RESERVE), "it did not in %s" % type(self).__qualname__)
        return answer

    sized.__tightrank__ = HOOK  # type: ignore[attr-defined]
    setattr(owner, SIZING, sized)


def _gather(row: sizing.Row) -> Sequence[sizing.Row]:
    """`row` of every rank of the stage, over the CPU group that the engine made for such things."""
    torch = import_module("torch")
    group = import_module("aiter.dist.parallel_state").get_tp_group().cpu_group
    size = torch.distributed.get_world_size(group)
    # the default device is the rank's own while it sizes
    rows = [torch.zeros(len(row), dtype=torch.int64, device="cpu") for _ in range(size)]
    torch.distributed.all_gather(rows, torch.tensor(row, dtype=torch.int64, device="cpu"), group=group)
    return [each.tolist() for each in rows]
