"""Why an engine failed, from what it printed and how it ended. Pure.

`deciding_line` judges one line while the engine starts: a sizing error is certain before the process has ended.
`diagnose` judges an unasked exit over all kept lines: the earliest root cause wins over its consequences.
A wrong verdict is worse than none: texts count only at the start of an error message or as an exception's own line.
"""
from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from tightrank.diagnose import atom, common, sglang, vllm
from tightrank.diagnose.signature import Rank, Signature
from tightrank.errors import CAUSES
from tightrank.records import Diagnosis, Line

_TABLES = {name: table + common.SIGNATURES for name, table in (
    ("vllm", vllm.SIGNATURES), ("sglang", sglang.SIGNATURES), ("atom", atom.SIGNATURES))}

RUNNING_SECONDS = 120.0      # of a serving engine's output; SGLang's dumps before it ends take up to 65 s
EVIDENCE_CHARACTERS = 600
MESSAGE_CHARACTERS = 4096
LAST_LINES = 5
TRACEBACK_LINES = 20         # at the end of the output: an exception that ended the process is among these
OOM_KILLED_CHANGE = ("give the host or container more memory, or the engine less; raise guard.floor so that the guard "
                     "acts first")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_KERNEL = re.compile(r"\[\s*\d+\.\d+\]\s*")
_PREFIXES = re.compile(
    r"(?:\([\w.-]+ (?:rank=\d+ )?pid=\d+\)\s*|\[atom \d\d:\d\d:\d\d\]\s*|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]{0,60}\]\s*)*"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]{1,80}\]|:)\s*)?[\s|]*")
_EXCEPTION = re.compile(r"(?:(?:[A-Za-z_]\w*\.)*(?:[A-Za-z_]\w*Error|\w*Exception): |Value error, |Assertion failed, )")
_UNITS = {"_gib": 2.0**30, "_mib": 2.0**20, "_gb": 1e9}
_NAME = r"(?:api[_-]?key|[_-]token|secret|password)(?![a-z])"
_VALUE = r"""(?:\[[^\]]*\]?|[^\s,'")\]]+)"""      # a word, or a list of them
_SECRET = re.compile(rf"""(?i)(--?[\w-]*{_NAME}\s+|{_NAME}['"]?\s*[=:]\s*['"]?|\bbearer\s+){_VALUE}""")
_UNKNOWN_ARGUMENTS = re.compile(r"(?<=unrecognized arguments: ).*")


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """How an engine ended, unasked. `role` names the process that ended first, `code` is as of subprocess.

    `starting`: it had not served yet. `oom_killed`: a kernel counter (cgroup memory.events) says so.
    """
    code: int | None
    starting: bool
    role: str = "main"
    oom_killed: bool = False


@dataclass(frozen=True, slots=True)
class _Message:
    text: str
    exception: bool                # `text` is what follows "SomeError: "
    whole: str


@dataclass(frozen=True, slots=True)
class _Hit:
    position: int
    signature: Signature
    match: re.Match[str]


def deciding_line(engine: str, line: Line) -> Diagnosis | None:
    """The verdict, when this one line of a starting engine proves that it cannot come up; else None."""
    hit = _hit(engine, 0, line, starting=True)
    return _verdict(hit, (line,)) if hit and hit.signature.decisive else None


def diagnose(engine: str, lines: Sequence[Line], exit_info: ExitInfo) -> Diagnosis:
    """Why the engine ended. Always an answer: how the process ended (or `unknown`) when nothing printed says why."""
    kept = lines if exit_info.starting else _latest(lines)
    hits = [hit for position, line in enumerate(kept) if (hit := _hit(engine, position, line, exit_info.starting))]
    best = min(hits, key=lambda hit: (hit.signature.rank, hit.position), default=None)
    if best is not None and best.signature.rank == Rank.ROOT:
        return _verdict(best, kept)
    if exit_info.oom_killed:
        return _oom_killed(exit_info, kept)
    if best is not None and best.signature.cause == "out-of-memory":
        return _verdict(best, kept)
    raised = _first_exception(kept, best, hits, exit_info.starting)
    if raised is not None:
        return _made("engine-error", _clean(raised.text).strip(), (raised,), "see the engine's log around this line",
                     confidence="likely")
    return _verdict(best, kept) if best is not None else _by_exit(exit_info, kept)


def _message(line: Line) -> _Message | None:
    """The message of a line without its prefixes; None for a level that reports no error."""
    whole = _ANSI.sub("", line.text[:MESSAGE_CHARACTERS]).rstrip()
    prefix = _PREFIXES.match(whole)
    if prefix is None or prefix["level"] in ("DEBUG", "INFO", "WARNING"):
        return None
    text = whole[prefix.end():]
    exception = _EXCEPTION.match(text)
    return _Message(text[exception.end():] if exception else text, exception is not None, whole)


def _hit(engine: str, position: int, line: Line, starting: bool) -> _Hit | None:
    message = _message(line)
    if message is None:
        return None
    for signature in _TABLES[engine]:
        if (starting or not signature.start_only) and (match := _match(signature, message, line.stream)):
            return _Hit(position, signature, match)
    return None


def _match(signature: Signature, message: _Message, stream: str) -> re.Match[str] | None:
    if signature.shape == "kernel" or stream == "kernel":
        both = signature.shape == stream
        return signature.match(_KERNEL.sub("", message.whole, count=1)) if both else None
    if signature.shape == "any" or message.exception == (signature.shape == "raised"):
        return signature.match(message.text)
    return None


def _verdict(hit: _Hit, lines: Sequence[Line]) -> Diagnosis:
    groups = {name: value for name, value in hit.match.groupdict().items() if value is not None}
    numbers = _numbers(groups)
    try:
        derived = hit.signature.derive(numbers)
    except (KeyError, ArithmeticError):      # numbers that make no sense: the verdict stands, without a computed value
        derived = {"change": "see the numbers in the line"}
    words = _Words(groups | dict(derived))
    return _made(hit.signature.cause, hit.signature.summary.format_map(words), (lines[hit.position],),
                 hit.signature.change.format_map(words), numbers=numbers, confidence=hit.signature.confidence)


class _Words(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def _numbers(groups: Mapping[str, str]) -> dict[str, float]:
    """The groups that are numbers, sizes in bytes: {"free_gib": "1.5"} gives {"free_bytes": 1610612736}."""
    found: dict[str, float] = {}
    for name, text in groups.items():
        if re.fullmatch(r"-?\d+(?:\.\d+)?", text):
            unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
            value = float(text) * _UNITS.get(unit, 1.0)
            if not isfinite(value):
                continue
            key = name.removesuffix(unit) + "_bytes" if unit else name
            found[key] = int(value) if unit or value.is_integer() else value
    return found


def _made(cause: str, summary: str, evidence: Sequence[Line], change: str, *,
          numbers: Mapping[str, float] | None = None, confidence: str = "certain") -> Diagnosis:
    return Diagnosis(cause, _clean(summary), tuple(_clean(line.text) for line in evidence), change,
                     CAUSES[cause].restart_helps, numbers or {}, confidence)


def without_secrets(text: str) -> str:
    """A line of output to show: what follows a name like `api_key` or `--hf-token` is masked (SGLang prints them)."""
    return _SECRET.sub(r"\1***", text)


def _clean(text: str) -> str:
    """For people, without secrets: of arguments that the engine does not know only the names are kept."""
    text = without_secrets(_ANSI.sub("", text[:MESSAGE_CHARACTERS]).rstrip())
    return _UNKNOWN_ARGUMENTS.sub(lambda match: _names(match[0]), text)[:EVIDENCE_CHARACTERS]


def _names(arguments: str) -> str:
    return " ".join(word.partition("=")[0] if word.startswith("-") else "***" for word in arguments.split())


def _latest(lines: Sequence[Line]) -> Sequence[Line]:
    return [line for line in lines if lines[-1].monotonic - line.monotonic <= RUNNING_SECONDS]


def _first_exception(lines: Sequence[Line], best: _Hit | None, hits: Sequence[_Hit], starting: bool) -> Line | None:
    """The exception behind a general report of failure, up to the line that reports a process dead.

    A serving engine also logs the exceptions of requests: there only what follows its own fatal marker counts.
    """
    marker = next((hit.position for hit in hits if hit.signature.rank == Rank.CONSEQUENCE), None)
    last = best.position if best and best.signature.rank == Rank.RAISED else len(lines)
    first = marker if marker is not None else max(last - TRACEBACK_LINES, 0) if starting else None
    for line in lines[first:last] if first is not None else ():
        message = _message(line)
        if message and message.exception and not _consequence(message):
            return line
    return None


def _consequence(message: _Message) -> bool:
    return any(s.rank == Rank.CONSEQUENCE and s.match(message.text) for table in _TABLES.values() for s in table)


def _oom_killed(exit_info: ExitInfo, lines: Sequence[Line]) -> Diagnosis:
    return _made("killed-by-oom", f"The kernel's OOM killer ended a process of the worker ({exit_info.role}).",
                 lines[-LAST_LINES:], OOM_KILLED_CHANGE)


def _by_exit(exit_info: ExitInfo, lines: Sequence[Line]) -> Diagnosis:
    when = "while starting" if exit_info.starting else "while serving"
    main = exit_info.role == "main"
    cause = "rank-died" if not main else "unknown" if exit_info.starting else "engine-exited"
    who = "The engine's main process" if main else f"A process of the engine ({exit_info.role})"
    return _made(cause, f"{who} ended {when}{_exit_words(exit_info.code)}; nothing that it printed says why.",
                 lines[-LAST_LINES:], "see the end of the log, and what else happened on the host at that time",
                 confidence="certain" if not main else "guess")


def _exit_words(code: int | None) -> str:
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    try:
        return f" by {signal.Signals(-code).name}"
    except ValueError:
        return f" by signal {-code}"
