"""`tightrank explain`: why an engine failed, from its log alone."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

from tightrank.cli.common import bold
from tightrank.diagnose import TABLES
from tightrank.diagnose.log import Explained, explain
from tightrank.errors import CAUSES, ConfigError
from tightrank.logs import Lines

_READ_BYTES = 1 << 20
_EXAMPLE = """examples:
  tightrank explain engine.log
  docker compose logs worker 2>&1 | tightrank explain - --json
  kubectl logs POD --previous | tightrank explain - --engine vllm --exit 137
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain", help="say why an engine failed, from its log",
        description="Reads a log of vLLM, SGLang or ATOM, also of an engine that tightrank did not start, and says the cause, "
                    "the lines that show it, what to change and whether a restart helps. Prefixes of docker, compose, "
                    "Kubernetes and journald are understood; the file may be of any size. `unknown` is an answer: nothing in "
                    "the lines says why. Exit codes: 0 there is an answer, 78 the file cannot be read or the engine cannot be "
                    "told.",
        epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="the log; - reads standard input")
    parser.add_argument("--engine", choices=sorted(TABLES), help="whose log it is (default: told from the lines)")
    parser.add_argument("--exit", type=_code, dest="code", metavar="CODE",
                        help="the exit code of the engine's main process, e.g. 1, 137 or -9; says that it ended")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(call=_explain)


def _code(text: str) -> int:
    try:
        code = int(text)
    except ValueError:
        code = 256
    if not -64 <= code <= 255:
        raise argparse.ArgumentTypeError(f"{text!r}: an exit code is a number from 0 to 255, or minus a signal from -1 to -64")
    return code


def _explain(arguments: argparse.Namespace) -> int:
    name = "standard input" if arguments.file == "-" else arguments.file
    try:
        if arguments.file == "-":
            found = explain(_lines(sys.stdin.buffer), arguments.engine, arguments.code)
        else:
            with open(arguments.file, "rb") as file:
                found = explain(_lines(file), arguments.engine, arguments.code)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}; give the file of one log, or - for standard input") from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    print(json.dumps(_json(found), indent=2) if arguments.json else _text(found, sys.stdout.isatty()))
    return 0


def _lines(file: BinaryIO) -> Iterator[str]:
    """Whatever the bytes are; a line without an end is cut."""
    cutter = Lines("stderr")
    while data := os.read(file.fileno(), _READ_BYTES):
        yield from (line.text for line in cutter.feed(data))
    yield from (line.text for line in cutter.close() if line.text)


def _json(found: Explained) -> dict[str, object]:
    diagnosis = found.diagnosis
    return {"cause": diagnosis.cause, "summary": diagnosis.summary, "evidence": list(diagnosis.evidence),
            "change": diagnosis.change, "restart_helps": diagnosis.restart_helps, "confidence": diagnosis.confidence,
            "numbers": dict(diagnosis.numbers), "runbook": CAUSES[diagnosis.cause].runbook, "engine": found.engine}


def _text(found: Explained, colour: bool) -> str:
    diagnosis = found.diagnosis
    cause = CAUSES[diagnosis.cause]
    return "\n".join((
        f"{bold(cause.id, colour)} ({diagnosis.confidence}): {cause.meaning}",
        f"  reason   {diagnosis.summary}", *(f"  said     {line.strip()}" for line in diagnosis.evidence),
        f"  change   {diagnosis.change}",
        f"  restart  {'may help' if diagnosis.restart_helps else 'does not help'}",
        f"  more     {cause.runbook}", f"  engine   {found.engine} ({found.engine_told_by})"))
