"""Configuration, host facts and inputs -> one `WorkerSpec` per worker. Pure: reads nothing, starts nothing."""
from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tightrank import engines
from tightrank.adapter import wire
from tightrank.config import Config, Worker
from tightrank.config.flags import (
    FLAGS,
    MASK,
    NODE_FLAGS,
    OWN_KEYS,
    USER_OF_URL,
    has,
    names,
    secret_values,
    value,
    without_secrets,
)
from tightrank.config.units import format_size
from tightrank.engines.base import Engine, Place, Wish, is_address, number
from tightrank.host import HostFacts
from tightrank.inputs import Inputs
from tightrank.plan import hooks, pd
from tightrank.plan.line import Chosen, choose, schedule
from tightrank.plan.workspaces import reserved
from tightrank.records import WorkerSpec

PLUGIN = "tightrank"     # the adapter's entry point in both engines' plugin groups
_SECRET_CHARACTERS = 4   # a shorter one would mask half of what the engine says
_SECRET = re.compile(r"(?i)key|token|secret|passw|passphrase|credential|auth")


def build(config: Config, host: HostFacts, inputs: Inputs) -> tuple[WorkerSpec, ...]:
    """Raises ConfigError: one line with key, value, range, place and what to do."""
    _refuse_floor(config, host)
    engine = engines.get(config.engine)
    _refuse_hooks(config, engine)
    _refuse_nodes(config, engine)
    return tuple(_worker(config, index, engine, inputs) for index in range(len(config.workers)))


def _refuse_hooks(config: Config, engine: Engine) -> None:
    for hook in config.hooks:
        if hook not in engine.releases:
            raise config.error("hooks", f"{hook} is not there for {engine.name}, whose hooks are {', '.join(engine.releases)}; "
                               f"take {hook} out of hooks", "hook-unavailable")


def _refuse_nodes(config: Config, engine: Engine) -> None:
    if not config.nodes.addresses:
        return
    if not engine.address_variable:
        raise config.error("nodes.addresses", f"{engine.name} runs on one host; leave nodes out")
    for index, worker in enumerate(config.workers):
        if found := [flag for flag in NODE_FLAGS[config.engine] if has(worker.args, flag)]:
            raise config.error(f"workers[{index}].args", f"{found[0]} is said by the section nodes; leave it out")


def _refuse_floor(config: Config, host: HostFacts) -> None:
    limits = [limit for limit in (host.mem_total_bytes, host.cgroup_limit_bytes) if limit is not None]
    wanted = config.guard.floor_bytes + config.guard.margin_bytes
    if limits and wanted >= min(limits):
        raise config.error("guard.floor", f"floor and margin are {format_size(wanted)}, and all the memory there is "
                           f"(host or cgroup) is {min(limits) / 2**30:.2f} GiB; lower them")


def for_generation(spec: WorkerSpec, generation: int, state_directory: Path) -> WorkerSpec:
    """`spec` with what one start adds: its number, its run directory and the two variables that engines may see."""
    run = str(run_directory(state_directory, spec.name, generation))
    ours = {wire.ENV_RUN: f"{mark(state_directory)}:{spec.name}:{generation}"}
    if spec.hooks:
        ours[wire.ENV_ADAPTER] = run
    return dataclasses.replace(spec, generation=generation, run_directory=run, env={**spec.env, **ours})


def run_directory(state_directory: Path, worker: str, generation: int) -> Path:
    """Where one generation keeps its settings, hellos and beats."""
    return state_directory / "run" / f"{worker}-{generation}"


def mark(state_directory: Path) -> str:
    """What the environment of every process that descends from this state directory's supervisor carries, in front."""
    path = state_directory.resolve()
    found = path.stat()          # two containers may use one path and see each other's processes
    return hashlib.sha256(f"{path}:{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:16]


def _worker(config: Config, index: int, engine: Engine, inputs: Inputs) -> WorkerSpec:
    worker, path = config.workers[index], f"workers[{index}]"
    _refuse_own_keys(config, path, worker)
    _refuse_unreadable(config, path, worker)
    if (why := engine.refusal(worker, config.hooks)) is not None:
        raise config.error(f"{path}.args", why)
    chosen = choose(config, index, engine, inputs) if "line" in config.hooks else None
    environment, env_notes = _environment(config, worker, engine, inputs)
    theirs = {**inputs.environment, **environment}
    told = pd.tell(config, index, engine, theirs)
    steered = chosen if "line" not in config.observe else None     # an observed line bounds nothing
    hooked = hooks.tell(config, index, engine, chosen, theirs, reserved(config, index, engine, inputs, steered))
    return WorkerSpec(
        name=worker.name, engine=config.engine, role=worker.role, argv=(*_argv(config, worker, engine, steered), *told.args),
        env={**environment, **told.env, **hooked.env}, host=worker.host, port=worker.port, model=config.model,
        served_model=_served_model(config, worker), tensor_parallel=worker.tensor_parallel,
        pipeline_parallel=worker.pipeline_parallel, devices=worker.devices, hooks=hooked.values,
        line=steered.spec if steered else None, context_tokens=steered.context if steered else None,
        schedule=schedule(steered.spec, steered.context) if steered else (),
        drain_seconds=config.limits.drain_seconds, start_stall_seconds=config.limits.start_stall_seconds,
        address=told.address, transfer_host=told.host, transfer_port=told.port, api_key=inputs.api_keys.get(worker.name),
        node=config.nodes.rank or 0, nodes=config.nodes.count,
        meeting=(config.nodes.addresses[0], config.nodes.port) if config.nodes.addresses and not config.nodes.rank else None,
        notes=(*_line_notes(chosen, steered), *env_notes, *told.notes,
               *hooked.notes))


def _line_notes(chosen: Chosen | None, steered: Chosen | None) -> tuple[str, ...]:
    if steered is not None:
        return steered.notes
    return () if chosen is not None else ("the line is off: hooks does not name it",)


def _refuse_own_keys(config: Config, path: str, worker: Worker) -> None:
    """One place says each thing; a secret on a command line can be read by every user of the host."""
    if config.as_written:
        return
    for name, key in OWN_KEYS.items():
        if has(worker.args, *FLAGS[config.engine].get(name, ())):
            spelling = FLAGS[config.engine][name][0]
            raise config.error(f"{path}.args", f"{spelling} has a key of its own; use {key.replace('workers[]', path)}")


def _refuse_unreadable(config: Config, path: str, worker: Worker) -> None:
    """Both engines take a flag by its first letters, and then what is decided here would not be what they do."""
    flags = FLAGS[config.engine]
    known = {spelling for spellings in flags.values() for spelling in spellings if spelling.startswith("--")}
    for name in names(worker.args):
        whole = sorted(spelling for spelling in known if spelling.startswith(name))
        if len(name) > 2 and whole and name not in known:
            raise config.error(f"{path}.args", f"{name} is short for {' or '.join(whole)}; write it in full")
    for flag in ({"chunk", "context", "page", "data_parallel", "context_parallel", "requests"} & flags.keys()):
        try:
            number(config.engine, worker.args, flag)
        except ValueError:
            raise config.error(f"{path}.args", f"{flags[flag][0]} is no whole number; correct it") from None


def _argv(config: Config, worker: Worker, engine: Engine, chosen: Chosen | None) -> tuple[str, ...]:
    wish = Wish(worker=worker, model=config.model, served_model=config.served_model, as_written=config.as_written,
                command=config.command, maximum=chosen.spec.maximum if chosen else None,
                context=chosen.context if chosen and chosen.cap else None, drain_seconds=config.limits.drain_seconds,
                hooks=config.hooks, place=_place(config))
    return (*config.command, *engine.arguments(wish))


def _place(config: Config) -> Place | None:
    nodes = config.nodes
    return Place(nodes.rank or 0, nodes.count, nodes.addresses[0], nodes.port) if nodes.addresses else None


def _served_model(config: Config, worker: Worker) -> str:
    if config.served_model is not None:
        return config.served_model
    if not config.as_written:
        return config.model
    return value(worker.args, *FLAGS[config.engine]["model"]) or worker.args[0]


def _environment(config: Config, worker: Worker, engine: Engine, inputs: Inputs) -> tuple[dict[str, str], tuple[str, ...]]:
    """What we set over the supervisor's own environment, and sentences about it. PYTHONPATH is launch's to extend."""
    theirs = {**inputs.environment, **worker.env}
    # setproctitle would wipe /proc/PID/environ, and with it the mark by which leftovers are found
    ours = {"SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}
    ours |= {name: text for name, text in engine.environment().items() if name not in theirs}
    if config.nodes.addresses and is_address(own := config.nodes.addresses[config.nodes.rank or 0]) and \
            engine.address_variable not in theirs:
        ours[engine.address_variable] = own        # their own guess is the address of the default route
    if worker.devices:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(worker.devices)
    if engine.name == "vllm" and worker.api_key_file is not None:
        ours["VLLM_API_KEY"] = inputs.api_keys[worker.name]
    notes: tuple[str, ...] = ()
    plugins = theirs.get(engine.plugins_variable)
    if plugins is not None and PLUGIN not in plugins.split(","):
        ours[engine.plugins_variable] = ",".join(part for part in (plugins, PLUGIN) if part)
        notes = (f"{engine.plugins_variable} is set; {PLUGIN} is appended to it",)
    return {**worker.env, **ours}, notes


def masked(spec: WorkerSpec) -> tuple[tuple[str, ...], dict[str, str]]:
    """(argv, env) to show: secrets as ***."""
    return masked_arguments(spec.argv), masked_environment(spec.env)


def secrets(spec: WorkerSpec) -> tuple[str, ...]:
    """Keys of the engine, on its command line or in a file, longest first."""
    found = {*secret_values(spec.argv), spec.api_key or ""}
    return tuple(sorted((each for each in found if len(each) >= _SECRET_CHARACTERS), key=len, reverse=True))


def masked_arguments(args: Sequence[str]) -> tuple[str, ...]:
    return tuple(USER_OF_URL.sub(MASK, argument) for argument in without_secrets(args))


def masked_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: MASK if is_secret(name) else USER_OF_URL.sub(MASK, text) for name, text in sorted(env.items())}


def is_secret(name: str) -> bool:
    """Whether a variable's name sounds like a secret."""
    return _SECRET.search(name) is not None


def to_json(specs: Sequence[WorkerSpec]) -> Mapping[str, Any]:
    """The plan as JSON can hold it, without secrets."""
    workers = []
    for spec in specs:
        argv, env = masked(spec)
        shown = dataclasses.asdict(dataclasses.replace(spec, argv=argv, env=env))
        del shown["api_key"], shown["generation"], shown["run_directory"]
        workers.append(shown)
    return {"workers": workers}
