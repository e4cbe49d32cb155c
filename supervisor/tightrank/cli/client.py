"""`tightrank status | logs | drain | resume | restart | stop`: talk to a supervisor that runs."""
from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tightrank import act
from tightrank.cli.common import add_config_options, load_config
from tightrank.cli.show import status_text
from tightrank.config import read_secret
from tightrank.errors import EXIT_UNAVAILABLE
from tightrank.readers.guard import GuardReader
from tightrank.readers.process import read_process
from tightrank.records import ProcessId

_EXIT_FAILED = 1
_OURS = {"workers", "accepted", "source"}     # one of these is in each answer: /status, a request to a worker, a refusal
_POLL_SECONDS = 0.2
_SPARE_SECONDS = 30.0        # beyond the drain: SIGKILL, hygiene, the daemon's own end


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = _command(commands, "status", "what runs, in which phase, and why not", _status)
    status.add_argument("--json", action="store_true", help="the supervisor's /status as it is")
    logs = _command(commands, "logs", "an engine's output, from the state directory", _logs)
    logs.add_argument("worker", nargs="?", help="which worker (default: the first)")
    logs.add_argument("-n", type=_count, default=50, metavar="LINES", help="how many lines from the end (default: 50)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    for name, words in (("drain", "admit nothing more to a worker; what is in flight ends"),
                        ("resume", "admit again; a worker that was stopped or has failed starts"),
                        ("restart", "drain a worker and start its next generation")):
        command = _command(commands, name, words, _request)
        command.add_argument("worker", help="which worker")
        command.set_defaults(action=name)
    stop = _command(commands, "stop", "drain all workers, end them and the supervisor", _stop)
    stop.add_argument("--now", action="store_true", help="do not wait for requests in flight")


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, words: str,
             call: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    add_config_options(parser)
    if call in (_status, _request):
        parser.add_argument("--url", help="the supervisor's address (default: http.host and http.port of the file)")
    parser.set_defaults(call=call)
    return parser


def _ask(arguments: argparse.Namespace, method: str, path: str, token: str | None = None) -> tuple[int, Any]:
    """(status, body), or (0, None) after one line on stderr when no supervisor answers."""
    import httpx2

    url = arguments.url or _url(arguments)
    headers = {"X-Tightrank": "1", "Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        # trust_env: a proxy of the environment must see neither the request nor the token
        with httpx2.Client(trust_env=False, timeout=10) as client:
            response = client.request(method, url + path, headers=headers, content=b"{}" if method == "POST" else None)
        body = response.json()
        if isinstance(body, dict) and _OURS & body.keys():
            return response.status_code, body
        why = f"its answer, status {response.status_code}, is not ours"
    except UnicodeEncodeError:
        why = "TIGHTRANK_TOKEN is not ASCII"
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = type(error).__name__
    except ValueError:
        why = "its answer is not ours"
    print(f"tightrank: no supervisor answers at {url} ({why}); start one with `tightrank up`", file=sys.stderr)
    return 0, None


def _url(arguments: argparse.Namespace) -> str:
    http = load_config(arguments).config.http
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(http.host, http.host)
    return f"http://[{host}]:{http.port}" if ":" in host else f"http://{host}:{http.port}"


def _status(arguments: argparse.Namespace) -> int:
    """Exit code 0: ready. 1: not ready. 69: nobody answers."""
    status, body = _ask(arguments, "GET", "/status")
    if not status:
        return EXIT_UNAVAILABLE
    if status != 200:
        print(f"tightrank: {body['error']['message']}", file=sys.stderr)
        return _EXIT_FAILED
    print(json.dumps(body, indent=2) if arguments.json else status_text(body, colour=sys.stdout.isatty()))
    return 0 if body["ready"] else _EXIT_FAILED


def _request(arguments: argparse.Namespace) -> int:
    token = os.environ.get("TIGHTRANK_TOKEN")
    if arguments.url is None and (config := load_config(arguments).config).http.token_file:
        token = read_secret(config.http.token_file, partial(config.error, "http.token_file"))
    status, body = _ask(arguments, "POST", f"/workers/{quote(arguments.worker, safe='')}/{arguments.action}", token)
    if not status:
        return EXIT_UNAVAILABLE
    if status >= 400:
        print(f"tightrank: {body['error']['message']}", file=sys.stderr)
        return _EXIT_FAILED
    print(body.get("message") or f"{arguments.action} {arguments.worker}: asked")
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    config = load_config(arguments).config
    names = [worker.name for worker in config.workers]
    name = arguments.worker or names[0]
    if name not in names:
        print(f"tightrank: no worker {name!r}; there are {', '.join(names)}", file=sys.stderr)
        return _EXIT_FAILED
    path = Path(config.state_directory) / "logs" / f"{name}.log"
    try:
        for line in _tail(path, arguments.n, arguments.follow):
            print(line, end="", flush=arguments.follow)
    except FileNotFoundError:
        print(f"tightrank: {path}: not there; the worker has not started yet", file=sys.stderr)
        return _EXIT_FAILED
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stderr.close()
    except OSError as error:
        print(f"tightrank: {path}: cannot be read ({error.strerror})", file=sys.stderr)
        return _EXIT_FAILED
    return 0


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 0 on is wanted")
    return int(text)


def _tail(path: Path, count: int, follow: bool) -> Iterator[str]:
    """The last `count` lines, then (follow) what comes; a rotated file is taken up again."""
    file = path.open(errors="replace")
    yield from file.readlines()[-count:] if count > 0 else []
    while follow:
        line = file.readline()
        if line:
            yield line
        elif path.exists() and path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            file.close()
            file = path.open(errors="replace")
        else:
            time.sleep(_POLL_SECONDS)


def _stop(arguments: argparse.Namespace) -> int:
    """SIGTERM to the guard of this state directory (two with --now), then waits for its end."""
    config = load_config(arguments).config
    if not os.access(config.state_directory, os.X_OK) and os.path.exists(config.state_directory):
        print(f"tightrank: {config.state_directory}: not yours to read; stop it as the user that started it", file=sys.stderr)
        return EXIT_UNAVAILABLE
    page = GuardReader(Path(config.state_directory) / "run").read()
    guard = ProcessId(page["pid"], page["start_time"]) if page else None
    if guard is None or not act.send(guard, signal.SIGTERM):
        print(f"tightrank: no supervisor runs on {config.state_directory}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    if arguments.now:
        time.sleep(_POLL_SECONDS)        # two signals at once would be one
        act.send(guard, signal.SIGTERM)
    deadline = time.monotonic() + config.limits.drain_seconds + _SPARE_SECONDS
    while time.monotonic() < deadline:
        found = read_process(guard.pid)
        if found is None or found.id != guard or found.state in "ZX":
            print("stopped")
            return 0
        time.sleep(_POLL_SECONDS)
    print(f"tightrank: the supervisor (pid {guard.pid}) has not ended; `tightrank stop --now` ends it", file=sys.stderr)
    return _EXIT_FAILED
