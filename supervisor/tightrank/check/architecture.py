"""Architectures that the installed engine knows, read from its sources: its own registry, without importing
torch (15 s). Paths are under the engine's package.
"""
from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.check.parallel import OVERRIDES
from tightrank.check.program import ProgramFacts
from tightrank.check.source import parse
from tightrank.config.flags import has, value
from tightrank.engines.base import sections
from tightrank.records import WorkerSpec

_ENTRY = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\[[^\]]*\]|[\w.]+)", re.MULTILINE)
_NO_LONGER = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")


@dataclass(frozen=True, slots=True)
class ArchitectureFacts:
    """`engine`: with its release. `others`: who may add to the registry. `in_transformers`: what the registry lacks is there.
    `why`: nothing is known, and why."""
    engine: str
    registry: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    in_transformers: bool = False
    why: str = ""


def known(engine: str, package: Path) -> frozenset[str]:
    """Architectures by the registry of this package; empty: it is not where we know it to be. Raises OSError."""
    return frozenset(_READERS[engine](package)) if engine in _READERS else frozenset()


def _vllm(package: Path) -> Iterator[str]:
    """model_executor/models/registry.py: tables _*_MODELS of architecture -> (module, class)."""
    for statement in parse(package / "model_executor" / "models" / "registry.py").body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            name = getattr(statement.targets[0], "id", "")
            if name.endswith("_MODELS") and name not in _NO_LONGER:
                yield from (key.value for key in statement.value.keys if isinstance(key, ast.Constant)
                            and isinstance(key.value, str))


def _sglang(package: Path) -> Iterator[str]:
    """srt/models/*.py: EntryClass is a class or a list of classes (srt/models/registry.py, import_model_classes)."""
    for path in (package / "srt" / "models").glob("*.py"):
        for found in _ENTRY.findall(path.read_text(errors="replace")):
            yield from re.findall(r"\w+", re.sub(r"#.*", "", found))


_READERS = {"vllm": _vllm, "sglang": _sglang}


def in_transformers(architecture: str, model_type: str, transformers: Path | None) -> bool:
    """Whether Transformers has a class of this name, for models that an engine runs through it."""
    if transformers is None or not re.fullmatch(r"[\w.-]+", model_type):
        return False
    folder = transformers / "models" / model_type.replace("-", "_").replace(".", "_")
    try:
        return any(f"class {architecture}(" in path.read_text(errors="replace") for path in folder.glob("modeling_*.py"))
    except OSError:
        return False


def read(program: ProgramFacts, spec: WorkerSpec, model: Mapping[str, Any],
         environment: Mapping[str, str]) -> ArchitectureFacts:
    """Never raises."""
    wanted, engine = _wanted(model), f"{spec.engine} {program.release}"
    if program.package is None or not wanted:
        return ArchitectureFacts(engine, why=program.why or "config.json names no architectures")
    external = {**environment, **spec.env}.get("SGLANG_EXTERNAL_MODEL_PACKAGE")
    try:
        registry = known(spec.engine, program.package)
    except OSError as error:
        return ArchitectureFacts(engine, why=f"the registry of {engine} cannot be read ({error})")
    if not registry:
        return ArchitectureFacts(engine, why=f"the registry of {engine} is not where it is known to be")
    return ArchitectureFacts(engine, registry, (*program.plugins, *([external] if external else [])), wanted[0] not in registry
                             and in_transformers(wanted[0], str(sections(model).get("model_type")), program.transformers))


def _wanted(model: Mapping[str, Any]) -> list[str]:
    names = model.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def items(facts: ArchitectureFacts, model: Mapping[str, Any], spec: WorkerSpec) -> Iterator[Item]:
    item, wanted = "architecture", _wanted(model)
    if facts.why:
        yield unknown(item, facts.why)
    elif found := [name for name in wanted if name in facts.registry]:
        yield passed(item, f"{found[0]} is one of {len(facts.registry)} that {facts.engine} knows")
    elif facts.others:
        yield unknown(item, f"{wanted[0]} is not known to {facts.engine}; {', '.join(facts.others)} may add it")
    else:
        yield _not_registered(facts, model, spec, wanted[0])


def _not_registered(facts: ArchitectureFacts, model: Mapping[str, Any], spec: WorkerSpec, wanted: str) -> Item:
    """Precision first: it fails only where nothing else could bring the model in."""
    item, sentence = "architecture", f"{wanted} is none of {len(facts.registry)} that {facts.engine} knows"
    if has(spec.argv, *OVERRIDES):
        return unknown(item, f"{sentence}; the command line overrides config.json")
    if model.get("auto_map") or value(spec.argv, "--model-impl") not in (None, "auto"):
        return unknown(item, f"{sentence}; the model brings code of its own or asks for another implementation")
    if facts.in_transformers:
        return warned(item, f"{sentence}; Transformers has it, and {spec.engine} may run it through that, more slowly",
                      f"a release of {spec.engine} that has it runs it faster")
    if not wanted.endswith("ForCausalLM"):        # vLLM looks for the base model's name too (registry.py _normalize_arch)
        return unknown(item, f"{sentence}; whether it goes by another name cannot be told")
    near = difflib.get_close_matches(wanted, facts.registry, 1, 0.75)
    hint = f" (the nearest is {near[0]})" if near else ""
    return failed(item, "arguments-invalid", sentence + hint, f"use a release of {spec.engine} that has it, or another model")
