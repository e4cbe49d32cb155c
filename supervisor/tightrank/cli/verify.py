"""`tightrank verify`: prompts of growing length against what runs, and what two such runs differ in."""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tightrank import inputs
from tightrank.cli.common import DEFAULT_FILE, add_command_line, add_config_options, load_config
from tightrank.config import read_secret
from tightrank.config.units import Duration, Kind, Size, Url, local_url
from tightrank.errors import EXIT_TEMPORARY, EXIT_UNAVAILABLE, ConfigError
from tightrank.verify import store
from tightrank.verify.ramp import Outcome, Ramp, parse_sizes, parse_tokens, sizes_for, verdict
from tightrank.verify.target import NotThere, Target, differences, find, token_range

_EXIT_FAILED = 1
_ANSWER_TOKENS = 4             # a few: decode is not what is measured
_TRY_AGAIN = (Outcome.LOST, Outcome.INTERRUPTED)
_RAMP_EXAMPLES = """examples:
  tightrank verify ramp                                   64k to 500k tokens, or scaled to the longest prompt
  tightrank verify ramp --sizes 8k,16k,32k --floor 2GiB
  tightrank verify ramp --endpoint http://127.0.0.1:8000  through the gateway
  tightrank verify ramp --resume verify-ramp-w0-20260911T101500Z
exit codes: 0 all sizes passed; 1 one did not (memory under --floor, a guard event, an error, the time limit);
  69 no supervisor answers or the worker is not up; 75 ended before its time (Ctrl-C, a lost connection, a full disk):
  --resume goes on; 78 bad input
"""
T = TypeVar("T")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify", help="prove with real prompts that what runs keeps its memory and its speed",
        description="Proves with real prompts that what runs keeps its memory and its speed.")
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    _register_ramp(kinds)


def _register_ramp(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "ramp", help="longer and longer prompts: rate, chunks, lowest memory",
        description="Sends prompts of growing length to the live endpoint, one after another, and watches the supervisor "
                    "meanwhile. For each size: prefill rate at each prefix, chunks taken, lowest available memory, what the "
                    "guard decided. Stops by itself at the first level that fires, when the worker is no longer up, and when "
                    "memory was under --floor. Prompts are random tokens, new each time, so that nothing of them is cached. "
                    "The report (report.md with three plots, report.json) is written anew after each size.",
        epilog=_RAMP_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_target_options(parser)
    parser.add_argument("--sizes", type=_typed(parse_sizes), metavar="LIST",
                        help="tokens of each prompt, e.g. 64k,128k,262144 (default: 64k,128k,200k,256k,400k,500k, scaled down "
                             "where the longest prompt is shorter)")
    parser.add_argument("--floor", type=_kind(Size()), metavar="SIZE",
                        help="fail when the host had less available memory (default: guard.floor + guard.margin)")
    parser.add_argument("--answer-tokens", type=_typed(parse_tokens), metavar="N",
                        help=f"of each answer (default: {_ANSWER_TOKENS})")
    parser.add_argument("--timeout", type=_kind(Duration(1.0)), default=3600.0, metavar="TIME",
                        help="for each size (default: 1h)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, metavar="DIR", help="where the report goes (default: verify-ramp-WORKER-TIME)")
    where.add_argument("--resume", type=Path, metavar="DIR", help="go on with the report there: same worker, configuration, "
                                                                  "sizes and floor")
    parser.set_defaults(call=_ramp)


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_command_line(parser)
    parser.add_argument("--url", type=_kind(Url()), help="the supervisor's address (default: http.host and http.port); with it "
                                                         "no configuration is needed")
    parser.add_argument("--worker", metavar="NAME", help="which worker (default: the first that takes prompts)")
    parser.add_argument("--endpoint", type=_kind(Url()), metavar="URL", help="where requests go (default: the worker's own "
                        "address; for a prefill worker the gateway's)")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the engine's API key (default: as configured)")


def _typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return convert


def _kind(kind: Kind) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{text}' {error}") from None
    return convert


# --- where to ask -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Known:
    """What the command line and the configuration say. None: they do not."""
    supervisor: str
    gateway: str | None
    floor_bytes: int | None
    api_keys: dict[str, str]
    token_range: tuple[int, int]


def _known(arguments: argparse.Namespace) -> _Known:
    """Raises ConfigError."""
    if arguments.url and not (arguments.command_line or arguments.settings or Path(arguments.config).exists()):
        if arguments.config != DEFAULT_FILE:
            load_config(arguments)           # which says that it is not there
        return _Known(arguments.url, None, None, {}, token_range({}))
    config = load_config(arguments).config
    read = inputs.read(config, os.environ)
    return _Known(arguments.url or local_url(config.http.host, config.http.port),
                  local_url(config.gateway.host, config.gateway.port), config.guard.floor_bytes + config.guard.margin_bytes,
                  dict(read.api_keys), token_range(read.model))


def _key(arguments: argparse.Namespace, known: _Known, worker: str) -> str | None:
    if arguments.api_key_file is None:
        return known.api_keys.get(worker)
    return read_secret(arguments.api_key_file, lambda why: ConfigError(f"--api-key-file: {why}"))


async def _find(http: Any, arguments: argparse.Namespace, known: _Known) -> Target:
    """Raises NotThere, ConfigError."""
    from tightrank.verify.client import Supervisor, longest_request

    supervisor = Supervisor(http, known.supervisor)
    target = find(await supervisor.status(), await supervisor.plan(), known.supervisor, worker=arguments.worker,
                  endpoint=arguments.endpoint, gateway=known.gateway)
    if target.longest_prompt_tokens is not None:
        return target
    limit = await longest_request(http, target.url, _key(arguments, known, target.worker))
    return replace(target, longest_prompt_tokens=None if limit is None else limit - 1)


# --- ramp -------------------------------------------------------------------------------------------------------------

def _ramp(arguments: argparse.Namespace) -> int:
    if arguments.resume and (arguments.sizes or arguments.floor is not None or arguments.answer_tokens):
        raise ConfigError("--resume: sizes, floor and length of the answers are those of its report; leave the options out")
    known = _known(arguments)
    before = store.load(arguments.resume) if arguments.resume else None
    if before is not None:
        arguments.worker = arguments.worker or before.target["worker"]
        arguments.endpoint = arguments.endpoint or before.target["url"]
    return _guarded(lambda: _measured(arguments, known, before))


def _guarded(work: Callable[[], Any]) -> int:
    """Runs a coroutine; SIGTERM ends it as Ctrl-C does. What can go wrong outside becomes one line and an exit code."""
    async def run() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        code: int = await work()
        return code

    try:
        return asyncio.run(run())
    except NotThere as error:
        print(f"tightrank: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except OSError as error:
        print(f"tightrank: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return EXIT_TEMPORARY
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("tightrank: interrupted", file=sys.stderr)
        return EXIT_TEMPORARY


async def _measured(arguments: argparse.Namespace, known: _Known, before: Ramp | None) -> int:
    from tightrank.verify.progress import display
    from tightrank.verify.run import Runner, Settings, client

    async with client() as http:
        target = await _find(http, arguments, known)
        ramp = _begun(arguments, known, target) if before is None else _same(before, target, arguments.resume)
        settings = Settings(_key(arguments, known, target.worker), arguments.timeout, known.token_range)
        directory = arguments.resume or _directory(arguments.output, target)
        with store.held(directory):
            _save(directory, ramp)           # a disk that takes nothing is found before the first hour
            ramp = await Runner(http, target, settings, display()).run(ramp, partial(_save, directory))
    return _told(ramp, directory)


def _begun(arguments: argparse.Namespace, known: _Known, target: Target) -> Ramp:
    floor = known.floor_bytes if arguments.floor is None else arguments.floor
    if floor is None:
        raise ConfigError("--floor: without a configuration its default is not known; give it, for example --floor 2GiB")
    answer = arguments.answer_tokens or _ANSWER_TOKENS
    longest = target.longest_prompt_tokens
    try:
        sizes = sizes_for(arguments.sizes, None if longest is None else longest - (answer - 1))
    except ValueError as error:
        raise ConfigError(f"--sizes: {error}") from None
    return Ramp(time.time(), target.identity(), floor, target.guard_floor_bytes, sizes, answer)


def _same(before: Ramp, target: Target, directory: Path) -> Ramp:
    found = list(differences(before.target, target.identity()))
    if found:
        raise ConfigError(f"--resume {directory}: it was begun on something else: {'; '.join(found[:3])}; begin a new ramp")
    return before


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
