"""This process as the supervisor sees it: its hello, beat page and records.

Nothing leaves before `hello`; hook states and facts told earlier are kept and go out with it. A forked child is nobody
until it says hello itself.
"""
import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, Optional

from . import boot, pages, peak, stacks, wire

_settings: Optional[wire.Settings] = None
_directory = ""
_me: Optional["_Process"] = None
_hooks: Dict[str, Dict[str, str]] = {}
_facts: Dict[str, Any] = {}
_FAULTS_KEPT, _COUNT_SECONDS = 8, 1.0
_counted = -_COUNT_SECONDS
_PR_SET_PDEATHSIG = 1


class _Process:
    """What this process holds open once it said hello."""

    def __init__(self, identity: Dict[str, Any]) -> None:
        self.pid = os.getpid()
        self.identity = identity
        self.sender = wire.Sender(_directory)
        self.page = pages.BeatWriter(_directory)
        self.sequence = 0
        stacks.arm(_directory)


def settings(directory: str = "") -> wire.Settings:
    """The settings of this generation, read once. Raises OSError or wire.WireError."""
    global _settings, _directory
    if _settings is None:
        _directory = directory or os.environ[wire.ENV_ADAPTER]
        _settings = wire.read_settings(_directory)
    return _settings


def directory() -> str:
    """The run directory of this generation."""
    return _directory


def number() -> Optional[int]:
    """This process's rank, or None before hello and for processes that have none."""
    me = _mine()
    return me.identity["rank"] if me is not None else None


def said_hello() -> bool:
    return _mine() is not None


def _mine() -> Optional[_Process]:
    return _me


def _forget() -> None:
    global _me
    _me = None


os.register_at_fork(after_in_child=_forget)  # a forked child is another process; asking for the pid each time is a system call


def hello(role: str, rank: Optional[int] = None, tp_rank: Optional[int] = None, pp_rank: Optional[int] = None,
          dp_rank: Optional[int] = None, device: Optional[str] = None, engine_version: str = "") -> None:
    """Says who this process is; `role` as in wire.HOOK_ROLES. Once per process: a second call changes the identity.

    Every role but "main" dies with its parent from here on. Raises OSError when the run directory cannot be written.
    """
    global _me
    identity = {"role": role, "rank": rank, "tp_rank": tp_rank, "pp_rank": pp_rank, "dp_rank": dp_rank,
                "device": device, "engine_version": engine_version}
    me = _mine()
    if me is not None:
        me.identity = identity
    else:
        settings()
        _me = _Process(identity)
        if role != "main":
            _die_with_parent()
    _write()


def locate(index: int) -> None:
    """This rank computes on CUDA or ROCm device `index`, as this process numbers them (known only once it is bound).

    The fact "memory_shared": the device computes in the host's memory, which the guard's floor is of.
    """
    me = _mine()
    if me is not None:
        me.identity["device"] = device_pci_id(index)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            _facts["memory_shared"] = bool(getattr(torch.cuda.get_device_properties(index), "is_integrated", False))
        _write()


def weights(measured: Any, unit_bytes: int = 1) -> None:
    """The fact "weights_bytes": what the engine saw go from this rank's device as the model was loaded. Not told where that is
    the host's memory, which others take and give back meanwhile, nor where `measured` is no such number."""
    me = _mine()
    own = me is not None and me.identity.get("device") is not None and not _facts.get("memory_shared")
    if own and type(measured) in (int, float) and 0 < measured < float("inf"):
        fact("weights_bytes", int(measured * unit_bytes))


def hook(name: str, state: str, wanted: str = "", found: str = "") -> None:
    """The state of a hook in this process (wire.IN_FORCE ...); FAILED stays, and so does DEGRADED but for FAILED.

    Observed hooks are never in force.
    """
    if state == wire.IN_FORCE and settings().observes(name):
        state = wire.OBSERVING
    before = _hooks.get(name, {}).get("state")
    if before != wire.FAILED and (before != wire.DEGRADED or state == wire.FAILED):
        _hooks[name] = {"state": state, "wanted": wanted, "found": found}
        _write()


def fact(name: str, value: Any) -> None:
    """A small measured fact for the hello. Raises TypeError for what JSON cannot hold: it would spoil all later hellos."""
    if _facts.get(name) != value:
        json.dumps(value)
        _facts[name] = value
        _write()


def count(name: str, value: int) -> None:
    """A counter for the hello, which is written at most once a second for it: the last values may be missing there."""
    global _counted
    _facts[name] = value
    now = time.monotonic()
    if now - _counted >= _COUNT_SECONDS:
        _counted = now
        _write()


def beat(in_flight: Optional[int] = None) -> None:
    """The engine's own loop turned. `in_flight`: requests in this engine, None keeps the last number."""
    me = _mine()
    if me is not None:
        if in_flight is not None:
            me.page.in_flight = in_flight
        me.page.beat()


def watches_memory() -> bool:
    """Whether steps tell the memory that they began with: the line's budget is derived from it."""
    return bool(settings().hooks.get("ranks", {}).get(wire.PEAKS))


def starts(chunks: List[List[int]]) -> peak.Rest:
    """A prefill step of these chunks begins: a new peak. The beat page tells how long it may take."""
    peak.reset()
    rest = peak.rest() if watches_memory() else peak.NO_REST
    me = _mine()
    if me is not None:
        rows, width = sum(new for _, new in chunks), max((prefix + new for prefix, new in chunks), default=0)
        me.page.step_cost = wire.step_cost(rows, width)
        me.page.beat()
    return rest


def step(chunks: List[List[int]], budget: int, over: bool, milliseconds: float, peak_bytes: Optional[int],
         rest: peak.Rest = peak.NO_REST) -> None:
    """One prefill step: `chunks` are [prefix, new tokens] per request, `budget` is the line's (token²) at that step."""
    me = _mine()
    if me is None:
        return
    rows = sum(new for _, new in chunks)
    width = max((prefix + new for prefix, new in chunks), default=0)
    me.sequence += 1
    me.page.steps += 1
    me.page.prefill_tokens += rows
    me.sender.send(wire.Step(settings().generation, me.pid, me.sequence, me.identity["rank"] or 0, time.monotonic_ns(),
                             rows, width, budget, over, milliseconds, peak_bytes, chunks, *rest))


def fault(hook: str, where: str, error: str, replicated: bool) -> None:
    """A function of ours raised. Kept in the hello ("faults"), and sent."""
    _facts["fault_count"] = _facts.get("fault_count", 0) + 1
    faults = _facts.setdefault("faults", [])
    if len(faults) < _FAULTS_KEPT:
        faults.append({"hook": hook, "where": where, "error": error, "replicated": replicated})
        _write()
    me = _mine()
    if me is not None:
        me.sender.send(wire.Fault(settings().generation, me.pid, hook, where, error, replicated))


def _write() -> None:
    me = _mine()
    if me is None:
        return
    held = settings()
    roles = wire.HOOK_ROLES.get(held.engine, {})
    hooks = {name: _hooks.get(name, {"state": wire.WANTED, "wanted": "", "found": ""})
             for name in held.hooks if me.identity["role"] in roles.get(name, ())}
    try:
        wire.write_hello(_directory, wire.Hello(
            pid=me.pid, start_time=wire.start_time(me.pid), engine=held.engine, worker=held.worker,
            generation=held.generation, hooks=hooks, facts=_facts, **me.identity))
    except OSError as error:  # the supervisor misses it and says so; the engine must not
        boot.complain("hello not written: %s" % error)


def _die_with_parent() -> None:
    """SIGKILL for us when the parent ends. vLLM's EngineCore has no watch of its own and outlives its server."""
    import ctypes
    from multiprocessing import parent_process
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    # The second test: a process that a fork server made has that server for its parent, and `parent` only asked for it.
    if parent is not None and parent.pid != os.getppid() and not parent.is_alive():  # it ended before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def device_pci_id(index: int) -> Optional[str]:
    """"0000:65:00.0" of CUDA or ROCm device `index` as this process numbers them; None when not known."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(index)
    if not hasattr(found, "pci_domain_id"):
        return None
    return "%04x:%02x:%02x.0" % (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
