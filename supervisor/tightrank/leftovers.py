"""Ends whatever runs of a deployment's engines at once: what an earlier supervisor left, or all when the guard is gone."""
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tightrank import act, hygiene, plan
from tightrank.readers.process import ProcessTable, marked
from tightrank.watch import Watched

ROUNDS, ROUND_SECONDS = 50, 0.02             # what forks while it is ended is met again
ORPHANED_SECONDS = 2.0                       # without a guard we end soon: what needs longer is left to the next supervisor

Say = Callable[[str, str], None]


def end_earlier(state: Path, say: Say) -> None:
    """Of a supervisor of this state directory that died whole; before anything is started."""
    for _ in range(ROUNDS):
        left = marked(plan.mark(state))
        for process in left:
            if act.send(process, signal.SIGKILL):
                say("daemon", f"ended a leftover of an earlier run: pid {process.pid}")
        if not left:
            break
        time.sleep(ROUND_SECONDS)
    _sweep(state, say, threading.Event().wait)


def end_all(state: Path, watched: Sequence[Watched], say: Say) -> None:
    """Without the guard nobody keeps the floor: every engine ends now, with what has left its tree since we looked last."""
    for _ in range(ROUNDS):
        table = ProcessTable.read()
        left = {process.id for each in watched if each.main is not None
                for process in table.tree(each.main, each.known) if process.state not in "ZX"}
        left.update(marked(plan.mark(state)))
        if not left:
            break
        for process in left:
            act.send(process, signal.SIGKILL)
        time.sleep(ROUND_SECONDS)
    end = time.monotonic() + ORPHANED_SECONDS
    _sweep(state, say, lambda seconds: time.monotonic() + seconds > end or threading.Event().wait(seconds))
    say("daemon", "the guard is gone: all engines were ended")


def _sweep(state: Path, say: Say, pause: Callable[[float], bool]) -> None:
    for sentence in hygiene.sweep(state / "run", pause):
        say("hygiene", sentence)
