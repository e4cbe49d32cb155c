"""What the kinds of `tightrank verify` share: whom to ask, with which key, and what can go wrong around it."""
from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tightrank import inputs
from tightrank.cli.common import DEFAULT_FILE, add_command_line, add_config_options, load_config
from tightrank.config import read_secret
from tightrank.config.units import Kind, Url, local_url
from tightrank.errors import EXIT_TEMPORARY, EXIT_UNAVAILABLE, ConfigError
from tightrank.verify.target import NotThere, Target, find, token_range

T = TypeVar("T")


def add_target_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    add_command_line(parser)
    parser.add_argument("--url", type=kind_of(Url()), help="the supervisor's address (default: http.host and http.port); with "
                                                           "it no configuration is needed")
    parser.add_argument("--worker", metavar="NAME", help="which worker (default: the first that takes prompts)")
    parser.add_argument("--endpoint", type=kind_of(Url()), metavar="URL", help="where requests go (default: the worker's own "
                        "address; for a prefill worker the gateway's)")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the engine's API key (default: as configured)")


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return convert


def kind_of(kind: Kind) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{text}' {error}") from None
    return convert


# --- where to ask -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Known:
    """What the command line and the configuration say. None: they do not."""
    supervisor: str
    gateway: str | None
    floor_bytes: int | None
    api_keys: dict[str, str]
    token_range: tuple[int, int]


def read_known(arguments: argparse.Namespace) -> Known:
    """Raises ConfigError."""
    if arguments.url and not (arguments.command_line or arguments.settings or Path(arguments.config).exists()):
        if arguments.config != DEFAULT_FILE:
            load_config(arguments)           # which says that it is not there
        return Known(arguments.url, None, None, {}, token_range({}))
    config = load_config(arguments).config
    read = inputs.read(config, os.environ)
    return Known(arguments.url or local_url(config.http.host, config.http.port),
                  local_url(config.gateway.host, config.gateway.port), config.guard.floor_bytes + config.guard.margin_bytes,
                  dict(read.api_keys), token_range(read.model))


def api_key(arguments: argparse.Namespace, known: Known | None, worker: str) -> str | None:
    if arguments.api_key_file is None:
        return known.api_keys.get(worker) if known else None
    return read_secret(arguments.api_key_file, lambda why: ConfigError(f"--api-key-file: {why}"))


async def find_target(http: Any, arguments: argparse.Namespace, known: Known) -> Target:
    """Raises NotThere, ConfigError."""
    from tightrank.verify.client import Supervisor, longest_request

    supervisor = Supervisor(http, known.supervisor)
    target = find(await supervisor.status(), await supervisor.plan(), known.supervisor, worker=arguments.worker,
                  endpoint=arguments.endpoint, gateway=known.gateway)
    if target.longest_prompt_tokens is not None:
        return target
    limit = await longest_request(http, target.url, api_key(arguments, known, target.worker))
    return replace(target, longest_prompt_tokens=None if limit is None else limit - 1)


def guarded(work: Callable[[], Any]) -> int:
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
