"""`tightrank gateway`, the process that clients talk to, and `tightrank peers`, what it knows of its engines."""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tightrank.cli.common import DEFAULT_FILE, table
from tightrank.config import Gateway, load_gateway
from tightrank.errors import EXIT_UNAVAILABLE

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def register(commands: Any) -> None:
    """Adds both commands."""
    serve = commands.add_parser(
        "gateway", help="serve OpenAI clients in front of workers and prefill/decode pairs",
        description="Serves OpenAI clients in front of plain workers and of prefill/decode pairs. Needs only the section "
                    "`gateway` of the configuration; without a file all comes from --set and TIGHTRANK_GATEWAY_*.",
        epilog="example: tightrank gateway --set gateway.supervisors=http://10.0.0.1:9470,http://10.0.0.2:9470")
    _options(serve)
    serve.set_defaults(call=_gateway)
    peers = commands.add_parser(
        "peers", help="what a gateway knows of its engines and pairs",
        description="Shows each engine that a gateway knows, whether it gets requests, and which pairs were seen to "
                    "transfer. Exit codes: 0 it can serve, 1 it cannot, 69 no gateway answers.")
    _options(peers)
    peers.add_argument("--url", help="the gateway's address (default: gateway.host and gateway.port)")
    peers.add_argument("--json", action="store_true", help="the gateway's /status as it is")
    peers.set_defaults(call=_peers)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", type=Path, metavar="FILE",
                        help=f"the configuration (default: {DEFAULT_FILE}, if there)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="set one key over the file and the environment")


def _load(arguments: argparse.Namespace) -> Gateway:
    path = arguments.config or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    return load_gateway(path, os.environ, arguments.settings)


def _gateway(arguments: argparse.Namespace) -> int:
    from tightrank.gateway.run import run  # late: what it needs takes half a second to import
    return run(_load(arguments))


def _peers(arguments: argparse.Namespace) -> int:
    import httpx2
    url = arguments.url or _url(_load(arguments))
    try:
        with httpx2.Client(trust_env=False, timeout=5) as client:
            body = client.get(f"{url}/status").json()
        text = json.dumps(body, indent=2) if arguments.json else peers_text(body)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        print(f"tightrank: no gateway answers at {url} ({type(error).__name__}); start one with `tightrank gateway`",
              file=sys.stderr)
        return EXIT_UNAVAILABLE
    print(text)
    return 0 if body["ready"] else 1


def _url(gateway: Gateway) -> str:
    host = _WILDCARDS.get(gateway.host, gateway.host)
    return f"http://[{host}]:{gateway.port}" if ":" in host else f"http://{host}:{gateway.port}"


def peers_text(body: Any) -> str:
    """The gateway's /status for a person."""
    lines = ["ready" if body["ready"] else f"not ready: {body['reason']}", ""]
    rows = [("worker", "role", "engine", "generation", "standing", "running", "waiting", "why")]
    rows += [(w["id"], w["role"], w["engine"], str(w["generation"]), f"{w['standing']} {w['since_seconds']:.0f} s",
              str(w["running"]), f"{w['queued_tokens']} tokens", w["why"]) for w in body["workers"]]
    lines += [table(rows, right=(3, 5, 6)) if body["workers"] else "no engine is known"]
    if body["pairs"]:
        pairs = [(f"{pair['prefill']} + {pair['decode']}", _transfer(pair)) for pair in body["pairs"]]
        lines += ["", table([("pair", "transfer"), *pairs])]
    lost = [f"{each['url']}: {each['why']}" for each in body["supervisors"] if not each["heard"]]
    return "\n".join([*lines, *(["", "supervisors not heard:", *lost] if lost else [])])


def _transfer(pair: Any) -> str:
    return f"seen {pair['proved_age_seconds']:.0f} s ago" if pair["paired"] else f"not seen: {pair['why']}"
