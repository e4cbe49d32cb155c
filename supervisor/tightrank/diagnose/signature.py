"""One text that an engine prints when it cannot go on, as data; the tables are vllm.py, sglang.py, atom.py and common.py.

`pattern` is matched at the start of a message, after the engine's prefixes are off (see __init__.py): a prompt that is
logged somewhere inside a line matches nothing. Named groups are numbers or names; a suffix gives the unit (`_gib`,
`_mib`, `_gb`, `_tokens`, ...). The first signature that matches a line counts.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

Numbers = Mapping[str, float]


class Rank(IntEnum):
    """Which of several matches is the cause: the lowest rank, then the earliest."""
    ROOT = 0               # says itself why
    RAISED = 1             # a general error that a ROOT line explains better
    CONSEQUENCE = 2        # follows from another failure


@dataclass(frozen=True, slots=True)
class Signature:
    """`shape`: raised (an exception's own line), logged (a message), any, kernel (a line of the kernel's log).

    `start_only`: means nothing once the engine serves. `decisive`: the engine is certain to end, so nobody needs to
    wait for it. `summary` and `change` may use the groups and what `derive` computes from the numbers. `source`: the
    releases in which the text was read, and where.
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

    def match(self, text: str) -> re.Match[str] | None:
        return re.match(self.pattern, text)       # `re` keeps the compiled form
