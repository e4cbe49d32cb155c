"""`tightrank plan`: what would be started, and the chunk at each prefix."""
from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator

from tightrank import host, inputs, plan
from tightrank.adapter import INJECT, wire
from tightrank.cli.common import add_command_line, add_config_options, bold, load_config, table
from tightrank.plan.line import grouped
from tightrank.records import WorkerSpec


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan", help="show what would be started: command lines, environment, the line's chunks",
        description="Shows for each worker its command line and environment (secrets masked), the hooks, the line, the "
                    "longest request, and the chunk at each prefix. Starts nothing, touches nothing.")
    add_config_options(parser)
    add_command_line(parser)
    parser.add_argument("--json", action="store_true", help="for machines; all bands of the schedule")
    parser.set_defaults(call=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    config = load_config(arguments).config
    specs = plan.build(config, host.read(), inputs.read(config, os.environ))
    if arguments.json:
        print(json.dumps(plan.to_json(specs), indent=2))
    else:
        print("\n\n".join("\n".join(_worker(spec, sys.stdout.isatty())) for spec in specs))
    return 0


def _worker(spec: WorkerSpec, colour: bool) -> Iterator[str]:
    argv, env = plan.masked(spec)
    yield bold(f"{spec.name}: {spec.engine}, role {spec.role}, http://{spec.host}:{spec.port}", colour)
    rows = [("command", shlex.join(argv)), ("environment", " ".join(f"{name}={shlex.quote(text)}"
                                                                    for name, text in env.items())),
            ("ranks", f"{spec.tensor_parallel * spec.pipeline_parallel} (tensor_parallel {spec.tensor_parallel} x "
                      f"pipeline_parallel {spec.pipeline_parallel}), devices {', '.join(spec.devices) or 'as seen'}"),
            ("adapter", f"{INJECT} in front of PYTHONPATH; TIGHTRANK_ADAPTER and TIGHTRANK_RUN new at each start"),
            ("hooks", ", ".join(_hooks(spec)) or "none"), *_line(spec),
            ("drain", f"{spec.drain_seconds:g} s"), *(("note", note) for note in spec.notes)]
    yield from ("  " + line for line in table(rows).splitlines())
    if spec.schedule:
        yield ""
        yield from ("  " + line for line in _schedule(spec).splitlines())


def _hooks(spec: WorkerSpec) -> Iterator[str]:
    for hook, values in spec.hooks.items():
        yield f"{hook} (observed)" if values.get(wire.OBSERVE) else hook


def _line(spec: WorkerSpec) -> Iterator[tuple[str, str]]:
    if spec.line is None:
        return
    line = spec.line
    yield "line", (f"budget {line.budget:,} token², never under {line.floor_budget:,}; rule {line.rule}, chunks "
                   f"{line.minimum} to {line.maximum} in steps of {line.step} {line.granule}")
    yield "longest request", f"{spec.context_tokens:,} tokens"


def _schedule(spec: WorkerSpec) -> str:
    rows = [("prefix from", "to", "chunk", "down to")]
    for group in grouped(spec.schedule):
        first, last = group[0], group[-1]
        rows.append((f"{first.from_tokens:,}", f"{last.to_tokens:,}", _chunk(first.chunk_tokens),
                     _chunk(last.chunk_tokens) if last is not first else ""))
    return table(rows, right=(0, 1, 2, 3))


def _chunk(tokens: int) -> str:
    """0: only the rest of a prompt, shorter than the smallest chunk, still stands there."""
    return f"{tokens:,}" if tokens else "the rest"
