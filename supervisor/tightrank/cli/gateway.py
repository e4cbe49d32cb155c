"""`tightrank gateway`: the process that clients talk to."""
from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from tightrank.cli.common import DEFAULT_FILE
from tightrank.config import load_gateway


def register(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "gateway", help="serve OpenAI clients in front of workers and prefill/decode pairs",
        description="Serves OpenAI clients in front of plain workers and of prefill/decode pairs. Needs only the section "
                    "`gateway` of the configuration; without a file all comes from --set and TIGHTRANK_GATEWAY_*.",
        epilog="example: tightrank gateway --set gateway.supervisors=http://10.0.0.1:9470,http://10.0.0.2:9470")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE",
                        help=f"the configuration (default: {DEFAULT_FILE}, if there)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="set one key over the file and the environment")
    parser.set_defaults(call=_gateway)


def _gateway(arguments: argparse.Namespace) -> int:
    from tightrank.gateway.run import run  # late: what it needs takes half a second to import
    path = arguments.config or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    return run(load_gateway(path, os.environ, arguments.settings))
