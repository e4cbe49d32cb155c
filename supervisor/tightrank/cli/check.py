"""`tightrank check`: every value and where it came from, then whether this host can start it."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from tightrank import check, host, inputs, plan
from tightrank.check.item import FAIL, PASS, UNKNOWN, WARN, Item, refused
from tightrank.cli.common import add_command_line, add_config_options, dim, load_config, table
from tightrank.config import Loaded
from tightrank.config.keys import json_schema
from tightrank.errors import EXIT_CONFIG, ConfigError

_COLOURS = {PASS: "32", WARN: "33", FAIL: "31;1", UNKNOWN: "36"}
_STATUS_COLUMN = max(map(len, _COLOURS))


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check", help="show every value and where it came from, and test what a start needs",
        description="Shows every key with its value and its origin, then looks at what a start needs: the model's files, the "
                    "engine and its own parser, sizes, memory of each rank, ports, limits, leftovers, settings that do harm. "
                    f"Starts nothing, reads no weight. Exit codes: 0 it can start, {EXIT_CONFIG} it cannot (one line for each "
                    "reason); what is `warn` or `unknown` is for you to judge.")
    add_config_options(parser)
    add_command_line(parser)
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of the file and end")
    parser.set_defaults(call=_check)


def _check(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    loaded = load_config(arguments)
    found = _items(loaded)
    failures = [item for item in found if item.status == FAIL]
    if arguments.json:
        print(json.dumps(_json(loaded, found, failures), indent=2))
        return EXIT_CONFIG if failures else 0
    colour = sys.stdout.isatty()
    print(_values(loaded, colour), "", _table(found, colour), sep="\n")
    sys.stdout.flush()
    for item in failures:
        print(f"tightrank: {item.cause}: {item.text}", file=sys.stderr)
    if not failures:
        print("\nthis host can start it")
    return EXIT_CONFIG if failures else 0


def _items(loaded: Loaded) -> list[Item]:
    try:
        read = inputs.read(loaded.config, os.environ)
        specs = plan.build(loaded.config, host.read(), read)
    except ConfigError as error:
        return [refused("configuration", error)]
    return check.look(loaded.config, specs, read, thorough=True)


def _json(loaded: Loaded, found: Sequence[Item], failures: Sequence[Item]) -> dict[str, object]:
    return {"ok": not failures, "items": [item.to_json() for item in found],
            "problems": [{"cause": item.cause, "message": item.text} for item in failures],
            "values": [{"key": row.key, "value": row.value, "from": row.origin} for row in loaded.rows]}


def _table(found: Sequence[Item], colour: bool) -> str:
    lines = table([(item.status.ljust(_STATUS_COLUMN), item.item, item.text) for item in found]).splitlines()
    if not colour:
        return "\n".join(lines)
    return "\n".join(f"\033[{_COLOURS[item.status]}m{line[:_STATUS_COLUMN]}\033[0m{line[_STATUS_COLUMN:]}"
                     for line, item in zip(lines, found, strict=True))


def _values(loaded: Loaded, colour: bool) -> str:
    lines = table([(row.key, row.value, row.origin) for row in loaded.rows]).splitlines()
    return "\n".join(dim(line, colour and row.origin == "default")
                     for line, row in zip(lines, loaded.rows, strict=True))
