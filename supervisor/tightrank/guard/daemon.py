"""The daemon: started, told, reaped, started again; and the signals that end the loop's sleep."""
from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Iterable
from typing import NoReturn

from common import CONFIG, TEMPORARY, say
from protect import PR_SET_PDEATHSIG, libc, set_oom_score_adj

BACKOFF_SECONDS, BACKOFF_MOST_SECONDS, STEADY_SECONDS = 0.5, 30.0, 60.0
FINAL_CODES = (0, 69, TEMPORARY, CONFIG)


class Wake:
    """Signals as bytes in a pipe, so that they end the loop's sleep."""

    CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def __init__(self) -> None:
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self.CAUGHT:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def wait(self, seconds: float) -> bytes:
        """The numbers of the signals that came, as bytes."""
        if not select.select([self._read], [], [], seconds)[0]:
            return b""
        return os.read(self._read, 4096)


class Daemon:
    """The daemon's process: started, told, and started again after a pause that grows."""

    def __init__(self, argv: list[str]) -> None:
        self._argv, self._guard = argv, os.getpid()
        self._memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        with open("/proc/self/oom_score_adj") as file:
            self._oom_score_adj = int(file.read())
        self.pid = self.starts = self._failures = 0
        self._started = self._due = 0.0

    def start_when_due(self) -> None:
        if self.pid or time.monotonic() < self._due:
            return
        # Blocked until the child has its own handlers: a byte of it in our pipe would look like a signal to us.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork() or self._become(mask)
            self.starts, self._started = self.starts + 1, time.monotonic()
        except OSError as error:
            self._due = time.monotonic() + BACKOFF_MOST_SECONDS
            say(f"fork: {error}; starting the daemon in {BACKOFF_MOST_SECONDS:g} s")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become(self, mask: Iterable[int]) -> NoReturn:
        """In the child: nothing of the guard's privileges, signals or terminal goes on to the daemon."""
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
            os.setsid()  # else Ctrl-C reaches it twice: from the terminal and from us
            signal.set_wakeup_fd(-1)
            for number in (*Wake.CAUGHT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            set_oom_score_adj(self._oom_score_adj)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, self._memlock)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if os.getppid() == self._guard:
                os.execvp(self._argv[0], self._argv)
        except (OSError, ValueError) as error:
            say(f"cannot start {self._argv[0]}: {error}")
        finally:
            os._exit(CONFIG)  # never back into the guard's own code

    def ended(self, status: int) -> int | None:
        """What the guard has to exit with, or None: start it again (after the pause)."""
        self.pid, code = 0, os.waitstatus_to_exitcode(status)
        if code in FINAL_CODES:
            return code
        lived = time.monotonic() - self._started
        self._failures = 0 if lived >= STEADY_SECONDS else self._failures
        pause = min(BACKOFF_MOST_SECONDS, BACKOFF_SECONDS * 2**self._failures)
        self._failures += 1
        self._due = time.monotonic() + pause
        say(f"the daemon ended with {code} after {lived:.1f} s; engines are killed, starting it again in {pause:g} s")
        return None


def ended_children() -> list[tuple[int, int]] | None:
    """(pid, wait status) of the children that have ended, now reaped; None when there is no child at all."""
    ended: list[tuple[int, int]] = []
    try:
        while seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            ended.append(os.waitpid(seen.si_pid, 0))
    except ChildProcessError:
        return ended or None
    return ended
