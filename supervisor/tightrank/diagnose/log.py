"""Any log of an engine, also of one that we did not start -> what it says. Reads it once, line by line, with bounded memory.

A log may hold several services (compose) and several lives of each (a container that is started again): each life is judged
by itself. What counts is the last one that failed.
"""
from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tightrank.diagnose import ExitInfo, diagnose, notable
from tightrank.diagnose.peel import Peeled, engine_seconds, peel
from tightrank.errors import ConfigError
from tightrank.logs import RING_LINES
from tightrank.records import Diagnosis, Line

MOST_NOTABLE = 1000          # lines that a signature matches, beside the last RING_LINES; the first of a start count most
MOST_SOURCES = 32            # services in one file; the lines of more are taken together
_SAME_START_LINES = 50       # several API servers of one start print the same first lines
_HEAD_CHARACTERS = 400       # what tells an engine, or a start, stands near the front
_CLEAR = 3                   # as many marks as of any other engine tell which engine it is
_PLAIN = 100                 # as many marks, and nearly none of another: no more counting
_CONFIDENCE = ("certain", "likely", "guess")

_MARKS: Mapping[str, re.Pattern[str]] = {
    "vllm": re.compile(r"API server version|vLLM|\bvllm[./](?:v1|engine|entrypoints|executor|worker|model_executor)\b|"
                       r"\((?:EngineCore|APIServer|Vllm)|(?:INFO|ERROR|WARNING) \d\d-\d\d \d\d:\d\d:\d\d "),
    "sglang": re.compile(r"server_args=|sglang|SGLang|SGLANG_|--mem-fraction-static|"
                         r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (?:DP|TP|PP|EP|CP)\d+)+\]"),
    "atom": re.compile(r"\[atom \d\d:\d\d:\d\d\]|\batom[./](?:model_engine|entrypoints|model_ops)\b|AsyncIOProcManager"),
}
_STARTS = re.compile(r"non-default args: |API server version |server_args=|Initializing engine with model ")
_READY = re.compile(r"The server is fired up and ready to roll!|Application startup complete\.")


@dataclass(frozen=True, slots=True)
class Explained:
    """`engine_told_by`: how it is known which engine this is."""
    engine: str
    engine_told_by: str
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    line: Line
    seconds: float | None          # None: it has no clock of its own


@dataclass
class _Life:
    """One start of one service."""
    since: int
    served: bool = False
    started_at: int | None = None
    notable: deque[_Kept] = field(default_factory=deque)
    ring: deque[_Kept] = field(default_factory=lambda: deque(maxlen=RING_LINES))

    def keep(self, kept: _Kept, worth: bool) -> None:
        if worth and (self.served or len(self.notable) < MOST_NOTABLE):
            self.notable.append(kept)
            if len(self.notable) > MOST_NOTABLE:
                self.notable.popleft()
        self.ring.append(kept)

    def lines(self) -> list[Line]:
        """In order, each with a time. One without a clock takes that of the next one that has: what native code prints
        belongs to what follows it, and not to the last words before a quiet hour."""
        first = self.ring[0].number if self.ring else 0
        # Without any clock nobody can tell how old a line is: then the last lines of a serving engine must do.
        timed = not self.served or any(kept.seconds is not None for kept in self.ring)
        every = [kept for kept in self.notable if kept.number < first and timed] + list(self.ring)
        clock = max((kept.seconds for kept in every if kept.seconds is not None), default=0.0)
        found = []
        for kept in reversed(every):
            clock = min(clock, kept.seconds) if kept.seconds is not None else clock
            found.append(replace(kept.line, monotonic=clock))
        return found[::-1]


class _Source:
    """The lines of one service: its lives, one after the other."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, Diagnosis]] = {}       # engine -> its last life that failed
        self._life = _Life(0)
        self._stamped = False

    def take(self, number: int, line: Peeled, engines: tuple[str, ...]) -> None:
        head = "" if line.kernel else line.text[:_HEAD_CHARACTERS]
        if _STARTS.search(head):
            self._start(number, engines)
        elif not self._life.served and _READY.search(head):
            self._life.served = True
            self._life.notable.clear()
        kept = Line(0.0, 0.0, "kernel" if line.kernel else "stderr", line.text)
        self._life.keep(_Kept(number, kept, self._seconds(line)), any(notable(engine, kept) for engine in engines))

    def _start(self, number: int, engines: tuple[str, ...]) -> None:
        life = self._life
        if life.started_at is not None and number - life.started_at > _SAME_START_LINES:
            for engine in engines:
                found = diagnose(engine, life.lines(), ExitInfo(None, not life.served, ended=False))
                if found.cause != "unknown":
                    self._failed[engine] = (life.since, found)
            self._life = _Life(number)
        self._life.started_at = number

    def _seconds(self, line: Peeled) -> float | None:
        """The stamp of who kept the log, else the engine's; never both: they may be of two time zones."""
        self._stamped = self._stamped or line.seconds is not None
        return line.seconds if self._stamped else engine_seconds(line.text)

    def verdict(self, engine: str, code: int | None, ended: bool) -> tuple[int, Diagnosis]:
        """Where the life that failed began, and why it did. Of one that is not known to have ended and shows no failure,
        the one before is told."""
        last = self._life.since, diagnose(engine, self._life.lines(), ExitInfo(code, not self._life.served, ended=ended))
        return last if ended or last[1].cause != "unknown" else self._failed.get(engine, last)


def explain(lines: Iterable[str], engine: str | None = None, code: int | None = None) -> Explained:
    """`code`: the exit code, as of a shell (137) or of subprocess (-9). Raises ConfigError when the engine cannot be told."""
    sources: dict[str, _Source] = {}
    marks = dict.fromkeys(_MARKS, 0)
    likely = (engine,) if engine else tuple(marks)
    for number, raw in enumerate(lines):
        peeled = peel(raw)
        if len(likely) > 1:
            _count(marks, peeled.text)
            likely = _likely(marks)
        name = peeled.source if peeled.source in sources or len(sources) < MOST_SOURCES else ""
        source = sources.setdefault(name, _Source())
        source.take(number, peeled, likely)
    told, by = (engine, "told") if engine else _told(marks)
    exit_code = None if code is None else 128 - code if 128 < code <= 192 else code
    found = [source.verdict(told, exit_code, code is not None) for source in sources.values()] or [
        (0, diagnose(told, (), ExitInfo(exit_code, starting=True, ended=code is not None)))]
    return Explained(told, by, min(found, key=_order)[1])


def _order(found: tuple[int, Diagnosis]) -> tuple[bool, int, int]:
    """Of several services: one that failed, then the surest verdict, then the earliest."""
    return found[1].cause == "unknown", _CONFIDENCE.index(found[1].confidence), found[0]


def _count(marks: dict[str, int], text: str) -> None:
    for name, pattern in _MARKS.items():
        marks[name] += pattern.search(text[:_HEAD_CHARACTERS]) is not None


def _likely(marks: Mapping[str, int]) -> tuple[str, ...]:
    """Once it is plain which engine this is, lines are tried for that one alone."""
    best, second = sorted(marks, key=lambda name: -marks[name])[:2]
    return (best,) if marks[best] > _PLAIN and marks[best] > _PLAIN / 5 * marks[second] else tuple(marks)


def _told(marks: Mapping[str, int]) -> tuple[str, str]:
    best, second = sorted(marks, key=lambda name: -marks[name])[:2]
    if not marks[best] or marks[best] < _CLEAR * marks[second]:
        counts = ", ".join(f"{name} {count}" for name, count in marks.items())
        raise ConfigError(f"which engine printed this cannot be told (lines that look like it: {counts}); say it with --engine "
                          "vllm, sglang or atom")
    return best, f"{marks[best]} lines look like it"
