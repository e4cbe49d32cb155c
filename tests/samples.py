"""Records for the tests of what the world sees."""
from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tightrank.records import (
    Diagnosis,
    LevelStatus,
    LineSpec,
    MemoryReading,
    Phase,
    ProcessId,
    ProcessReading,
    RankReading,
    Status,
    WorkerStatus,
)

LINE = LineSpec(budget=200_000_000, floor_budget=256 * 8192, minimum=256, maximum=2048, granule=256)
LEVELS = (LevelStatus("shed", "host", "dry-run", 2 << 30, True, 3, 4.5, "host: 1900 MiB available, 876 MiB over the floor"),
          LevelStatus("stop", "host", "act", 1 << 30, False, 0, 4.5, "host: 1900 MiB available, 876 MiB over the floor"))
TOO_SMALL = Diagnosis("kv-pool-too-small", "No memory is left.", ("RuntimeError: Not enough memory.",),
                      "raise --mem-fraction-static (now 0.01)", False, {"fraction": 0.01})


def rank(**changes: Any) -> RankReading:
    made = RankReading(ProcessId(101, 7), "scheduler", 0, 0, 0, 0, None, "0.5.23", True, {"ranks": {"state": "in-force"}},
                       {"granule_tokens": 64}, 9 << 30, "", 0.2, 40, 12, 4096, 1)
    return replace(made, **changes)


def process(**changes: Any) -> ProcessReading:
    return replace(ProcessReading(ProcessId(100, 6), 1, "sglang", "S", 1 << 20, 3.5, None), **changes)


def worker(**changes: Any) -> WorkerStatus:
    made = WorkerStatus("w0", "sglang", "0.5.23", "both", Phase.UP, None, 3, 1000.0, True, "", "127.0.0.1", 30000, 2, None,
                        None, LINE, 200_000_000, 1, 8192, (rank(),),
                        (process(),), ("ranks", "line"), ("ready",))
    return replace(made, **changes)


def failed(**changes: Any) -> WorkerStatus:
    return worker(**{"phase": Phase.FAILED, "ready": False, "reason": TOO_SMALL.summary, "diagnosis": TOO_SMALL,
                     "ranks": (), **changes})


def status(*workers: WorkerStatus, **changes: Any) -> Status:
    now = time.monotonic()
    memory = MemoryReading(now, 24 << 30, 20 << 30, None, None, 20 << 30, 0.5, 0.0)
    held = workers or (worker(),)
    ready = all(w.ready for w in held)
    made = Status("demo", "0.1.0", time.time() - 60, time.time(), now, ready, "" if ready else "w0 is not ready", False,
                  memory, {"floor_bytes": 1 << 30, "stops": 0, "lowest_available_bytes": 19 << 30, "monotonic_ns":
                           int(now * 1e9), "samples": 5, "daemon_starts": 1}, 1 << 30,
                  {"worker": "w0", "rank": 0, "available_bytes": 9 << 30}, held)
    return replace(made, **changes)
