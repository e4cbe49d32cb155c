"""One text that an engine, a library or the kernel prints when something failed, as data. The tables are vllm.py, sglang.py,
atom.py and, for what all of them are built on, common.py, device.py, host.py and hub.py.

`pattern` is matched at the start of a message, after the prefixes are off (see message.py): a prompt that is logged
somewhere inside a line matches nothing. Named groups are numbers or names; a suffix gives the unit (`_gib`, `_mib`, `_gb`,
`_tokens`, ...); `pid` is checked against the worker's tree. The first signature that matches a line counts.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

Numbers = Mapping[str, float]
_NAMED = re.compile(r"\(\?P<\w+>")


class Rank(IntEnum):
    """Which of several matches is the cause: the lowest rank, then the earliest."""
    ROOT = 0               # says itself why
    RAISED = 1             # a general error that a ROOT line explains better
    DOUBTFUL = 2           # engines may survive it: counts as the exception that ended them, or where nothing else is known
    VAGUE = 3              # says that something ended, not why
    CONSEQUENCE = 4        # follows from another failure


@dataclass(frozen=True, slots=True)
class Signature:
    """`shape`: raised (an exception's own line), logged (a message), any, kernel (a line of the kernel's log).

    `start_only`: means nothing once the engine serves. `decisive`: the engine is certain to end, so nobody needs to
    wait for it. `summary` and `change` may use the groups and what `derive` computes from the numbers. `source`: the
    releases in which the text was read, and where. `error`: the last part of the exception's name, where that matters.
    """
    cause: str
    pattern: str
    summary: str
    change: str
    source: str
    shape: Literal["raised", "logged", "any", "kernel"] = "raised"
    start_only: bool = True
    decisive: bool = True
    rank: Rank = Rank.ROOT
    confidence: str = "certain"
    derive: Callable[[Numbers], Mapping[str, str]] = field(default=lambda numbers: {})
    error: str = ""

    def match(self, text: str) -> re.Match[str] | None:
        return re.match(self.pattern, text)       # `re` keeps the compiled form


class Table:
    """The signatures of one engine with what they share, in the order in which they are tried."""

    def __init__(self, signatures: Sequence[Signature]) -> None:
        self.signatures = tuple(signatures)
        # Most lines match nothing: one pattern says so in one pass (2 to 5 µs a line, against 40 one by one).
        free = [each for each in self.signatures if not each.error]
        bound = [each for each in self.signatures if each.error]
        self._any = re.compile("|".join(f"(?:{_NAMED.sub('(?:', each.pattern)})" for each in free))
        self._errors = re.compile("|".join(each.error for each in bound))

    def may_match(self, text: str, error: str) -> bool:
        return self._any.match(text) is not None or self._errors.fullmatch(error) is not None
