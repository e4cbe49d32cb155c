"""For scripts/bench/adapter alone: SIGUSR1 takes the adapter's hooks out of this process's engine, SIGUSR2 puts them back.

The adapter runs the sitecustomize that it displaces, this one. What a function of the engine was before the adapter wrapped it
is kept; each process that holds a hook says in BENCH_TOGGLE/<pid> whether it has them ("on") or not ("off").
"""
import os
import signal

DIRECTORY = os.environ.get("BENCH_TOGGLE")
_ABSENT = object()
_LOOKAHEAD = "_reserve_prefill_lookahead"      # of vLLM's scheduler: the hook `line` overrides it in a subclass
_before = {}                                   # (owner, name) -> the attribute before the first wrap, or _ABSENT


def _say(state):
    path = os.path.join(DIRECTORY, str(os.getpid()))
    with open(path + ".new", "w") as file:
        file.write(state)
    os.replace(path + ".new", path)


def _places():
    """{(owner, name): what is there without the hooks}; the hooks of a start have done their work and do not count."""
    found = {place: before for place, before in _before.items() if place[1] != "__init__"}
    return {**found, **{(owner, _LOOKAHEAD): _ABSENT for owner, _ in _before if _LOOKAHEAD in vars(owner) and
                        "_tightrank" in vars(owner)}}


def _toggle():
    held = {}

    def off(number, frame):
        for (owner, name), before in _places().items():
            held[owner, name] = vars(owner)[name]
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        _say("off")

    def on(number, frame):
        for (owner, name), ours in held.items():
            setattr(owner, name, ours)
        held.clear()
        _say("on")

    signal.signal(signal.SIGUSR1, off)
    signal.signal(signal.SIGUSR2, on)


def _watch():
    from tightrank_adapter import fault
    wrap = fault.wrap

    def watched(owner, name, *args, **kwargs):
        before = vars(owner).get(name, _ABSENT)
        wrap(owner, name, *args, **kwargs)
        if not _before:
            _toggle()
            _say("on")
        _before.setdefault((owner, name), before)

    fault.wrap = watched


if DIRECTORY:
    _watch()
