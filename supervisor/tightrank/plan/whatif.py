"""`tightrank plan --what-if KEY=VALUE`: the same deployment with something else in it. Pure.

A key is the short name of one of our own keys, a size of the workers, a flag of the engine, or the memory of each rank. What
comes of it goes the way of every configuration, so that whatever would be refused there is refused here.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tightrank.config import Config, Worker
from tightrank.config.flags import FLAGS
from tightrank.config.keys import KEYS
from tightrank.config.units import Choice, Kind, Reserve, Text, Whole
from tightrank.errors import ConfigError

SETTINGS: Mapping[str, str] = {
    "max_chunk": "line.maximum", "min_chunk": "line.minimum", "budget": "line.budget", "context": "line.context",
    "rule": "line.rule", "guard": "guard.floor", "margin": "guard.margin", "headroom": "headroom.reserve",
    "pair_bytes": "headroom.pair_bytes", "indexer_budget": "indexer.budget"}
_REPLACES = {"max_chunk": "chunk", "context": "context"}        # an engine's own flag says the same
SIZES: Mapping[str, Kind] = {"tensor_parallel": Whole(1, 1024), "pipeline_parallel": Whole(1, 1024)}
_WORD = Text(r"[A-Za-z0-9_.-]+", "one word")
# (as the engines spell it, what it takes, engines that have it)
ENGINE_FLAGS: Mapping[str, tuple[str, Kind, tuple[str, ...]]] = {
    "attn_cp_size": ("--attn-cp-size", Whole(1, 1024), ("sglang",)),
    "kv_cache_dtype": ("--kv-cache-dtype", _WORD, ("vllm", "sglang", "atom")),
    "dtype": ("--dtype", Choice(("auto", "bfloat16", "float16", "float32")), ("vllm", "sglang")),
    "max_num_seqs": ("--max-num-seqs", Whole(1, 2**20), ("vllm", "atom")),
    "gpu_memory_utilization": ("--gpu-memory-utilization", Text(r"0?\.\d{1,9}|1(\.0)?", "a fraction"), ("vllm", "atom")),
    "mem_fraction_static": ("--mem-fraction-static", Text(r"0?\.\d{1,9}", "a fraction"), ("sglang",))}
MEMORY = "memory"
ALL = (*SETTINGS, *SIZES, *ENGINE_FLAGS, MEMORY)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`settings`: KEY=VALUE as `--set` takes them; `memory`: as `--memory` takes it; the rest is for `changed`."""
    settings: tuple[str, ...] = ()
    memory: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


def parse(texts: Sequence[str]) -> WhatIf:
    """`texts` are KEY=VALUE; the last of a repeated key counts. Raises ConfigError, which lists the keys or the values."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in ALL:
            what = f"unknown key '{key}'" if equals else "must be KEY=VALUE, for example max_chunk=4096"
            raise ConfigError(f"--what-if {text}: {what}; known are {', '.join(ALL)}")
        found[key] = value
        _kind(key, value)
    return WhatIf(tuple(f"{path}={found[key]}" for key, path in SETTINGS.items() if key in found), found.get(MEMORY),
                  {key: SIZES[key].parse(found[key]) for key in SIZES if key in found},
                  {key: found[key] for key in ENGINE_FLAGS if key in found},
                  tuple(flag for key, flag in _REPLACES.items() if key in found))


def _kind(key: str, value: str) -> None:
    """Raises ConfigError for what the key does not take."""
    kind = KEYS[SETTINGS[key]].kind if key in SETTINGS else SIZES.get(key) or \
        (ENGINE_FLAGS[key][1] if key in ENGINE_FLAGS else Reserve())
    try:
        kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"--what-if {key}={value}: {error}") from None


def changed(config: Config, change: WhatIf) -> Config:
    """`config`, to which the settings were applied when it was loaded. Raises ConfigError for a flag the engine has not."""
    for key in change.flags:
        if config.engine not in ENGINE_FLAGS[key][2]:
            raise ConfigError(f"--what-if {key}={change.flags[key]}: {config.engine} has no {ENGINE_FLAGS[key][0]}; it is of "
                              f"{', '.join(ENGINE_FLAGS[key][2])}")
    words = [word for key, text in change.flags.items() for word in (ENGINE_FLAGS[key][0], text)]
    dropped = [flag for name in change.dropped for flag in FLAGS[config.engine].get(name, ())]
    workers = tuple(_worker(worker, change, words, dropped) for worker in config.workers)
    command = (*_without(config.command, dropped), *words) if config.as_written else config.command
    return replace(config, workers=workers, command=command)


def _worker(worker: Worker, change: WhatIf, words: Sequence[str], dropped: Sequence[str]) -> Worker:
    """Its devices are not named any more where there is another number of ranks."""
    found = replace(worker, args=(*_without(worker.args, dropped), *words),
                    tensor_parallel=change.sizes.get("tensor_parallel", worker.tensor_parallel),
                    pipeline_parallel=change.sizes.get("pipeline_parallel", worker.pipeline_parallel))
    ranks = found.tensor_parallel * found.pipeline_parallel
    return found if len(found.devices) in (0, ranks) else replace(found, devices=())


def _without(args: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    skip = False
    for word in args:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name.replace("_", "-") in flags:
            skip = not equals
        else:
            kept.append(word)
    return tuple(kept)
