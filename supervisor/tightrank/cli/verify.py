"""`tightrank verify`: prompts of growing length against what runs, and two such runs side by side."""
from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tightrank.cli import parity
from tightrank.cli.common import table
from tightrank.cli.target import Known, add_target_options, api_key, find_target, guarded, kind_of, read_known, typed
from tightrank.config.units import Duration, Size
from tightrank.errors import EXIT_TEMPORARY, ConfigError
from tightrank.verify import store
from tightrank.verify.compare import band_rows, compare, size_rows
from tightrank.verify.ramp import Outcome, Ramp, parse_sizes, parse_tokens, short, sizes_for, verdict
from tightrank.verify.target import Settings, Target, differences

_EXIT_FAILED = 1
_ANSWER_TOKENS = 4             # a few: decode is not what is measured
_TRY_AGAIN = (Outcome.LOST, Outcome.INTERRUPTED)
_RAMP_DESCRIPTION = """\
Sends prompts of growing length to the live endpoint, one after another, and watches the
supervisor meanwhile. For each size: prefill rate at each prefix, chunks taken, lowest
available memory, what the guard decided. Stops by itself at the first level that fires,
when the worker is no longer up, and when memory was under --floor. Prompts are random
tokens, new each time, so that nothing of them is cached. The report (report.md with three
plots, report.json) is written anew after each size.
"""
_RAMP_EXAMPLES = """examples:
  tightrank verify ramp                                   64k to 500k tokens, or scaled
  tightrank verify ramp --sizes 8k,16k,32k --floor 2GiB
  tightrank verify ramp --endpoint http://127.0.0.1:8000  through the gateway
  tightrank verify ramp --resume verify-ramp-w0-20260911T101500Z

exit codes: 0 all sizes passed; 1 one did not (memory under --floor, a guard event, an error,
  the time limit); 69 no supervisor answers or the worker is not up; 75 ended before its time
  (Ctrl-C, a lost connection, a full disk): --resume goes on; 78 bad input
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify", help="prove with real prompts that what runs keeps its memory and its speed",
        description="Proves with real prompts that what runs keeps its memory and its speed.")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    _register_ramp(kinds)
    parity.register(kinds)
    _register_compare(kinds)


def _register_ramp(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "ramp", help="longer and longer prompts: rate, chunks, lowest memory",
        description=_RAMP_DESCRIPTION, epilog=_RAMP_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    parser.add_argument("--sizes", type=typed(parse_sizes), metavar="LIST",
                        help="tokens of each prompt, e.g. 64k,128k,262144 (default: 64k,128k,200k,256k,400k,500k, scaled down "
                             "where the longest prompt is shorter)")
    parser.add_argument("--floor", type=kind_of(Size()), metavar="SIZE",
                        help="fail when the host had less available memory (default: guard.floor + guard.margin)")
    parser.add_argument("--answer-tokens", type=typed(parse_tokens), metavar="N",
                        help=f"of each answer (default: {_ANSWER_TOKENS})")
    parser.add_argument("--timeout", type=kind_of(Duration(1.0)), default=3600.0, metavar="TIME",
                        help="for each size (default: 1h)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, metavar="DIR", help="where the report goes (default: verify-ramp-WORKER-TIME)")
    where.add_argument("--resume", type=Path, metavar="DIR", help="go on with the report there: same worker, configuration, "
                                                                  "sizes and floor")
    parser.set_defaults(call=_ramp)


# --- ramp -------------------------------------------------------------------------------------------------------------

def _ramp(arguments: argparse.Namespace) -> int:
    if arguments.resume and (arguments.sizes or arguments.floor is not None or arguments.answer_tokens):
        raise ConfigError("--resume: sizes, floor and length of the answers are those of its report; leave the options out")
    if arguments.resume and not arguments.resume.is_dir():
        raise ConfigError(f"--resume {arguments.resume}: is no directory of a ramp")
    known = read_known(arguments)
    return guarded(lambda: _go_on(arguments, known) if arguments.resume else _begin(arguments, known))


async def _begin(arguments: argparse.Namespace, known: Known) -> int:
    from tightrank.verify.run import client

    async with client() as http:
        target = await find_target(http, arguments, known)
        ramp, settings = _begun(arguments, known, target), _settings(arguments, known, target)
        directory = _directory(arguments.output, target)
        with store.held(directory):
            return await _run(http, target, settings, ramp, directory)


async def _go_on(arguments: argparse.Namespace, known: Known) -> int:
    from tightrank.verify.run import client

    directory: Path = arguments.resume
    with store.held(directory):              # before it is read: who holds it may have more in a moment
        before = store.load(directory)
        arguments.worker = arguments.worker or before.target["worker"]
        arguments.endpoint = arguments.endpoint or before.target["url"]
        async with client() as http:
            target = await find_target(http, arguments, known)
            other = "; ".join(islice(differences(before.target, target.identity()), 3))
            if other:
                raise ConfigError(f"--resume {directory}: it was begun on something else: {other}; begin a new ramp")
            return await _run(http, target, _settings(arguments, known, target), before, directory)


async def _run(http: Any, target: Target, settings: Settings, ramp: Ramp, directory: Path) -> int:
    from tightrank.verify.progress import display
    from tightrank.verify.run import Runner

    _save(directory, ramp)                   # a disk that takes nothing is found before the first hour
    return _told(await Runner(http, target, settings, display()).run(ramp, partial(_save, directory)), directory)


def _settings(arguments: argparse.Namespace, known: Known, target: Target) -> Settings:
    return Settings(api_key(arguments, known, target.worker), arguments.timeout, known.token_range)


def _begun(arguments: argparse.Namespace, known: Known, target: Target) -> Ramp:
    floor = known.floor_bytes if arguments.floor is None else arguments.floor
    if floor is None:
        raise ConfigError("--floor: without a configuration its default is not known; give it, for example --floor 2GiB")
    answer = arguments.answer_tokens or _ANSWER_TOKENS
    longest = None if target.longest_prompt_tokens is None else target.longest_prompt_tokens - (answer - 1)
    if longest is not None and longest < 1:
        raise ConfigError(f"--answer-tokens: {answer} leave no room for a prompt; {target.longest_prompt_tokens} is the most")
    try:
        sizes = sizes_for(arguments.sizes, longest)
    except ValueError as error:
        raise ConfigError(f"--sizes: {error}") from None
    return Ramp(time.time(), target.identity(), floor, target.guard_floor_bytes, sizes, answer)


def _directory(asked: Path | None, target: Target) -> Path:
    """A new one. Raises ConfigError."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = asked or Path(f"verify-ramp-{target.worker}-{stamp}")
    if (path / store.REPORT).exists():
        raise ConfigError(f"{path}: there is a report already; go on with it (--resume), or take another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}; name a directory that can be made") from None
    return path


def _save(directory: Path, ramp: Ramp) -> None:
    """Raises OSError; what was measured last is then on stdout."""
    try:
        store.save(directory, ramp)
    except OSError:
        if ramp.sizes:
            print(json.dumps(store.to_json(ramp)["sizes"][-1]), flush=True)
        raise


def _told(ramp: Ramp, directory: Path) -> int:
    passed, sentence = verdict(ramp)
    print(f"{'passed' if passed else 'not passed'}: {sentence}\n{directory / 'report.md'}")
    if passed:
        return 0
    if ramp.sizes[-1].outcome in _TRY_AGAIN:
        print(f"tightrank: go on with: tightrank verify ramp --resume {directory}", file=sys.stderr)
        return EXIT_TEMPORARY
    return _EXIT_FAILED


# --- compare ----------------------------------------------------------------------------------------------------------

def _register_compare(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "compare", help="two ramps side by side: rates, lowest memory, verdict",
        description="Sets two ramps side by side: for each size and prefix the ratio of the rates, and the lowest memory. "
                    "`worse`: a size passed in A and not in B, or B is slower by more than --tolerance. Exit codes: 0 better "
                    "or the same, 1 worse, 78 a report that cannot be used.",
        epilog="example: tightrank verify compare before/report.json after/report.json")
    parser.add_argument("a", type=Path, metavar="A.json", help="report.json of a ramp, or its directory")
    parser.add_argument("b", type=Path, metavar="B.json", help="the one that is judged")
    parser.add_argument("--tolerance", type=typed(_share), default=0.05, metavar="SHARE",
                        help="how much slower a size may be (default: 0.05)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(call=_compare)


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share < 1:
        raise ValueError(f"'{text}': a share from 0 to under 1 is wanted, for example 0.05")
    return share


def _compare(arguments: argparse.Namespace) -> int:
    a, b = store.load(arguments.a), store.load(arguments.b)
    try:
        found = compare(a, b, arguments.tolerance)
    except ValueError as error:
        raise ConfigError(f"{arguments.a} and {arguments.b}: {error}") from None
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(table(list(band_rows(found)), right=(2, 3, 4)), "", table(list(size_rows(found)), right=range(1, 8)), "",
              f"B is {found.verdict}", *found.worse, sep="\n")
        if found.only:
            print(f"in one of them only: {', '.join(map(short, found.only))}")
        for difference in found.different:
            print(f"measured on something else: {difference}")
    return _EXIT_FAILED if found.verdict == "worse" else 0
