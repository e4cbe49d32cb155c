"""Fills memory as fast as the machine can, or at a rate, and stops by itself:
`python hog.py --bytes N [--bytes-per-second N] [--leave-bytes N] [--seconds S] [--name TEXT]`.

One thread per core maps anonymous chunks with MAP_POPULATE (ctypes gives up the GIL for the call, mmap.mmap does not).
Never more than --bytes; whatever happens it ends after --seconds. Prints "start" before the first chunk and "full" at
the limit.
"""
from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import signal
import threading
import time

PR_SET_NAME = 15
MAP_FAILED = ctypes.c_void_p(-1).value


def libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return library


def available() -> int:
    with open("/proc/meminfo", "rb") as file:
        return int(file.read().partition(b"MemAvailable:")[2].split(None, 1)[0]) * 1024


def fill(library: ctypes.CDLL, total: int, chunk: int, threads: int, rate: float, leave: int) -> None:
    """Maps `total` bytes, rounded down to whole chunks, and leaves them mapped; less where only `leave` are available."""
    tickets, begin = itertools.count(), time.monotonic()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE

    def work() -> None:
        while (ticket := next(tickets)) < total // chunk:
            time.sleep(max(0.0, begin + ticket * chunk / rate - time.monotonic()))
            if leave and available() < leave + chunk:
                return
            if library.mmap(None, chunk, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == MAP_FAILED:
                return

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="fill memory, bounded in bytes and in time")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--bytes-per-second", type=float, default=float("inf"))
    parser.add_argument("--leave-bytes", type=int, default=0)
    parser.add_argument("--chunk-bytes", type=int, default=16 << 20)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--name", default="hog")
    options = parser.parse_args()
    signal.alarm(options.seconds)  # default action: the end, also in the middle of a fill
    library = libc()
    library.prctl(PR_SET_NAME, options.name.encode(), 0, 0, 0)
    print("start", flush=True)
    fill(library, options.bytes, options.chunk_bytes, options.threads, options.bytes_per_second,
         options.leave_bytes)
    print("full", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
