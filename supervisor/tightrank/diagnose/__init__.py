"""Why an engine failed, from what it and the kernel printed and how it ended. Pure.

`deciding_line` judges one line while the engine starts: a sizing error is certain before the process has ended.
`diagnose` judges an unasked exit over all kept lines: the earliest root cause wins over its consequences.
A wrong verdict is worse than none: texts count only at the start of an error message or as an exception's own line.
"""
from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from tightrank.diagnose import atom, common, device, host, hub, sglang, vllm
from tightrank.diagnose.message import Message, goes_on, parse
from tightrank.diagnose.signature import Rank, Signature, Table
from tightrank.diagnose.text import clean, without_secrets
from tightrank.errors import CAUSES
from tightrank.records import Diagnosis, Line

__all__ = ["TABLES", "ExitInfo", "deciding_line", "diagnose", "notable", "without_secrets"]

_SHARED = common.SIGNATURES + host.SIGNATURES + hub.SIGNATURES + device.SIGNATURES + common.LAST
TABLES = {name: Table(own + _SHARED) for name, own in (
    ("vllm", vllm.SIGNATURES), ("sglang", sglang.SIGNATURES), ("atom", atom.SIGNATURES))}

RUNNING_SECONDS = 120.0      # of a serving engine's output; SGLang's dumps before it ends take up to 65 s
LAST_LINES = 5
TRACEBACK_LINES = 20         # at the end of the output: an exception that ended the process is among these
NEARLY_GONE_BYTES = 512 << 20      # the kernel's OOM killer acts between its low watermark (tens of MiB) and this
OOM_KILLED_CHANGE = ("give the host or container more memory, or the engine less; raise guard.floor so that the guard "
                     "acts first")

_KERNEL = re.compile(r"^\[[^\]]{0,40}\]\s*")
_NO_MEMORY = re.compile(r"NV_ERR_NO_MEMORY")
_ENGINE_TASK = re.compile(r"python|vllm|sglang|pt_main|ray::|atom|model_?runner|nvcc|cicc|ptxas|cc1plus|ninja", re.IGNORECASE)
_UNITS = {"_gib": 2.0**30, "_mib": 2.0**20, "_gb": 1e9}
_LOOK = "see the end of the log, and what else happened on the host at that time"
_SIGNAL_CHANGES: Mapping[signal.Signals | None, str] = {
    signal.SIGILL: "this CPU lacks an instruction that the engine was built with, or native code went astray: another build "
                   "of the engine, another host",
    signal.SIGBUS: "`df -h /dev/shm` and the disk of the model: a full shared memory or a file that was cut while it was "
                   "mapped ends a process like this",
    signal.SIGSEGV: "native code crashed: `dmesg -T` names the library; try without the feature that was added last",
    signal.SIGTERM: "it was asked to end from outside: a deploy, a probe, a person; use `tightrank stop` for that",
}


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """How an engine ended, unasked. `role` names the process that ended first, `code` is as of subprocess.

    `starting`: it had not served yet. `oom_killed`: a kernel counter (cgroup memory.events) says so. `pids`: of the
    worker's tree, ever; None: not known, then a line of the kernel counts by the name of the process. `lowest_available_bytes`:
    of the last minute. `ended`: False where nobody knows that it did (a log of which we have not seen the end).
    """
    code: int | None
    starting: bool
    role: str = "main"
    oom_killed: bool = False
    pids: frozenset[int] | None = None
    lowest_available_bytes: int | None = None
    ended: bool = True


@dataclass(frozen=True, slots=True)
class _Hit:
    position: int
    signature: Signature
    match: re.Match[str]
    sure: bool = True              # False: of the kernel's log, and the process is known by its name alone
    raised: bool = False


def deciding_line(engine: str, line: Line) -> Diagnosis | None:
    """The verdict, when this one line of a starting engine proves that it cannot come up; else None."""
    hit = _hit(engine, 0, line, ExitInfo(None, starting=True))
    return _verdict(hit, (line,)) if hit and hit.signature.decisive else None


def diagnose(engine: str, lines: Sequence[Line], exit_info: ExitInfo) -> Diagnosis:
    """Why the engine ended. Always an answer: how the process ended (or `unknown`) when nothing printed says why."""
    kept = lines if exit_info.starting else _latest(lines)
    hits = [hit for position, line in enumerate(kept) if (hit := _hit(engine, position, line, exit_info))]
    best = _best(hits)
    if best is not None and best.signature.rank == Rank.ROOT:
        return _verdict(best, kept)
    if exit_info.oom_killed:
        return _oom_killed(exit_info, kept)
    if best is not None and best.signature.rank == Rank.RAISED:
        return _verdict(best, kept)
    raised = _first_exception(engine, kept, hits, exit_info)
    if raised is not None:
        known = next((hit for hit in hits if hit.position == raised and hit.signature.rank == Rank.DOUBTFUL), None)
        return _verdict(known, kept) if known else _quoted(kept[raised])
    best = _lasting(hits, kept, exit_info)
    if _memory_gone(exit_info, best):
        return _memory_killed(exit_info, kept)
    return _verdict(best, kept) if best is not None else _by_exit(exit_info, kept)


def _best(hits: Iterable[_Hit]) -> _Hit | None:
    return min(hits, key=lambda hit: (hit.signature.rank, hit.position), default=None)


def _lasting(hits: Sequence[_Hit], lines: Sequence[Line], exit_info: ExitInfo) -> _Hit | None:
    """The best without what was survived: the engine went on behind it. (Of an engine that may still run, what it logs, such
    as a peer that is lost, holds.)"""
    worked = _last_at_work(lines) if hits else -1
    return _best(hit for hit in hits if not (hit.signature.rank == Rank.DOUBTFUL and hit.position < worked
                                             and (hit.raised or exit_info.ended)))


def _last_at_work(lines: Sequence[Line]) -> int:
    return max((position for position, line in enumerate(lines) if goes_on(line)), default=-1)


def notable(engine: str, line: Line) -> bool:
    """Whether any signature of the engine matches: of a log too long to keep, these lines are kept."""
    return _hit(engine, 0, line, ExitInfo(None, starting=True)) is not None


def _hit(engine: str, position: int, line: Line, exit_info: ExitInfo) -> _Hit | None:
    kernel = line.stream == "kernel"
    message = Message(_KERNEL.sub("", line.text, count=1), "", line.text) if kernel else parse(line)
    table = TABLES[engine]
    if message is None or not table.may_match(message.text, message.error):
        return None
    for signature in table.signatures:
        if (exit_info.starting or not signature.start_only) and (match := _match(signature, message, kernel)):
            ours = _ours(match, exit_info) if kernel else 1
            return _Hit(position, signature, match, ours > 0, message.error != "") if ours >= 0 else None
    return None


def _match(signature: Signature, message: Message, kernel: bool) -> re.Match[str] | None:
    if kernel or signature.shape == "kernel":
        fits = kernel and signature.shape == "kernel"
    elif signature.error:
        fits = re.fullmatch(signature.error, message.error) is not None
    else:
        fits = signature.shape == "any" or bool(message.error) == (signature.shape == "raised")
    return signature.match(message.text) if fits else None


def _ours(match: re.Match[str], exit_info: ExitInfo) -> int:
    """1: the process that the kernel names is of this worker (or it names none); -1: it is not; 0: by its name, it may be."""
    groups = match.groupdict()
    if groups.get("pid") is None:
        return 1
    if exit_info.pids is not None:
        return 1 if int(groups["pid"]) in exit_info.pids else -1
    return 0 if _ENGINE_TASK.search(groups.get("task") or "") else -1


def _verdict(hit: _Hit, lines: Sequence[Line]) -> Diagnosis:
    groups = {name: value for name, value in hit.match.groupdict().items() if value is not None}
    numbers = _numbers(groups)
    try:
        derived, change = hit.signature.derive(numbers), hit.signature.change
    except (KeyError, ArithmeticError):      # numbers that make no sense: the verdict stands, without a computed value
        derived, change = {}, "see the numbers in the line"
    words = _Words(groups | dict(derived))
    return _made(hit.signature.cause, hit.signature.summary.format_map(words), (lines[hit.position],),
                 change.format_map(words), numbers=numbers, confidence=hit.signature.confidence if hit.sure else "likely")


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
    return Diagnosis(cause, clean(summary), tuple(clean(line.text) for line in evidence), change,
                     CAUSES[cause].restart_helps, numbers or {}, confidence)


def _latest(lines: Sequence[Line]) -> Sequence[Line]:
    return [line for line in lines if lines[-1].monotonic - line.monotonic <= RUNNING_SECONDS]


def _first_exception(engine: str, lines: Sequence[Line], hits: Sequence[_Hit], exit_info: ExitInfo) -> int | None:
    """Where the exception stands that is behind a general report of failure, up to the line that reports a process dead.

    A serving engine also logs the exceptions of requests: there only what follows its own fatal marker counts. Whom a signal
    ended, or nobody knows to have ended, it counts only where the engine did not go on.
    """
    marker = next((hit.position for hit in hits if hit.signature.rank == Rank.CONSEQUENCE), None)
    last = next((hit.position for hit in hits if hit.signature.rank == Rank.VAGUE), len(lines))
    if marker is not None:
        first = marker
    elif exit_info.starting:
        by_itself = exit_info.ended and (exit_info.code is None or exit_info.code >= 0)
        first = max(last - TRACEBACK_LINES, 0 if by_itself else _last_at_work(lines) + 1)
    else:
        return None
    for position in range(first, last):
        message = parse(lines[position]) if lines[position].stream != "kernel" else None
        if message and message.error not in ("", "what()") and not _consequence(engine, message):
            return position
    return None


def _consequence(engine: str, message: Message) -> bool:
    return any(each.rank == Rank.CONSEQUENCE and each.match(message.text) for each in TABLES[engine].signatures)


def _quoted(line: Line) -> Diagnosis:
    return _made("engine-error", clean(line.text).strip(), (line,), "see the engine's log around this line",
                 confidence="likely")


def _oom_killed(exit_info: ExitInfo, lines: Sequence[Line]) -> Diagnosis:
    return _made("killed-by-oom", f"The kernel's OOM killer ended a process of the worker ({exit_info.role}).",
                 lines[-LAST_LINES:], OOM_KILLED_CHANGE)


def _memory_gone(exit_info: ExitInfo, best: _Hit | None) -> bool:
    """Ended by SIGKILL, nobody says why, and there was nearly no memory left."""
    code = best.match.groupdict().get("exit_code") if best else None
    killed = code == "-9" if code is not None else exit_info.code in (None, -signal.SIGKILL)
    lowest = exit_info.lowest_available_bytes
    return killed and lowest is not None and lowest < NEARLY_GONE_BYTES


def _memory_killed(exit_info: ExitInfo, lines: Sequence[Line]) -> Diagnosis:
    lowest = exit_info.lowest_available_bytes or 0
    driver = [line for line in lines if line.stream == "kernel" and _NO_MEMORY.search(line.text)]
    return _made("killed-by-oom", f"A process of the worker ({exit_info.role}) was killed without a word when {lowest >> 20} "
                 "MiB of memory were available.", (driver or lines)[-LAST_LINES:], OOM_KILLED_CHANGE,
                 numbers={"lowest_available_bytes": lowest}, confidence="likely")


def _by_exit(exit_info: ExitInfo, lines: Sequence[Line]) -> Diagnosis:
    if not exit_info.ended:
        return _made("unknown", "Nothing in these lines says that the engine failed.", lines[-LAST_LINES:],
                     "give the whole log, from the start to the end, and --exit CODE", confidence="guess")
    when = "while starting" if exit_info.starting else "while serving"
    main = exit_info.role == "main"
    cause = "rank-died" if not main else "unknown" if exit_info.starting else "engine-exited"
    who = "The engine's main process" if main else f"A process of the engine ({exit_info.role})"
    return _made(cause, f"{who} ended {when}{_exit_words(exit_info.code)}; nothing that it printed says why.",
                 lines[-LAST_LINES:], _SIGNAL_CHANGES.get(_signal(exit_info.code), _LOOK),
                 confidence="certain" if not main else "guess")


def _signal(code: int | None) -> signal.Signals | None:
    try:
        return signal.Signals(-code) if code is not None and code < 0 else None
    except ValueError:
        return None


def _exit_words(code: int | None) -> str:
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    name = _signal(code)
    return f" by {name.name}" if name else f" by signal {-code}"
