"""The wrapper that never crashes an engine.

Ours is tried, the engine's is not: an engine's function is called once (or not at all when a `before` answers in its
place), with its own arguments, and what it raises passes untouched. A fault of ours is counted, written into the hello
and sent; after LIMIT faults of one function the fallback answers for it, and the hook's state is DEGRADED.

A fault drill: `"drill": {"where": "<Class.function>", "ranks": [1]}` in the settings makes our part of that wrapper
raise on those ranks (all of them when `ranks` is absent), which shows that the above holds.
"""
import functools
import sys
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from . import rank, wire

LIMIT = 3
_counts: Dict[Tuple[str, str], int] = {}  # (hook, where)
_NOTHING = object()


class Missing(Exception):
    """The engine lacks what a hook needs."""

    def __init__(self, wanted: str, found: str) -> None:
        super().__init__("wanted %s, found %s" % (wanted, found))
        self.wanted, self.found = wanted, found


class Answer(NamedTuple):
    """What a `before` returns to answer in the engine's place, and an `after` to replace the engine's answer."""
    value: Any


class Drill(Exception):
    """Raised where the settings ask for a fault drill."""


def require(owner: Any, name: str, release: str = "") -> Any:
    """`owner.name`. Raises Missing, naming the path and the engine's release, when it is not there."""
    found = getattr(owner, name, _NOTHING)
    if found is _NOTHING:
        path = "%s.%s" % (getattr(owner, "__qualname__", getattr(owner, "__name__", type(owner).__name__)), name)
        raise Missing(path, "no such attribute in %s" % (release or engine_release()))
    return found


def engine_release() -> str:
    """"sglang 0.5.23": the engine of this process as it names itself."""
    engine = rank.settings().engine
    return "%s %s" % (engine, getattr(sys.modules.get(engine), "__version__", "of unknown release"))


def report(hook: str, where: str, error: BaseException, replicated: bool = False) -> None:
    """Counts a fault of ours and tells the supervisor, once by datagram and for sure by the hello."""
    found = _counts[hook, where] = _counts.get((hook, where), 0) + 1
    if found == LIMIT:
        rank.hook(hook, wire.DEGRADED, where, "%d faults, the last %s: %s" % (LIMIT, type(error).__name__, error))
    rank.fault(hook, where, "%s: %s" % (type(error).__name__, error), replicated)


def is_off(hook: str) -> bool:
    """Whether a function of `hook` had so many faults that its fallback answers for it."""
    return any(found >= LIMIT for (name, _), found in _counts.items() if name == hook)


def tried(hook: str, where: str, function: Callable[..., Any], fallback: Any, replicated: bool,
          *args: Any, **kwargs: Any) -> Any:
    """`function(...)`, or `fallback` when it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the one place: whatever is wrong with us, the engine goes on
        report(hook, where, error, replicated)
        return fallback


def contained(hook: str, where: str, function: Callable[..., Any], *first: Any) -> Callable[[Any], None]:
    """An installer that never raises: what is missing or goes wrong makes the hook's state FAILED."""
    def call(module: Any) -> None:
        try:
            function(*first, module)
        except Missing as missing:
            rank.hook(hook, wire.FAILED, missing.wanted, missing.found)
        except Exception as error:  # noqa: BLE001 - the same place, for installers
            report(hook, where, error)
            rank.hook(hook, wire.FAILED, where, "%s: %s" % (type(error).__name__, error))

    return call


def wrap(owner: Any, name: str, hook: str, *, before: Optional[Callable[..., Any]] = None,
         after: Optional[Callable[..., Any]] = None, fallback: Optional[Callable[..., Any]] = None,
         replicated: bool = False) -> None:
    """Puts our part around the function `owner.name`. Raises Missing when there is none.

    before(*args, **kwargs) -> token; an Answer answers in the engine's place.
    after(token, result, *args, **kwargs); an Answer replaces the result. Not called when the engine raised or there is
    no token because `before` failed. fallback(*args, **kwargs) -> token stands in for a `before` that failed or is off; where
    it fails too the hook is FAILED, which ends the worker.
    """
    original = require(owner, name)
    where = "%s.%s" % (getattr(owner, "__name__", owner), name)
    ours = drilled(where, before or _no_token)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        token = _NOTHING
        if _counts.get((hook, where), 0) < LIMIT:  # `tried` in place: it saves two calls in every step of an engine
            try:
                token = ours(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the same place
                report(hook, where, error, replicated)
        if token is _NOTHING and fallback is not None:
            token = tried(hook, where, fallback, _NOTHING, replicated, *args, **kwargs)
            if token is _NOTHING:  # not even the safe answer: the engine does as it likes, and the supervisor must end it
                rank.hook(hook, wire.FAILED, "%s or its safe answer" % where, "both raise")
        if type(token) is Answer:
            return token.value
        result = original(*args, **kwargs)
        if after is not None and token is not _NOTHING:
            try:
                answer = after(token, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the same place
                report(hook, where, error, replicated)
                return result
            if type(answer) is Answer:
                return answer.value
        return result

    wrapper.__tightrank__ = hook  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def is_wrapped(function: Any, hook: str) -> bool:
    """Whether `function` is the one that `wrap` put in place for `hook`, as seen from where the engine looks it up."""
    while function is not None:
        if getattr(function, "__dict__", {}).get("__tightrank__") == hook:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _no_token(*args: Any, **kwargs: Any) -> None:
    return None


def drilled(where: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, or what raises in its place where the settings ask for a drill at `where`."""
    drill = rank.settings().drill or {}
    if drill.get("where") != where:
        return ours

    def raising(*args: Any, **kwargs: Any) -> Any:
        if drill.get("ranks") is None or rank.number() in drill["ranks"]:
            raise Drill("a fault drill at %s" % where)
        return ours(*args, **kwargs)

    return raising
