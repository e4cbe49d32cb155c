"""The command `tightrank`. One module for each group of commands; a command's function returns the exit code."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from tightrank.errors import EXIT_CONFIG, ConfigError

# In the order of `tightrank --help`. Each module has register(commands), which sets `call` for its commands.
MODULES = ("up", "gateway", "check", "plan", "client", "verify", "explain", "bundle")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Bad input is one line on stderr and exit code 78."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.call(arguments)
    except ConfigError as error:
        print(f"tightrank: {error.cause}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BrokenPipeError:      # `tightrank plan | head`
        sys.stderr.close()
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tightrank", description="Supervises LLM engines: keeps prefill batches under "
                                     "the line and the host above its memory floor, and says why an engine failed.")
    parser.add_argument("--version", action="version", version=f"tightrank {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in MODULES:
        import_module(f"tightrank.cli.{name}").register(commands)
    return parser


def _version() -> str:
    try:
        return version("tightrank")
    except PackageNotFoundError:
        return "of a checkout that is not installed"
