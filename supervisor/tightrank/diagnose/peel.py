"""What stands in front of a line in a log that others have kept: compose, Kubernetes, journald, dmesg, our own stamp. Pure."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from tightrank.diagnose.text import plain

_PREFIXES = re.compile(
    r"(?P<compose>[\w.-]{1,60})\s{1,40}\| ?"
    r"|\[(?:pod/)?(?P<pod>[\w.-]{1,100}/[\w./-]{1,100})\] "
    r"|(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))[ \t](?:(?:stdout|stderr) [FP] )?"
    r"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?) [\w.-]{1,80} (?P<tag>[\w./:@-]{1,60})(?:\[\d+\])?: "
    r"|(?P<dmesg>\[ {0,6}\d{1,9}\.\d{6}\] (?!\[)|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] )")
_MOST_PREFIXES = 4
_ENGINE_CLOCK = re.compile(r"(?:\([^)]{1,60}\) ?)*(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d)|"
                           r"\[(?P<sglang>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d))")


@dataclass(frozen=True, slots=True)
class Peeled:
    """`source`: whose line it is, where the prefix names one ("" else). `seconds`: when, of whichever clock."""
    text: str
    source: str = ""
    kernel: bool = False
    seconds: float | None = None


def peel(raw: str) -> Peeled:
    """The line as the engine (or the kernel) has printed it."""
    text = _of_docker(plain(raw) if "\x1b" in raw else raw)
    source, kernel, seconds = "", False, None
    for _ in range(_MOST_PREFIXES):
        found = _PREFIXES.match(text)
        if found is None:
            break
        text = text[found.end():]
        source = found["compose"] or found["pod"] or source
        kernel = kernel or found["tag"] == "kernel" or found["dmesg"] is not None
        seconds = _unix(found["stamp"]) if found["stamp"] else seconds
    return Peeled(text, source, kernel, seconds)


def engine_seconds(text: str) -> float | None:
    """What the engine's own prefix says of the time; only differences mean anything (vLLM's has no year)."""
    found = _ENGINE_CLOCK.match(text)
    if found is None:
        return None
    return _unix(f"2000-{found['vllm']}+00:00" if found["vllm"] else f"{found['sglang']}+00:00")


@lru_cache(maxsize=64)           # many lines have the same second
def _unix(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp.replace(",", ".")).timestamp()
    except ValueError:
        return None


def _of_docker(text: str) -> str:
    """A line of Docker's json-file driver, {"log": "...", "stream": ..., "time": "..."}."""
    if not text.startswith('{"log":'):
        return text
    try:
        record = json.loads(text)
    except ValueError:
        return text
    if not isinstance(record, dict) or not isinstance(record.get("log"), str):
        return text
    return f"{record.get('time', '')} {record['log']}".strip()
