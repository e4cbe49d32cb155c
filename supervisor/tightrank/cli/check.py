"""`tightrank check`: every value and where it came from, then whether this host can start it."""
from __future__ import annotations

import argparse
import json
import os
import sys

from tightrank import check, host, inputs, plan
from tightrank.cli.common import add_command_line, add_config_options, dim, load_config, table
from tightrank.config import Loaded
from tightrank.config.keys import json_schema
from tightrank.errors import EXIT_CONFIG, ConfigError


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check", help="show every value and where it came from, and test what a start needs",
        description="Shows every key with its value and its origin, then tests what a start needs of this host: model, "
                    "engine program, hooks, ports, state directory. Starts nothing. Exit codes: 0 it can start, "
                    f"{EXIT_CONFIG} it cannot (one line for each reason).")
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
    found = _problems(loaded)
    if arguments.json:
        print(json.dumps({"ok": not found, "problems": [{"cause": problem.cause, "message": str(problem)}
                                                        for problem in found],
                          "values": [{"key": row.key, "value": row.value, "from": row.origin} for row in loaded.rows]},
                         indent=2))
        return EXIT_CONFIG if found else 0
    print(_values(loaded, sys.stdout.isatty()))
    sys.stdout.flush()
    for problem in found:
        print(f"tightrank: {problem.cause}: {problem}", file=sys.stderr)
    if not found:
        print("\nthis host can start it")
    return EXIT_CONFIG if found else 0


def _problems(loaded: Loaded) -> list[ConfigError]:
    try:
        specs = plan.build(loaded.config, host.read(), inputs.read(loaded.config, os.environ))
    except ConfigError as error:
        return [error]
    return list(check.problems(loaded.config, specs, os.environ))


def _values(loaded: Loaded, colour: bool) -> str:
    lines = table([(row.key, row.value, row.origin) for row in loaded.rows]).splitlines()
    return "\n".join(dim(line, colour and row.origin == "default")
                     for line, row in zip(lines, loaded.rows, strict=True))
