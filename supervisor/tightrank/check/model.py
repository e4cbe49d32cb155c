"""The model's directory: whether all that an engine reads is there and whole. Headers are read, weights are not."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tightrank.check.item import Item, failed, passed, unknown, warned
from tightrank.config.flags import has, value
from tightrank.plan import safetensors
from tightrank.plan.safetensors import Tensor
from tightrank.records import WorkerSpec

INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_TOKENIZERS = re.compile(r"tokenizer\.(json|model)|tekken\.json|.*\.tiktoken|tiktoken\.model|spiece\.model|vocab\.(json|txt)|"
                         r"tokenizer\.mm\.model|tokenizer\.model\..+|sentencepiece\..*model")
READ = ("vllm", "sglang")              # engines of which we know what they read
# The rest of the load formats takes files of its own, or none (dummy).
_READS_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`files`: name -> bytes; -1 a link to nothing. `broken`: sentences. `missing`: files that the index names."""
    directory: str
    files: Mapping[str, int] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    broken: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    lost: str = ""                     # what the index names and no file has: tied weights are written so, and left out
    why: str = ""                      # nothing is known, and why

    @property
    def total_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def read(directory: Path) -> ModelFacts:
    """One look. Never raises for what is missing or torn."""
    try:
        files = {entry.name: _size(entry.path) for entry in os.scandir(directory)}
    except OSError as error:
        return ModelFacts(str(directory), why=f"{directory} cannot be read ({error.strerror})")
    broken: list[str] = []
    index = _index(directory, files, broken)
    names = sorted({*index.values()}) if index else [name for name in sorted(files) if _is_weight(name, files)]
    missing = tuple(name for name in names if files.get(name, -1) < 0) or _gaps(names)
    tensors = [tensor for name in names if name not in missing for tensor in _tensors(directory / name, broken)]
    known = {tensor.name for tensor in tensors}
    names_lost = [] if missing or broken else [name for name in index if name not in known]
    lost = f"{INDEX} names {len(names_lost)} tensors that no file has ({names_lost[0]})" if names_lost else ""
    return ModelFacts(str(directory), files, tuple(tensors), tuple(broken), missing, lost)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _is_weight(name: str, files: Mapping[str, int]) -> bool:
    """consolidated*.safetensors holds the same weights once more, in Mistral's own format."""
    whole = not name.startswith("consolidated") or all(each.startswith("consolidated") for each in files
                                                       if each.endswith(".safetensors"))
    return name.endswith(".safetensors") and whole


def _index(directory: Path, files: Mapping[str, int], broken: list[str]) -> Mapping[str, str]:
    """Tensor -> file, by the index; {} without one."""
    if INDEX not in files:
        return {}
    try:
        found = json.loads((directory / INDEX).read_bytes())["weight_map"]
        if not isinstance(found, dict) or not all(isinstance(name, str) and "/" not in name for name in found.values()):
            raise ValueError("no table of tensors and files")
    except OSError as error:
        broken.append(f"{INDEX} cannot be read ({error.strerror})")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        broken.append(f"{INDEX} cannot be understood ({error})")
    else:
        return found
    return {}


def _gaps(names: list[str]) -> tuple[str, ...]:
    """Without an index the names of the shards say how many there are: model-00001-of-00004.safetensors."""
    parts = [match for name in names if (match := re.fullmatch(r"(.+-)(\d{5})-of-(\d{5})(\.safetensors)", name))]
    wanted = {f"{part[1]}{number:05}-of-{part[3]}{part[4]}" for part in parts for number in range(1, int(part[3]) + 1)}
    return tuple(sorted(wanted - set(names)))


def _tensors(path: Path, broken: list[str]) -> tuple[Tensor, ...]:
    try:
        return safetensors.read(path)
    except safetensors.Broken as error:
        broken.append(f"{path.name} {error}")
    except OSError as error:
        broken.append(f"{path.name} cannot be read ({error.strerror})")
    return ()


def items(facts: ModelFacts, spec: WorkerSpec, surely: bool) -> Iterator[Item]:
    """`surely`: the program is an engine of which we know what it reads; else that is its own affair."""
    yield _weights(facts, spec, surely)
    yield _tokenizer(facts, spec, surely)


def reads_safetensors(spec: WorkerSpec) -> bool:
    return (value(spec.argv, "--load-format") or "auto") in _READS_SAFETENSORS


def _weights(facts: ModelFacts, spec: WorkerSpec, surely: bool) -> Item:
    item, again = "model weights", "fetch the model again (hf download OWNER/NAME --local-dir DIRECTORY)"
    if facts.why:
        return unknown(item, facts.why)
    if not reads_safetensors(spec):
        return unknown(item, f"--load-format {value(spec.argv, '--load-format')} reads files of its own kind")
    if facts.missing:
        shown = ", ".join(facts.missing[:3]) + (f" and {len(facts.missing) - 3} more" if len(facts.missing) > 3 else "")
        return failed(item, "model-unreadable", f"{facts.directory} lacks {shown}", again)
    if facts.broken:
        more = f" ({len(facts.broken)} such files)" if len(facts.broken) > 1 else ""
        return failed(item, "model-unreadable", f"{facts.directory}: {facts.broken[0]}{more}", again)
    if facts.lost:
        return warned(item, f"{facts.directory}: {facts.lost}", f"unless the engine ties them to others: {again}")
    if facts.tensors:
        return passed(item, f"{len(facts.tensors)} tensors, {facts.total_bytes / 2**30:.2f} GiB, all files are whole")
    return _no_safetensors(facts, surely, again)


def _no_safetensors(facts: ModelFacts, surely: bool, again: str) -> Item:
    item = "model weights"
    others = [name for name in facts.files if name.endswith(_OTHER_WEIGHTS)]
    if empty := [name for name in others if facts.files[name] <= 0]:
        return failed(item, "model-unreadable", f"{facts.directory}: {empty[0]} is empty", again)
    if others:
        return unknown(item, f"{len(others)} files that are no safetensors ({others[0]}), which are not looked into")
    sentence = f"{facts.directory} has no weights (*.safetensors)"
    return failed(item, "model-unreadable", sentence, again) if surely else \
        warned(item, f"{sentence}, and what the program in command reads cannot be told", again)


def _tokenizer(facts: ModelFacts, spec: WorkerSpec, surely: bool) -> Item:
    item = "tokenizer"
    if facts.why:
        return unknown(item, facts.why)
    if has(spec.argv, "--tokenizer", "--tokenizer-path", "--skip-tokenizer-init"):
        return passed(item, "the command line says where it is, or that none is needed")
    found = [name for name in sorted(facts.files) if _TOKENIZERS.fullmatch(name)]
    if whole := [name for name in found if facts.files[name] > 0]:
        return passed(item, f"{', '.join(whole)}")
    if not found and any(re.match(r"token|vocab|merges|.*\.model$", name) for name in facts.files):
        return unknown(item, f"{facts.directory} has one of its own kind")
    sentence = f"{facts.directory}: {found[0]} is empty" if found else f"{facts.directory} has no tokenizer (tokenizer.json)"
    change = "fetch it from the model's page, or name one with --tokenizer"
    if spec.engine == "sglang":
        change += "-path"
    return failed(item, "model-unreadable", sentence, change) if surely else warned(item, sentence, change)
