"""Settings that are known to do harm, or nothing. Each with its source. Pure, but for the compose file's health check."""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tightrank.check.item import Item, failed, passed, warned
from tightrank.config import Config
from tightrank.config.flags import value
from tightrank.records import WorkerSpec

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COMPOSE = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")
_ENGINES = re.compile(r"\b(import|-m)\s+(vllm|sglang|torch|atom|transformers)\b")


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Of one service of a compose file beside the configuration."""
    place: str
    service: str
    command: str


def read(config: Config) -> tuple[HealthCheck, ...]:
    """Never raises: a file that is no compose file has no health checks."""
    folder = Path(config.places.get("engine", "").rpartition(":")[0]).parent
    return tuple(found for name in _COMPOSE for found in _health_checks(folder / name))


def _health_checks(path: Path) -> Iterator[HealthCheck]:
    try:
        services = yaml.safe_load(path.read_bytes())["services"]
        for name, service in services.items():
            command = (service.get("healthcheck") or {}).get("test") or ""
            yield HealthCheck(path.name, str(name), " ".join(map(str, command)) if isinstance(command, list) else str(command))
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError, RecursionError):
        return


def items(spec: WorkerSpec, environment: Mapping[str, str]) -> Iterator[Item]:
    """Of one worker: what is found, or one line that nothing was."""
    theirs = {**environment, **spec.env}
    found = [*_allocator(spec, theirs), *_heads(spec, theirs), *_others(spec, theirs)]
    yield from found or [passed("settings", f"none that is known to do harm ({spec.name})")]


def _allocator(spec: WorkerSpec, theirs: Mapping[str, str]) -> Iterator[Item]:
    for name in ALLOCATOR:
        text = theirs.get(name, "")
        if re.search(r"expandable_segments\s*:\s*True", text):
            yield _expandable(spec, name)
        if "garbage_collection_threshold" in text and "per_process_memory_fraction" not in text:
            yield warned("settings", f"{name} sets garbage_collection_threshold, which does nothing without a memory fraction "
                         f"of the process, and {spec.engine} gives it none", "take it out; the hook empty-cache does it")


def _expandable(spec: WorkerSpec, name: str) -> Item:
    """Measured on SGLang with DeepSeek-V4: NaN logits on every prefill of more than 64 tokens. Others report need of it."""
    if spec.engine == "sglang":
        return failed("settings", "config-invalid", f"{name}=expandable_segments:True: logits become NaN on prefills of more "
                      "than 64 tokens, in silence", f"take it out of {name}")
    return warned("settings", f"{name}=expandable_segments:True: SGLang was seen to answer NaN with it",
                  f"watch what is answered, or take it out of {name}")


def _heads(spec: WorkerSpec, theirs: Mapping[str, str]) -> Iterator[Item]:
    """As vllm-project/vllm#51040 serves: its path and breakable CUDA graphs were not tried together."""
    if "heads" in spec.hooks and theirs.get("VLLM_USE_BREAKABLE_CUDAGRAPH") != "0":
        yield warned("settings", "the hook heads without VLLM_USE_BREAKABLE_CUDAGRAPH=0: nobody has tried the two together",
                     f"set it in env of {spec.name}")


def _others(spec: WorkerSpec, theirs: Mapping[str, str]) -> Iterator[Item]:
    if theirs.get("SGLANG_SANITIZE_NAN_LOGITS", "0").lower() in ("1", "true"):      # sgl-project/sglang#33187
        yield warned("settings", "SGLANG_SANITIZE_NAN_LOGITS turns NaN into random tokens, answered with 200", "take it out")
    if theirs.get("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "0").lower() in ("1", "true"):     # sgl-project/sglang#20010
        yield warned("settings", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE ends a server over its own book-keeping",
                     "take it out")
    if re.search(r'"kv_load_failure_policy"\s*:\s*"recompute"', value(spec.argv, "--kv-transfer-config") or ""):
        yield warned("settings", 'kv_load_failure_policy "recompute" was seen to answer wrongly (vllm-project/vllm#49250)',
                     'use "fail"')


def health_items(checks: Sequence[HealthCheck]) -> Iterator[Item]:
    """A Python without -S or -I runs sitecustomize, and one that imports an engine takes 0.6 GiB each time."""
    for check in checks:
        python = re.search(r"\bpython[0-9.]*\b(?!.*\s-\w*[SI])", check.command)
        if _ENGINES.search(check.command) or python:
            what = "imports an engine" if _ENGINES.search(check.command) else "runs Python with all its site-packages"
            yield warned("health check", f"{check.place}: the health check of {check.service} {what}: 0.6 GiB, each time, when "
                         "memory is least", "ask /readyz with curl, or with python -I -S")
