"""Quantization: the method of the model, whether the installed engine knows it, and the compute capability that it wants there.

Read from the engine's sources, as `architecture` does: tables of method -> class, and the class's own get_min_capability.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightrank.check.item import Item, failed, passed, unknown
from tightrank.check.program import ProgramFacts
from tightrank.check.source import parse
from tightrank.plan.weights import quantization
from tightrank.records import WorkerSpec

_FOLDERS = {"vllm": "model_executor/layers/quantization", "sglang": "srt/layers/quantization"}


@dataclass(frozen=True, slots=True)
class QuantizationFacts:
    """`methods`: by the installed engine; empty: not known. `capability`: what the method wants; None: it does not say."""
    methods: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None


def read(program: ProgramFacts, spec: WorkerSpec, model: Mapping[str, Any]) -> QuantizationFacts:
    """Looks only where there is a quantization. Never raises."""
    wanted, folder = _plain(quantization(spec, model)), _FOLDERS.get(spec.engine)
    if not wanted or program.package is None or folder is None:
        return QuantizationFacts()
    try:
        found = dict(_methods(program.package / folder / "__init__.py"))
        name = found.get(wanted)
        return QuantizationFacts(frozenset(found), _capability(program.package / folder, name) if name else None)
    except OSError:
        return QuantizationFacts()


def _plain(name: str) -> str:
    """Both engines take compressed_tensors for compressed-tensors."""
    return name.lower().replace("_", "-")


def _methods(path: Path) -> Iterator[tuple[str, str | None]]:
    """(method, its class): names in lists have none. Raises OSError."""
    nodes = list(ast.walk(parse(path)))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _plain(node.value), None
    for node in nodes:
        if isinstance(node, ast.Dict):
            yield from ((_plain(str(key.value)), item.id) for key, item in zip(node.keys, node.values, strict=True)
                        if isinstance(key, ast.Constant) and isinstance(item, ast.Name))


def _capability(folder: Path, name: str) -> tuple[int, int] | None:
    """Of the class `name`, where its answer is one number (80: 8.0). Raises OSError."""
    path = next((path for path in sorted(folder.rglob("*.py")) if f"class {name}(" in path.read_text(errors="replace")), None)
    classes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef) and node.name == name] if path else []
    bodies = [function.body for found in classes for function in found.body
              if isinstance(function, ast.FunctionDef) and function.name == "get_min_capability"]
    match bodies:
        case [[ast.Return(value=ast.Constant(value=int(number)))]]:
            return divmod(number, 10)
    return None


def items(facts: QuantizationFacts, program: ProgramFacts, spec: WorkerSpec, model: Mapping[str, Any],
          capability: tuple[int, int] | None) -> Iterator[Item]:
    """`capability`: of the weakest device; None: there is none, or it is not known."""
    item, wanted = "quantization", quantization(spec, model)
    if not wanted:
        return
    engine = f"{spec.engine} {program.release}"
    if not facts.methods:
        yield unknown(item, f"whether {engine or spec.engine} knows {wanted} cannot be told")
    elif _plain(wanted) not in facts.methods:
        yield unknown(item, f"{', '.join(program.plugins)} may add {wanted}") if program.plugins else failed(
            item, "dtype-unsupported", f"{engine} does not know the quantization {wanted}",
            "use a release that does, or the model in another quantization")
    elif facts.capability and capability and capability < facts.capability:
        yield failed(item, "dtype-unsupported", f"{wanted} needs compute capability {_shown(facts.capability)} in {engine}, "
                     f"and the device has {_shown(capability)}", "use another quantization or device")
    else:
        yield passed(item, f"{engine} knows {wanted}" + (f", from compute capability {_shown(facts.capability)} on"
                                                         if facts.capability else ""))


def _shown(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
