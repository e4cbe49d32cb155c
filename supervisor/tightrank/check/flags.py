"""Flags that the installed release knows. Its sources tell in 0.4 s what may be one; what they do not have is asked of its own
parser, which needs the engine imported: SGLang 6 s, vLLM 9 s of CPU, three to six times that on busy cores, and 0.6 GiB. So
`up` pays that only for a flag that is probably wrong, and `check` waits less for an answer that will probably be yes.
"""
from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.check.program import ProgramFacts, ask, engine_environment
from tightrank.check.source import parse
from tightrank.config.flags import MASK, names, without_secrets
from tightrank.records import WorkerSpec

PARSER_SECONDS, ODD_SECONDS = 30.0, 120.0
PARSER_BYTES = 2**30                   # memory that must be there to ask
_SOURCES = {"vllm": ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "config/*.py"),
            "sglang": ("srt/server_args.py", "srt/arg_groups/*.py", "srt/arg_groups/fields/*.py")}
# The engine's own parser reads its arguments on stdin: a command line may hold secrets, and all users see those of a process.
_PARSERS = {"vllm": """
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
""", "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""}
_ASK = """
import json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
arguments = json.load(sys.stdin)
def refuse(message):
    json.dump({"error": message}, answer)
    answer.flush()
    os._exit(0)
%s
parser.error = refuse
parser.parse_args(arguments)
json.dump({"error": None}, answer)
answer.flush()
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class FlagFacts:
    """`may_be`: long flags by the sources; empty: they could not be read, and `why`. `error`: what the engine's own parser says
    of the whole command line; None: nothing wrong. `asked`: that it has answered; else `why`."""
    may_be: frozenset[str] = frozenset()
    asked: bool = False
    error: str | None = None
    why: str = ""


def read(program: ProgramFacts, spec: WorkerSpec, environment: Mapping[str, str], thorough: bool, may_ask: bool) -> FlagFacts:
    """`thorough`: ask the parser whatever the sources say. `may_ask`: there is memory for it. Never raises."""
    if program.package is None:
        return FlagFacts(why=program.why)
    try:
        may_be = frozenset(_candidates(program.package, _SOURCES.get(spec.engine, ())))
    except OSError as unreadable:
        return FlagFacts(why=f"the sources of {spec.engine} {program.release} cannot be read ({unreadable})")
    if not may_be:
        return FlagFacts(why=f"where {spec.engine} {program.release} lists its flags is not known")
    odd = bool(strange(may_be, spec))
    if not (may_ask and (thorough or odd)):
        return FlagFacts(may_be, why="its parser was not asked" + ("" if may_ask else ": there is too little memory"))
    _, out, why = ask(program.interpreter, _ASK % _PARSERS[spec.engine], (), engine_environment(spec, environment),
                      ODD_SECONDS if odd else PARSER_SECONDS, json.dumps(_arguments(spec)))
    try:
        error = json.loads(out)["error"]
    except (ValueError, TypeError, KeyError):
        return FlagFacts(may_be, why=f"its parser did not answer ({why[:200]})")
    return FlagFacts(may_be, True, error)


def _arguments(spec: WorkerSpec) -> list[str]:
    """What stands behind the engine's program or module."""
    argv = list(spec.argv)
    found = argv[argv.index("-m") + 2:] if "-m" in argv[:-1] else argv[argv.index("serve"):]
    return found[1:] if found[:1] == ["serve"] else found


def _candidates(package: Path, patterns: Iterable[str]) -> Iterator[str]:
    """All that may be a long flag: text that looks like one, and fields that a parser makes flags of. More than there are.
    Raises OSError.
    """
    for path in (path for pattern in patterns for path in package.glob(pattern)):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"--[\w-]+", node.value):
                yield node.value.replace("_", "-")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield "--" + node.target.id.replace("_", "-")


def strange(may_be: frozenset[str], spec: WorkerSpec) -> list[str]:
    """Long flags of the command line that the sources have in no form: whole, cut short, negated, --flag.part."""
    wanted = [name.partition(".")[0] for name in names(spec.argv) if name != "--"]
    return [name for name in wanted if not any(flag.startswith(each) for each in (name, name.replace("--no-", "--", 1))
                                               for flag in may_be)]


def items(facts: FlagFacts, program: ProgramFacts, spec: WorkerSpec) -> Iterator[Item]:
    item, what = "flags", f"{spec.engine} {program.release}"
    odd = strange(facts.may_be, spec) if facts.may_be else []
    hints = ", ".join(_hint(name, facts.may_be) for name in odd)
    if not facts.may_be:
        yield unknown(item, facts.why)
    elif facts.asked and facts.error is not None:
        yield failed(item, "arguments-invalid", f"{what} refuses its command line: {_shown(facts.error, spec)}",
                     hints or "correct it")
    elif facts.asked:
        yield passed(item, f"the parser of {what} takes the command line")
    elif odd:
        yield warned(item, f"the sources of {what} do not have {', '.join(odd)}, and {facts.why}", hints)
    else:
        yield passed(item, f"the sources of {what} have all {len(set(names(spec.argv)))} flags")


def _hint(name: str, may_be: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, may_be, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"leave {name} out"


def _shown(error: str, spec: WorkerSpec) -> str:
    """In one line, without secrets."""
    text = " ".join(error.split())[:400]
    for given, shown in zip(spec.argv, without_secrets(spec.argv), strict=True):
        if given != shown:
            text = text.replace(given.removeprefix(shown.removesuffix(MASK)), MASK)
    return text
