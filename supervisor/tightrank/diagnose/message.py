"""A line of output -> the message in it, where it reports an error. Pure."""
from __future__ import annotations

import re
from dataclasses import dataclass

from tightrank.diagnose.text import plain
from tightrank.records import Line

_PREFIXES = re.compile(
    r"(?:\([\w.:-]+,? (?:rank=\d+ )?pid=\d+(?:, ip=[\w.:]+)?\)\s*|\[atom \d\d:\d\d:\d\d\]\s*|\[rank\d+\]:\s*"
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]{0,60}\]\s*)*"
    # vLLM's (older releases: `ERROR 04-30 10:11:12 engine.py:366] `), uvicorn's, and those of torch's C++ parts
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]{1,80}\]|[\w./]{1,80}:\d+\])|:)\s*"
    r"|\[(?P<letter>[IWEF])\d{0,4} ?(?:\d\d:\d\d:\d\d[.\d]{0,12} )?\w{1,60}\.cpp:\d+\]\s*(?:\[[\w :]{1,40}\]\s*)*)?[\s|]*")
_EXCEPTION = re.compile(r"(?:(?:[A-Za-z_]\w*\.)*(?P<error>[A-Za-z_]\w*Error|\w*Exception|OutOfResources|BackendCompilerFailed)"
                        r": |(?P<said>Value error|Assertion failed), |(?P<native>what\(\)):\s+)")
_AT_WORK = re.compile(r"(?:Decode|Prefill) batch|INFO: ")        # SGLang prints no levels
_QUIET = ("DEBUG", "INFO", "WARNING", "I", "W")


@dataclass(frozen=True, slots=True)
class Message:
    """`error`: the last part of the exception's name, "" where the text is none; `text` is what follows it."""
    text: str
    error: str
    whole: str


def parse(line: Line) -> Message | None:
    """None for a level that reports no error."""
    whole = plain(line.text)
    prefix = _PREFIXES.match(whole)
    if prefix is None or prefix["level"] in _QUIET or prefix["letter"] in _QUIET:
        return None
    text = whole[prefix.end():]
    found = _EXCEPTION.match(text)
    if found is None:
        return Message(text, "", whole)
    return Message(text[found.end():], found["error"] or found["said"] or found["native"], whole)


def goes_on(line: Line) -> bool:
    """Whether this is an ordinary line of an engine that works: what was raised before it was survived."""
    text = plain(line.text)
    prefix = _PREFIXES.match(text)
    return prefix is not None and (prefix["level"] == "INFO" or _AT_WORK.match(text[prefix.end():]) is not None)
