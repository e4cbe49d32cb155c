"""What the commands share: where the configuration is, tables, one-line errors."""
from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tightrank.config import Loaded, load
from tightrank.config.command import from_command

DEFAULT_FILE = "tightrank.yaml"


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", default=DEFAULT_FILE, metavar="FILE",
                        help=f"the deployment's file (default: {DEFAULT_FILE})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="a configuration key, e.g. guard.floor=2GiB (may be given again)")
    parser.add_argument("--node-rank", type=int, metavar="K", help="which of nodes.addresses this host is, from 0")


def add_command_line(parser: argparse.ArgumentParser) -> None:
    """For commands that can look at `-- ENGINE COMMAND LINE` in place of a file, as `tightrank run` does."""
    parser.add_argument("command_line", nargs="*", metavar="-- ENGINE COMMAND LINE",
                        help="look at what `tightrank run` would start, without a file")


def load_config(arguments: argparse.Namespace) -> Loaded:
    """Raises ConfigError."""
    if getattr(arguments, "command_line", None):
        return from_command(arguments.command_line, os.environ, arguments.settings)
    rank = [] if arguments.node_rank is None else [f"nodes.rank={arguments.node_rank}"]
    return load(Path(arguments.config), os.environ, [*arguments.settings, *rank])


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns; those in `right` to the right. The last column is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def dim(text: str, colour: bool) -> str:
    return f"\033[2m{text}\033[0m" if colour and text else text


def bold(text: str, colour: bool) -> str:
    return f"\033[1m{text}\033[0m" if colour else text
