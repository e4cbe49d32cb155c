"""Where values come from: the YAML file, TIGHTRANK_* variables, `--set`. Each becomes {key: Entry} with its place.

The file is composed, not constructed: scalars stay text, every node has its line, and no object can be made from a tag.
"""
from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tightrank.config.keys import KEYS, RESERVED, SECTIONS, TABLES, env_name, names, overridable
from tightrank.config.units import ListOf, TableOf
from tightrank.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """A value as written. `place`: file:line, `env NAME` or `--set KEY`; `base`: where relative paths start."""
    value: str | tuple[str, ...] | Mapping[str, str]
    place: str
    base: Path


def unknown(place: str, what: str, name: str, known: Iterable[str], prefix: str = "") -> ConfigError:
    """The error for a name (after `prefix`) that is not known, with the nearest one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"{place}: unknown {what} '{prefix}{name}', {hint}")


def from_environment(environment: Mapping[str, str], base: Path) -> dict[str, Entry]:
    """Raises ConfigError for a TIGHTRANK_* variable that is no key."""
    paths = {env_name(path): path for path in overridable()}
    entries = {}
    for name in sorted(name for name in environment if name.startswith("TIGHTRANK_")):
        if name in RESERVED:
            continue
        if name not in paths:
            raise unknown("environment", "variable", name, paths)
        entries[paths[name]] = Entry(environment[name], f"env {name}", base)
    return entries


def from_arguments(settings: Sequence[str], base: Path) -> dict[str, Entry]:
    """`settings` are KEY=VALUE. Raises ConfigError."""
    entries = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: must be KEY=VALUE, for example --set guard.floor=2GiB")
        if path not in overridable():
            raise unknown("--set", "key", path, overridable())
        entries[path] = Entry(text, f"--set {path}", base)
    return entries


def from_file(path: Path) -> dict[str, Entry]:
    """Keys of the file; those of the n-th item of a list are `workers[n].<key>`. Raises ConfigError with file:line."""
    try:
        return dict(_File(str(path), path.resolve().parent).entries(_compose(path)))
    except RecursionError:
        raise ConfigError(f"{path}:1: not valid YAML: nested without end; take the anchor out of itself") from None


def _compose(path: Path) -> yaml.Node | None:
    try:
        data = path.read_bytes()
        return yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; write one or name another with --config FILE") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data[:error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = data.decode()[:error.position].count("\n") + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.reason}") from None


class _File:
    """One composed file. `where(node)` is file:line."""

    def __init__(self, name: str, base: Path) -> None:
        self._name = name
        self._base = base

    def where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"

    def entries(self, root: yaml.Node | None) -> Iterator[tuple[str, Entry]]:
        if root is not None:
            yield from self._section(root, "", "")

    def _section(self, node: yaml.Node, section: str, path: str) -> Iterator[tuple[str, Entry]]:
        """What stands in `node`: `section` as the table of keys names it, `path` with the numbers of list items."""
        for name, value in self._items(node, section):
            key, place = (f"{before}.{name}" if before else name for before in (section, path))
            if key in SECTIONS:
                yield from self._section(value, key, place)
            elif f"{key}[]" in TABLES:
                yield from self._table(value, f"{key}[]", place)
            else:
                yield self._entry(value, place, key)

    def _table(self, node: yaml.Node, section: str, path: str) -> Iterator[tuple[str, Entry]]:
        if not isinstance(node, yaml.SequenceNode):
            raise ConfigError(f"{self.where(node)}: {path}: must be a list, each item with a name")
        for index, item in enumerate(node.value):
            yield f"{path}[{index}]", Entry("", self.where(item), self._base)
            yield from self._section(item, section, f"{path}[{index}]")

    def _entry(self, node: yaml.Node, path: str, key: str) -> tuple[str, Entry]:
        kind = KEYS[key].kind
        value: str | tuple[str, ...] | Mapping[str, str]
        if isinstance(kind, ListOf):
            value = self._list(node, path)
        elif isinstance(kind, TableOf):
            value = {name: self._text(item, f"{path}.{name}") for name, item in self._pairs(node, path)}
        else:
            value = self._text(node, path)
        return path, Entry(value, self.where(node), self._base)

    def _list(self, node: yaml.Node, path: str) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise ConfigError(f"{self.where(node)}: {path}: must be a list, for example [a, b]")
        return tuple(self._text(item, f"{path}[{index}]") for index, item in enumerate(node.value))

    def _text(self, node: yaml.Node, path: str) -> str:
        if node.tag == "tag:yaml.org,2002:null":
            raise ConfigError(f"{self.where(node)}: {path}: has no value; write one or leave the key out")
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self.where(node)}: {path}: must be a single value, not a list or a mapping")
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            raise ConfigError(f"{self.where(node)}: {path}: the tag {node.tag} is not used here; leave it out")
        return str(node.value)

    def _items(self, node: yaml.Node, section: str) -> Iterator[tuple[str, yaml.Node]]:
        """The pairs of a mapping whose names may stand in `section`."""
        for name, value, place in self._marked_pairs(node, section or "the file"):
            if name not in names(section):
                raise unknown(place, "key", name, names(section), f"{section}." if section else "")
            yield name, value

    def _pairs(self, node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node]]:
        for name, value, _ in self._marked_pairs(node, path):
            yield name, value

    def _marked_pairs(self, node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node, str]]:
        """(name, value, place), merge keys (`<<: *anchor`) laid under the mapping's own. A key stands once."""
        if not isinstance(node, yaml.MappingNode):
            hint = "; to switch the line off write hooks: [ranks]" if path == "line" else ""
            raise ConfigError(f"{self.where(node)}: {path}: must be a mapping of keys and values{hint}")
        own: dict[str, tuple[yaml.Node, str]] = {}
        merged: dict[str, tuple[yaml.Node, str]] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for name, item, place in self._marked_pairs(value, f"{path}, <<"):
                    merged.setdefault(name, (item, place))
                continue
            name = self._text(key, path)
            if name in own:
                raise ConfigError(f"{self.where(key)}: {path}: the key '{name}' stands here twice, "
                                  f"first at {own[name][1]}")
            own[name] = (value, self.where(key))
        for name, (value, place) in {**merged, **own}.items():
            yield name, value, place
