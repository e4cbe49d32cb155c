"""`tightrank verify parity`: whether an engine answers with the adapter as it does without, token by token."""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightrank import __version__
from tightrank.cli.common import table
from tightrank.cli.target import add_target_options, api_key, find_target, guarded, kind_of, read_known, typed
from tightrank.config.units import Duration, Url
from tightrank.errors import EXIT_TEMPORARY, ConfigError
from tightrank.verify import store
from tightrank.verify.parity import Answer, Prompt, Verdict, alike, from_json, judge, sentence, to_json
from tightrank.verify.ramp import parse_sizes, parse_tokens, short
from tightrank.verify.target import token_range

_EXIT_FAILED = 1
_SIZES = (64, 1000, 4000)      # one chunk, and several under most lines
_PROMPTS, _ANSWER_TOKENS = 2, 32
_DESCRIPTION = """\
Sends the same prompts to an engine with the adapter and to one without, or before and
after a restart, and compares the greedy answers token by token, with their logprobs.
An answer that parts where two tokens were nearly as likely (logprobs closer than 0.1 in
both) is a near tie and no difference: chunks of another size add up in another order.
"""
_EXAMPLES = """examples:
  tightrank verify parity --record with.json        then stop it, start it with --set hooks= and
  tightrank verify parity --against with.json       say how it answers without the adapter
  tightrank verify parity --with http://127.0.0.1:8001 --without http://127.0.0.1:8002

exit codes: 0 alike, or recorded; 1 different, or an endpoint refused; 69 nobody answers;
  75 interrupted, or a full disk; 78 bad input
"""


def register(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "parity", help="greedy answers with and without the adapter, token by token",
        description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--record", type=Path, metavar="FILE", help="keep the answers of what runs now")
    how.add_argument("--against", type=Path, metavar="FILE", help="compare what runs now with a record; same prompts")
    how.add_argument("--with", type=kind_of(Url()), dest="adapted", metavar="URL", help="the engine with the adapter")
    parser.add_argument("--without", type=kind_of(Url()), metavar="URL", help="the engine without it")
    parser.add_argument("--sizes", type=typed(parse_sizes), metavar="LIST",
                        help=f"tokens of the prompts (default: {','.join(map(str, _SIZES))})")
    parser.add_argument("--prompts", type=typed(parse_tokens), metavar="N", help=f"of each size (default: {_PROMPTS})")
    parser.add_argument("--answer-tokens", type=typed(parse_tokens), metavar="N",
                        help=f"of each answer (default: {_ANSWER_TOKENS})")
    parser.add_argument("--timeout", type=kind_of(Duration(1.0)), default=600.0, metavar="TIME",
                        help="for each answer (default: 10m)")
    parser.add_argument("--json", action="store_true", help="the verdicts, for machines")
    parser.set_defaults(call=_parity)


def _parity(arguments: argparse.Namespace) -> int:
    from tightrank.verify.client import Refused

    if (arguments.adapted is None) != (arguments.without is None):
        raise ConfigError("--with and --without: give both")
    if arguments.against is not None and (arguments.sizes or arguments.prompts or arguments.answer_tokens):
        raise ConfigError("--against: the prompts and their answers are those of the record; leave the options out")
    if arguments.record is not None and arguments.record.exists():
        raise ConfigError(f"--record {arguments.record}: there is something already; name another file")
    recorded = _recorded(arguments.against) if arguments.against is not None else ()
    try:
        return guarded(lambda: _run(arguments, recorded))
    except Refused as error:
        print(f"tightrank: {error}", file=sys.stderr)
        return _EXIT_FAILED


def _recorded(file: Path) -> tuple[Answer, ...]:
    """Raises ConfigError."""
    try:
        found = from_json(store.read_json(file, "parity"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: has not the form of a record ({type(error).__name__}: {error})") from None
    if not found:
        raise ConfigError(f"{file}: holds no answers; record anew")
    return found


async def _run(arguments: argparse.Namespace, recorded: Sequence[Answer]) -> int:
    from tightrank.verify.greedy import answers, look
    from tightrank.verify.run import client

    known = None if arguments.adapted is not None else read_known(arguments)
    async with client() as http:
        if known is None:
            key = api_key(arguments, None, "")
            ends = [await look(http, url, key) for url in (arguments.without, arguments.adapted)]
        else:
            target = await find_target(http, arguments, known)
            ends = [await look(http, target.url, api_key(arguments, known, target.worker))]
        prompts = [answer.prompt for answer in recorded] or _prompts(arguments, known.token_range if known else token_range({}))
        length = len(recorded[0].tokens) if recorded else arguments.answer_tokens or _ANSWER_TOKENS
        given = [await answers(http, each, prompts, length, arguments.timeout) for each in ends]
    if arguments.record is not None:
        return _record(arguments.record, to_json(ends[0].url, ends[0].engine, ends[0].model, given[0]))
    return _told([judge(a, b) for a, b in zip(recorded or given[0], given[-1], strict=True)], arguments.json)


def _prompts(arguments: argparse.Namespace, ids: tuple[int, int]) -> list[Prompt]:
    return [Prompt(number, tokens, *ids) for tokens in arguments.sizes or _SIZES
            for number in range(arguments.prompts or _PROMPTS)]


def _record(file: Path, body: dict[str, Any]) -> int:
    text = json.dumps({"schema": store.SCHEMA, "kind": "parity", "tightrank": __version__, **body})
    try:
        store.write_whole(file, text + "\n")
    except OSError as error:
        print(text)                          # so that it is not lost
        print(f"tightrank: {file}: {error.strerror}", file=sys.stderr)
        return EXIT_TEMPORARY
    print(f"{len(body['answers'])} answers of {body['engine']} at {body['url']} are in {file}; after the restart: "
          f"tightrank verify parity --against {file}")
    return 0


def _told(verdicts: Sequence[Verdict], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"alike": alike(verdicts), "answers": [_row_json(each) for each in verdicts]}, indent=2))
    else:
        print(table([("prompt", "answer", "first difference", "gap there", "largest logprob difference"),
                     *map(_row, verdicts)], right=(2, 3, 4)), sentence(verdicts), sep="\n")
    return 0 if alike(verdicts) else _EXIT_FAILED


def _row(verdict: Verdict) -> tuple[str, ...]:
    return (f"{short(verdict.prompt.tokens)} ({verdict.prompt.number})", verdict.result,
            "" if verdict.at is None else f"token {verdict.at}", "" if verdict.gap is None else f"{verdict.gap:.3f}",
            f"{verdict.largest_logprob_difference:.2g}")


def _row_json(verdict: Verdict) -> dict[str, Any]:
    return {"prompt_tokens": verdict.prompt.tokens, "number": verdict.prompt.number, "result": verdict.result,
            "first_difference": verdict.at, "gap": verdict.gap,
            "largest_logprob_difference": verdict.largest_logprob_difference}
