"""`tightrank up` and `tightrank run`: check everything, take the state directory, then become the guard."""
from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tightrank import check, host, inputs, plan
from tightrank.adapter import wire
from tightrank.check.item import FAIL, UNKNOWN, WARN, Item
from tightrank.cli.common import add_config_options, load_config
from tightrank.config import Config
from tightrank.config.command import from_command
from tightrank.errors import ConfigError

_GUARD = Path(__file__).resolve().parent.parent / "guard"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = commands.add_parser("up", help="bring the deployment up and supervise it (stays in the foreground)",
                             description="Checks the configuration, then becomes the guard, which starts the daemon, "
                             "which starts the workers. SIGTERM drains and ends; a second one ends now. Exit codes: "
                             "0 after a clean stop, 69 a worker had failed for good, 75 ended before it was clean, "
                             "78 it cannot work (nothing was started, see `tightrank check`; or on_failed is exit).")
    add_config_options(up)
    _add_force(up)
    up.set_defaults(call=lambda arguments: bring_up(load_config(arguments).config, arguments.force))
    run = commands.add_parser("run", help="supervise an engine command line without any YAML",
                              usage="tightrank run [--set KEY=VALUE] -- ENGINE COMMAND LINE",
                              description="Example: tightrank run --set guard.floor=2GiB -- vllm serve /models/m --port 8000")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                     help="a configuration key, e.g. line.budget=2.0e8 (may be given again)")
    _add_force(run)
    run.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- ENGINE COMMAND LINE")
    run.set_defaults(call=_run)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="start whatever the engine, its files and this host look like")


def _run(arguments: argparse.Namespace) -> NoReturn:
    words = arguments.command_line
    loaded = from_command(words[1:] if words[:1] == ["--"] else words, os.environ, arguments.settings)
    bring_up(loaded.config, arguments.force)


def bring_up(config: Config, force: bool) -> NoReturn:
    """Never returns: this process becomes the guard. Raises ConfigError while nothing has been started."""
    read = inputs.read(config, os.environ)
    specs = plan.build(config, host.read(), read)
    check.refuse(config, specs, os.environ)
    _preflight(check.look(config, specs, read, thorough=False), force)
    state = Path(config.state_directory)
    lock = take_lock(state)
    run = state / "run"
    orders = {"schema": 1, "daemon_argv": [sys.executable, "-P", "-m", "tightrank.daemon", str(run / "config.json")],
              "run_directory": str(run), "floor_bytes": config.guard.floor_bytes, "priority": config.guard.priority,
              "lock_descriptor": lock, "dry_run": config.guard.stop_mode == "dry-run"}
    try:
        for directory in (run, state / "logs"):
            directory.mkdir(mode=0o700, exist_ok=True)
        wire.write_json(str(run / "config.json"), json.loads(config.to_json()))
        wire.write_json(str(run / "guard.json"), orders)
    except OSError as error:
        raise _unusable(state, error) from None
    os.set_inheritable(lock, True)
    sys.stdout.flush()
    # -I and -S keep the guard small (about 12 MiB) and its modules its own: no site-packages, no sitecustomize.
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", str(_GUARD), str(run / "guard.json")])


def _preflight(found: Sequence[Item], force: bool) -> None:
    """Says what is not in order. Raises ConfigError for the last thing that fails, unless it is to be started all the same."""
    failures = [item for item in found if item.status == FAIL]
    names: dict[tuple[str, str], list[str]] = {}           # of items of which the same is to be said
    for item in found:
        if item.status in (WARN, UNKNOWN):
            names.setdefault((item.status, item.text), []).append(item.item)
    for (status, text), items in names.items():
        print(f"tightrank: {status}: {', '.join(items)}: {text}", file=sys.stderr)
    for item in failures if force else failures[:-1]:
        print(f"tightrank: {item.cause}: {item.text}", file=sys.stderr)
    if failures and not force:
        raise ConfigError(failures[-1].text, cause=failures[-1].cause or "")
    sys.stderr.flush()


def take_lock(state: Path) -> int:
    """The descriptor that holds <state>/lock for as long as it is open. Raises ConfigError."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(state, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"state_directory={state}: another supervisor holds it; stop that one (tightrank stop) or give "
                          "this deployment its own state_directory", cause="state-directory-in-use") from None
    except OSError as error:               # a network file system without locks
        raise _unusable(state, error) from None
    return descriptor


def _unusable(state: Path, error: OSError) -> ConfigError:
    where = f"{error.filename}: " if error.filename else ""
    return ConfigError(f"state_directory={state}: cannot be used ({where}{error.strerror}); give a directory of your own on "
                       "a local disk with space", cause="state-directory-unusable")
