"""The stacks of this process on demand: on a signal faulthandler writes those of all its threads into the run directory.

The handler is C code that takes no lock of the interpreter's, so a process answers that waits for ever for one, or spins
inside a collective. A process that is stopped (SIGSTOP) or blocks all signals does not.
"""
import faulthandler
import os
import signal

from . import boot, wire


def arm(directory: str) -> None:
    """From here on wire.STACK_SIGNAL writes the stacks. A forked child writes to its parent's file until it arms itself.

    Whoever had a handler for that signal keeps it: it runs after ours. faulthandler's other uses (`enable`, which SGLang
    calls, and a timer) are not touched.
    """
    try:
        descriptor = os.open(wire.stacks_path(directory, os.getpid()),
                             os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:  # a full disk: the engine goes on, and a hang of it will have no stacks
        boot.complain("stacks cannot be written: %s" % error)
        return
    theirs = signal.getsignal(wire.STACK_SIGNAL)
    faulthandler.register(wire.STACK_SIGNAL, file=descriptor, all_threads=True,
                          chain=theirs not in (signal.SIG_DFL, signal.SIG_IGN))  # chained, the default would end us
