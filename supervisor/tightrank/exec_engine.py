"""Becomes the engine: `python -I -S -B exec_engine.py PARENT_PID OOM_SCORE_ADJ -- ARGV...`, in a session of its own.

The steps need to run in the child between fork and exec. A program does that safely; `preexec_fn` in a daemon with
threads does not. Imports nothing of ours.
"""
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
EXIT_NOT_STARTED = 127


def main(parent_pid: int, oom_score_adj: int, argv: "list[str]") -> "int":
    # Fires when the thread that spawned us ends: the daemon spawns from its main thread.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        print("tightrank: the daemon (pid %d) ended before the engine could start" % parent_pid, file=sys.stderr)
        return EXIT_NOT_STARTED
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # the engine goes before anything else does
            file.write(str(oom_score_adj))
    except OSError as error:
        print("tightrank: oom_score_adj=%d not set: %s" % (oom_score_adj, error), file=sys.stderr)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print("tightrank: cannot start the engine: %s: %s" % (argv[0], error.strerror), file=sys.stderr)
    return EXIT_NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]))
