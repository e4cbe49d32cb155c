"""For scripts/bench/adapter alone: the adapter's hooks are there in some windows of time and not in the others.

The adapter runs the sitecustomize that it displaces, this one. Every function of the engine that a hook wraps becomes two: the
wrapped one in a window with the hooks, the engine's own in one without. The clock of the host decides, so all processes agree
and nobody has to tell them; the question costs 0.3 us. Until the file BENCH_TOGGLE is there the hooks are: what one does at
the start of an engine is no part of a step.
"""
import os
import time

WINDOW_NS = 400_000_000
_LOOKAHEAD = "_reserve_prefill_lookahead"      # of vLLM's scheduler: the hook `line` overrides it in a subclass


def hooked(nanoseconds):
    """Whether the hooks are there at that CLOCK_MONOTONIC.

    The order of Thue and Morse: A-B-B-A, B-A-A-B, ... A drift hits both alike, and it has no period. With A-B-B-A alone windows
    that were alike differed by 2 % for four minutes: something else on the host had a rhythm of its own.
    """
    return (nanoseconds // WINDOW_NS).bit_count() % 2 == 0


_begun = False


def _now():
    global _begun
    _begun = _begun or os.path.exists(os.environ["BENCH_TOGGLE"])
    return not _begun or hooked(time.monotonic_ns())


def _either(owner, name, ours, engines):
    def either(*args, **kwargs):
        return (ours if _now() else engines)(*args, **kwargs)

    either.__dict__.update(ours.__dict__, __wrapped__=ours)      # the adapter looks whether its own is in place
    setattr(owner, name, either)


def _watch():
    from tightrank_adapter import fault
    wrap = fault.wrap

    def by_turns(owner, name, *args, **kwargs):
        engines = getattr(owner, name, None)
        wrap(owner, name, *args, **kwargs)
        _either(owner, name, vars(owner)[name], engines)
        if "_tightrank" in vars(owner) and _LOOKAHEAD in vars(owner) and not hasattr(vars(owner)[_LOOKAHEAD], "__wrapped__"):
            _either(owner, _LOOKAHEAD, vars(owner)[_LOOKAHEAD], getattr(owner.__base__, _LOOKAHEAD))

    fault.wrap = by_turns


if "BENCH_TOGGLE" in os.environ:
    _watch()
