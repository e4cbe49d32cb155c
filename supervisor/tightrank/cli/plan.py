"""`tightrank plan`: what would be started, what each rank would hold, and the chunk at each prefix."""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightrank import host, inputs, plan, survey
from tightrank.adapter import INJECT, wire
from tightrank.cli import budget, picture
from tightrank.cli.common import add_command_line, add_config_options, bold, load_config, table
from tightrank.plan import whatif
from tightrank.plan.budget import memory_plan
from tightrank.plan.terms import MemoryPlan
from tightrank.records import WorkerSpec

Planned = list[tuple[WorkerSpec, MemoryPlan]]


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan", help="show what would be started: command lines, memory of each rank, the line's chunks",
        description="Shows for each worker its command line and environment (secrets masked), the hooks, the line, what each "
                    "rank holds and what binds there, the KV tokens, the longest prompt and the chunk at each prefix; each "
                    "number with its formula and whether it was read, measured or assumed. The model's directory may hold "
                    "config.json alone: its weights are then estimated. Starts nothing, touches nothing.")
    add_config_options(parser)
    add_command_line(parser)
    parser.add_argument("--memory", metavar="SIZE[+SIZE]", help="memory of each rank, or of each in turn (80GiB, 6GiB+4GiB), "
                        "in place of what this host has")
    parser.add_argument("--unified", action="store_true", help="with --memory: it is that of hosts with one rank each, whose "
                        "devices have none of their own, so the guard's floor and the engine's processes count in it")
    parser.add_argument("--what-if", action="append", default=[], metavar="KEY=VALUE", dest="what_if",
                        help=f"show the difference; may be given again. Keys: {', '.join(whatif.ALL)}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the chunks and the memory of each rank into an .svg "
                        "or .png (with --what-if: below each other)")
    parser.add_argument("--json", action="store_true", help="for machines; all bands of the schedule")
    parser.set_defaults(call=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    change = whatif.parse(arguments.what_if)
    if arguments.picture is not None:
        picture.check(arguments.picture)
    before = _planned(arguments, whatif.WhatIf())
    after = _planned(arguments, change) if arguments.what_if else None
    if arguments.picture is not None:
        _draw(arguments.picture, before, after, ", ".join(arguments.what_if))
    if arguments.json:
        print(json.dumps({**_json(before), **({"what_if": _json(after)} if after is not None else {})}, indent=2))
    elif after is not None:
        print("\n\n".join("\n".join(_both(*pair, sys.stdout.isatty())) for pair in zip(before, after, strict=True)))
    else:
        print("\n\n".join("\n".join(_worker(*each, sys.stdout.isatty())) for each in before))
    return 0


def _draw(path: Path, before: Planned, after: Planned | None, change: str) -> None:
    named = [(plan, spec.name) for spec, plan in before] + [(plan, f"{spec.name} with {change}") for spec, plan in after or ()]
    picture.write(path, [plan for plan, _ in named], [title for _, title in named])


def _planned(arguments: argparse.Namespace, change: whatif.WhatIf) -> Planned:
    """The specs and memory plans of all workers, with `change` in them. Raises ConfigError."""
    settings = argparse.Namespace(**{**vars(arguments), "settings": [*arguments.settings, *change.settings]})
    config = whatif.changed(load_config(settings).config, change)
    read, known = inputs.read(config, os.environ), survey.read(config)
    specs = plan.build(config, host.read(), read)
    memory = change.memory or arguments.memory
    given = survey.Given(memory, arguments.unified) if memory is not None else None
    return [(case.spec, memory_plan(case)) for case in survey.cases(config, specs, read, known, given)]


def _json(planned: Planned) -> dict[str, Any]:
    shown = plan.to_json([spec for spec, _ in planned])
    return {"workers": [{**worker, "memory": dataclasses.asdict(memory)}
                        for worker, (_, memory) in zip(shown["workers"], planned, strict=True)]}


def _both(before: tuple[WorkerSpec, MemoryPlan], after: tuple[WorkerSpec, MemoryPlan], colour: bool) -> Iterator[str]:
    yield bold(f"{before[0].name}: {before[0].engine}, role {before[0].role}", colour)
    yield from (f"  {line}".rstrip() for line in budget.compared(before[1], after[1]))


def _worker(spec: WorkerSpec, memory: MemoryPlan, colour: bool) -> Iterator[str]:
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
    yield ""
    width = shutil.get_terminal_size().columns - 2 if colour else None
    yield from (f"  {line}".rstrip() for line in budget.lines(memory, width))


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

