"""`tightrank bundle`: one archive of what a state directory knows, from a supervisor that runs or one that died."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tightrank import bundle, host, inputs, plan
from tightrank.bundle import parts, secrets
from tightrank.cli.common import add_config_options, load_config, table
from tightrank.config import Config
from tightrank.config.units import format_size, local_url
from tightrank.errors import ConfigError
from tightrank.records import WorkerSpec

_EXIT_FAILED = 1
_STATUS_SECONDS = 5.0


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bundle", help="pack journal, logs, stacks, plan and configuration into one archive, without secrets",
        description="Packs what is known of a deployment into one archive: journal, last lines of the engines, stacks, "
                    "status, plan, configuration, kernel lines, versions. Keys and tokens are taken out. A supervisor makes "
                    "such a bundle by itself after each failure; --list shows them.")
    add_config_options(parser)
    parser.add_argument("--output", metavar="FILE", help="where to (default: the state directory's bundles)")
    parser.add_argument("--list", action="store_true", help="show the bundles that are there, oldest first")
    parser.set_defaults(call=_bundle)


def _bundle(arguments: argparse.Namespace) -> int:
    """Exit code 0: it is there, and its name is printed. 1: it is not, and why."""
    config = load_config(arguments).config
    state = Path(config.state_directory)
    try:
        if arguments.list:
            _list(bundle.folder(state))
            return 0
        if not state.is_dir():
            raise NotADirectoryError(0, "no supervisor has run here", str(state))
        print(_make(config, state, arguments.output))
    except OSError as error:
        print(f"tightrank: {error.filename or state}: {error.strerror}", file=sys.stderr)
        return _EXIT_FAILED
    return 0


def _list(directory: Path) -> None:
    rows = [(path.name, format_size(path.stat().st_size), str(path)) for path in bundle.found(directory)]
    print(table(rows, right=(1,)) if rows else f"none in {directory}")


def _make(config: Config, state: Path, output: str | None) -> Path:
    """Raises OSError."""
    if output is None:
        bundle.folder(state).mkdir(mode=0o700, exist_ok=True)
    path = Path(output) if output is not None else bundle.folder(state)
    if output is None or path.is_dir():
        path = path / bundle.name_of(time.time(), "asked")
    made = parts.of_state(state, config, _specs(config), _status(config))
    bundle.write(path, made, secrets.scrubber(secrets.known(config, os.environ)))
    if output is None:
        bundle.tidy(path.parent)
    return path


def _specs(config: Config) -> Sequence[WorkerSpec]:
    """None where the plan cannot be made any more: the rest is worth having."""
    try:
        return plan.build(config, host.read(), inputs.read(config, os.environ))
    except ConfigError:
        return ()


def _status(config: Config) -> str:
    import httpx2

    try:
        with httpx2.Client(trust_env=False, timeout=_STATUS_SECONDS) as client:
            return client.get(f"{local_url(config.http.host, config.http.port)}/status").text
    except httpx2.HTTPError as error:
        return json.dumps({"error": f"no supervisor answers ({type(error).__name__})"}) + "\n"
