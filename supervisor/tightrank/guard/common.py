"""What every room of the guard uses: its exit codes, and one line on stderr."""
from __future__ import annotations

import os
import select

MIB = 1 << 20
UNKNOWN = 2**64 - 1
TEMPORARY, SOFTWARE, CONFIG = 75, 70, 78  # exit codes, as in sysexits.h


def say(text: str) -> None:
    """A message on stderr, at most 4096 bytes. Dropped when stderr is full: a reader that hangs must not hang the guard."""
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"tightrank-guard: {text}\n".encode()[:4096])
    except OSError:
        pass


def refuse(text: str, code: int) -> SystemExit:
    say(text)
    return SystemExit(code)
