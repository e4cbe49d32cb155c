"""What a start needs, looked at before anything is started and before a weight is read. Starts nothing, leaves nothing.

`problems` is what is bad input too, and refused whatever is asked for. `look` is everything, each thing an `Item`: facts are
read once, by the readers of the modules here, and judged by pure functions. Nothing here raises for what cannot be read: that
is an item of status unknown.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightrank.check import (
    architecture,
    devices,
    flags,
    leftovers,
    machine,
    memory,
    model,
    parallel,
    program,
    quantization,
    settings,
)
from tightrank.check.item import FAIL, Item, passed, refused
from tightrank.check.needs import problems, refuse
from tightrank.config import Config
from tightrank.errors import ConfigError
from tightrank.inputs import Inputs
from tightrank.readers.memory import MemoryReader
from tightrank.records import MemoryReading, WorkerSpec

__all__ = ["Facts", "WorkerFacts", "items", "look", "problems", "read", "refuse"]

# The key to look at where an item of a worker fails; [] is the worker's.
_KEYS = {"model weights": "model", "tokenizer": "model", "architecture": "model", "engine package": "command",
         "tensor parallel": "workers[].tensor_parallel", "pipeline parallel": "workers[].pipeline_parallel",
         "flags": "workers[].args", "data type": "workers[].args", "quantization": "workers[].args",
         "devices": "workers[].devices", "settings": "workers[].env"}
_NEEDS = {"state_directory": "state directory", "http.token_file": "token file", "command": "engine program", "hooks": "hooks"}


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What was read for one worker."""
    spec: WorkerSpec
    program: program.ProgramFacts
    architecture: architecture.ArchitectureFacts
    quantization: quantization.QuantizationFacts
    flags: flags.FlagFacts


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the items are judged by."""
    config: Config
    environment: Mapping[str, str]
    config_json: Mapping[str, Any]
    problems: tuple[ConfigError, ...]
    workers: tuple[WorkerFacts, ...]
    model: model.ModelFacts
    devices: devices.DeviceFacts
    memory: MemoryReading
    machine: machine.MachineFacts
    leftovers: leftovers.LeftoverFacts
    health_checks: tuple[settings.HealthCheck, ...]


def look(config: Config, specs: Sequence[WorkerSpec], inputs: Inputs, thorough: bool) -> list[Item]:
    """`thorough`: ask the engine's own parser in any case, which takes as long as its imports."""
    return list(items(read(config, specs, inputs, thorough)))


def read(config: Config, specs: Sequence[WorkerSpec], inputs: Inputs, thorough: bool) -> Facts:
    """One look at everything."""
    state, environment = Path(config.state_directory), inputs.environment
    found = tuple(problems(config, specs, environment))
    reading = MemoryReader().read(0.0)
    spare = (reading.available_bytes or 0) - config.guard.floor_bytes - config.guard.margin_bytes
    runs = not any(error.cause == "engine-binary-missing" for error in found)
    with ThreadPoolExecutor() as pool:                     # the engines' Pythons are asked meanwhile
        workers = pool.map(lambda spec: _worker(spec, inputs, thorough, spare > flags.PARSER_BYTES), specs if runs else ())
        return Facts(config, environment, inputs.model, found, model=model.read(Path(config.model)), devices=devices.read(),
                     memory=reading, machine=machine.read(state), leftovers=leftovers.read(state, specs),
                     health_checks=settings.read(config), workers=tuple(workers))


def _worker(spec: WorkerSpec, inputs: Inputs, thorough: bool, may_ask: bool) -> WorkerFacts:
    found = program.read(spec, inputs.environment)
    return WorkerFacts(spec, found, architecture.read(found, spec, inputs.model, inputs.environment),
                       quantization.read(found, spec, inputs.model),
                       flags.read(found, spec, inputs.environment, thorough, may_ask))


def items(facts: Facts) -> Iterator[Item]:
    """Pure. In the order in which one would look: files, program, arguments, memory, machine."""
    yield from _needs(facts.problems)
    yield from _of_workers(facts)
    of_machine = machine.items(facts.machine, facts.config, [worker.spec for worker in facts.workers], _unified(facts))
    yield from (leftovers.softened(facts.leftovers, item) for item in (*_memory(facts), *of_machine))
    yield from leftovers.items(facts.leftovers)
    yield from settings.health_items(facts.health_checks)


def _needs(found: Sequence[ConfigError]) -> Iterator[Item]:
    """Those that are in order are one line."""
    yield from (refused(_name(error), error) for error in found)
    if not found:
        yield passed("state directory, program, hooks, ports", "can be used")


def _name(error: ConfigError) -> str:
    if error.cause == "port-taken":
        return "ports"
    return next((name for key, name in _NEEDS.items() if f": {key}: " in str(error)), "configuration")


def _of_workers(facts: Facts) -> Iterator[Item]:
    """What all workers have in common once, the rest with the worker's name where there are several."""
    found = {worker.spec.name: [_placed(facts.config, index, item) for item in _of_worker(facts, worker)]
             for index, worker in enumerate(facts.workers)}
    shared = set.intersection(*(set(each) for each in found.values())) if found else set()
    told: set[Item] = set()
    for name, each in found.items():
        yield from (item if item in shared or item.status == FAIL else replace(item, sentence=f"{name}: {item.sentence}")
                    for item in each if item not in told)
        told |= shared


def _placed(config: Config, index: int, item: Item) -> Item:
    """A failure says where what it is about was written, as every error of the configuration does."""
    if item.status != FAIL or item.item not in _KEYS:
        return item
    key = _KEYS[item.item].replace("[]", f"[{index}]")
    return replace(item, sentence=f"{config.places.get(key, 'default')}: {key}: {item.sentence}")


def _of_worker(facts: Facts, worker: WorkerFacts) -> Iterator[Item]:
    spec, found = worker.spec, worker.program
    cpu = devices.on_cpu(spec, facts.environment, found.release)
    yield from model.items(facts.model, spec, surely=found.package is not None and spec.engine in model.READ)
    yield from program.items(found, spec)
    yield from architecture.items(worker.architecture, facts.config_json, spec)
    yield from parallel.items(facts.config_json, spec, cpu)
    yield from flags.items(worker.flags, found, spec)
    yield from devices.items(facts.devices, spec, facts.environment, cpu)
    capability = None if cpu or not facts.devices.devices else devices.weakest(facts.devices, spec, facts.environment)
    yield from quantization.items(worker.quantization, found, spec, facts.config_json, capability)
    yield from settings.items(spec, facts.environment)


def _memory(facts: Facts) -> Iterator[Item]:
    on_host: list[tuple[WorkerSpec, memory.Need]] = []
    for worker in facts.workers:
        spec = worker.spec
        cpu = devices.on_cpu(spec, facts.environment, worker.program.release)
        need = memory.need(facts.model, spec, facts.environment, facts.config_json, cpu)
        if cpu or facts.devices.unified:
            on_host.append((spec, need))
        else:
            yield from memory.device_items(facts.devices, spec, facts.environment, need)
    yield from memory.host_items(facts.config, on_host, facts.memory)


def _unified(facts: Facts) -> bool | None:
    on_cpu = all(devices.on_cpu(worker.spec, facts.environment, worker.program.release) for worker in facts.workers)
    return facts.devices.unified if facts.devices.devices else False if on_cpu and facts.workers else None
