"""The kernel's log from now on: /dev/kmsg, those lines that may say why an engine ended. Never blocks.

One read gives one record, "priority,sequence,microseconds,flags;text\\n SUBSYSTEM=...\\n"
(https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg). Whoever reads too slowly gets EPIPE once and goes on behind
the gap. In a container it is often not there, or not ours to read; and its pids are those of the host's own namespace.
"""
from __future__ import annotations

import os
import re
import time

from tightrank.records import Line

_RECORD_BYTES = 8192               # the longest that the kernel gives; with less room it answers EINVAL
_MOST_RECORDS_A_PASS = 4000        # 2 µs each
_HOST_PIDS = "pid:[4026531836]"    # PROC_PID_INIT_INO: the namespace that the kernel's pids are of
_WANTED = re.compile(r"oom-kill:|out of memory: Killed process|NVRM: .*(?:Xid|NV_ERR_NO_MEMORY|fallen off the bus)|"
                     r"amdgpu .*(?:page fault|Process .* pid \d|ring \S+ timeout|GPU reset|uncorrectable)|"
                     r"\]:? (?:segfault|general protection fault|trap invalid opcode)", re.IGNORECASE)
_DEVICE = re.compile(r"(?:PCI:|amdgpu )([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2})", re.IGNORECASE)
_PIDS = re.compile(r"(?:\bpid[= ]|Killed process |\w\[(?=\d+\]))(\d+)")


def pids(text: str) -> frozenset[int]:
    """The processes that a line names."""
    return frozenset(map(int, _PIDS.findall(text)))


def device(text: str) -> str | None:
    """The PCI address of the device that a line is about, "0000:3b:00"; None: of none, or it does not tell."""
    found = _DEVICE.search(text)
    return f"{int(found[1], 16):04x}:{found[2].lower()}" if found else None


class KernelLog:
    """`why` tells why there is none, "" when there is."""

    def __init__(self, path: str = "/dev/kmsg", namespace: str = "/proc/self/ns/pid") -> None:
        self._descriptor = -1
        self.lost = 0              # gaps
        self.why = ""
        try:
            if os.readlink(namespace) != _HOST_PIDS:
                self.why = "its pids are the host's and we are in a pid namespace of our own"
                return
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.why = f"{path}: {error.strerror}"
            self.close()

    def read(self) -> list[Line]:
        """The lines of interest since the last call."""
        found: list[Line] = []
        for _ in range(_MOST_RECORDS_A_PASS if self._descriptor >= 0 else 0):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:            # the ring was written over: the next read is behind the gap
                self.lost += 1
                continue
            except BlockingIOError:
                break
            except OSError as error:           # a device that is gone, a record longer than any that it may give
                self.why = f"reading: {error.strerror}"
                self.close()
                break
            if not record:
                break
            text = _text(record)
            if _WANTED.search(text):
                found.append(Line(time.monotonic(), time.time(), "kernel", text))
        return found

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _text(record: bytes) -> str:
    """The message of one record; what is no record is taken as it is."""
    head, mark, rest = record.partition(b";")
    first = (rest if mark and head[:1].isdigit() else record).partition(b"\n")[0]
    return first.decode(errors="replace").strip()
