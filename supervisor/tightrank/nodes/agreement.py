"""What all hosts of a worker must have alike before it starts: name -> a short digest that can be compared and shown."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tightrank import __version__
from tightrank.adapter import INJECT
from tightrank.config import Config

# Each host has its own: memory, addresses, devices, where things lie.
OWN = ("state_directory", "http", "guard", "command", "model", "places", "gateway", "on_failed", "hygiene", "limits")
OWN_OF_WORKER = ("devices", "env", "host", "address", "api_key_file")
_INDEX = ("config.json", "model.safetensors.index.json")


def agreement(config: Config, release: str | None) -> Mapping[str, str]:
    """`release`: of the installed engine; None: not known, which agrees with nothing but itself."""
    return {"supervisor": __version__, "configuration": _configuration(config), "engine": f"{config.engine} {release}",
            "adapter": _digest((str(path.relative_to(INJECT)), path.read_bytes()) for path in sorted(INJECT.rglob("*.py"))),
            "model": _model(Path(config.model))}


def _configuration(config: Config) -> str:
    values = json.loads(config.to_json())
    for name in OWN:
        del values[name]
    del values["nodes"]["rank"], values["nodes"]["token_file"]
    for worker in values["workers"]:
        for name in OWN_OF_WORKER:
            del worker[name]
    return _digest([("", json.dumps(values, sort_keys=True).encode())])


def _model(directory: Path) -> str:
    """Its description and the sizes of its weights: to read them all would take as long as a start."""
    texts = [(name, (directory / name).read_bytes()) for name in _INDEX if (directory / name).is_file()]
    sizes = [(path.name, str(path.stat().st_size).encode()) for path in sorted(directory.glob("*.safetensors"))]
    return _digest([*texts, *sizes])


def _digest(parts: Iterable[tuple[str, bytes]]) -> str:
    found = hashlib.sha256()
    for name, content in parts:
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:12]
