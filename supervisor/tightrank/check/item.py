"""One thing that the preflight looked at, and what came of it."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tightrank.errors import CAUSES, ConfigError

PASS, WARN, FAIL, UNKNOWN = "pass", "warn", "fail", "unknown"


@dataclass(frozen=True, slots=True)
class Item:
    """`sentence`: what is, with numbers. `change`: what to do; "" where nothing is to be done. `cause`: of a failure."""
    status: str
    item: str
    sentence: str
    change: str = ""
    cause: str | None = None

    def __post_init__(self) -> None:
        assert (self.cause in CAUSES) == (self.status == FAIL)

    @property
    def text(self) -> str:
        """In one line."""
        return (self.sentence + (f"; {self.change}" if self.change else "")).replace("\n", " ")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def passed(item: str, sentence: str) -> Item:
    return Item(PASS, item, sentence)


def warned(item: str, sentence: str, change: str) -> Item:
    return Item(WARN, item, sentence, change)


def failed(item: str, cause: str, sentence: str, change: str) -> Item:
    return Item(FAIL, item, sentence, change, cause)


def unknown(item: str, why: str) -> Item:
    return Item(UNKNOWN, item, why)


def refused(item: str, error: ConfigError) -> Item:
    """What is bad input too: its one line ends with what to do."""
    sentence, _, change = str(error).rpartition("; ")
    return Item(FAIL, item, sentence or change, change if sentence else "", error.cause)
