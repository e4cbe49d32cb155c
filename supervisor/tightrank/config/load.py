"""Sources -> one frozen `Config`. Precedence: `--set`, then TIGHTRANK_*, then the file, then the default."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tightrank.config import units
from tightrank.config.flags import without_secrets
from tightrank.config.keys import COMMANDS, KEYS, LEVELS, USUAL_HOOKS, Key
from tightrank.config.secrets import read_secret
from tightrank.config.shape import (
    AUTO,
    Config,
    EmptyCache,
    Gateway,
    GatewayWorker,
    Guard,
    Headroom,
    Http,
    Hygiene,
    Indexer,
    Level,
    Limits,
    Line,
    Nodes,
    Pd,
    Worker,
)
from tightrank.config.source import Entry, from_arguments, from_environment, from_file
from tightrank.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Resolved:
    """One key as it came out: its value in text and where it came from."""
    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    rows: tuple[Resolved, ...]


def load(path: Path, environment: Mapping[str, str], settings: Sequence[str] = ()) -> Loaded:
    """The configuration in `path` with its overrides. Raises ConfigError: one line that names key, value and place."""
    here = Path.cwd()
    entries = {**from_file(path), **from_environment(environment, here), **from_arguments(settings, here)}
    return resolve(entries, environment, str(path))


def load_gateway(path: Path | None, environment: Mapping[str, str], settings: Sequence[str] = ()) -> Gateway:
    """What `tightrank gateway` needs, of a whole tightrank.yaml, of one with a gateway alone, or (None) of no file at all.

    Raises ConfigError: one line that names key, value and place; for an unreadable engine key too.
    """
    here = Path.cwd()
    entries = {**(from_file(path) if path else {}), **from_environment(environment, here), **from_arguments(settings, here)}
    resolver = _Resolver(entries, str(path or "command line"))
    gateway = _gateway(resolver, Http(**resolver.section("http")), Limits(**resolver.section("limits")))
    if gateway.engine_key_file is None:
        return gateway
    refuse = partial(resolver.error, "gateway.engine_key_file")
    return replace(gateway, engine_key=read_secret(gateway.engine_key_file, refuse))


def resolve(entries: Mapping[str, Entry], environment: Mapping[str, str], whole: str,
            as_written: bool = False) -> Loaded:
    """`whole` names the source as a whole, where a required key is missing. Raises ConfigError."""
    resolver = _Resolver(entries, whole)
    top = resolver.section("")
    if not top["command"]:
        top["command"] = resolver.settle("command", COMMANDS[top["engine"]])
    if not resolver.has("hooks") and top["engine"] in USUAL_HOOKS:
        top["hooks"] = resolver.settle("hooks", USUAL_HOOKS[top["engine"]])
    if top["state_directory"] is None:
        top["state_directory"] = resolver.settle("state_directory", _state_directory(top["name"], environment))
    http, guard = Http(**resolver.section("http")), _guard(resolver)
    line, limits = Line(**resolver.section("line")), Limits(**resolver.section("limits"))
    config = Config(**top, http=http, guard=guard, line=line, indexer=Indexer(**resolver.section("indexer")),
                    headroom=Headroom(**resolver.section("headroom")),
                    empty_cache=EmptyCache(**resolver.section("empty_cache")), limits=limits,
                    hygiene=Hygiene(**resolver.section("hygiene")), nodes=Nodes(**resolver.section("nodes")),
                    pd=Pd(**resolver.section("pd")),
                    gateway=_gateway(resolver, http, limits), workers=_workers(resolver, whole), as_written=as_written,
                    places={row.key: row.origin for row in resolver.rows})
    _check_across(config)
    return Loaded(config, tuple(resolver.rows))


def _state_directory(name: str, environment: Mapping[str, str]) -> str:
    if os.geteuid() == 0:
        return f"/var/lib/tightrank/{name}"
    home = environment.get("XDG_STATE_HOME") or f"{environment.get('HOME', '')}/.local/state"
    return f"{home}/tightrank/{name}"


def _guard(resolver: _Resolver) -> Guard:
    section = resolver.section("guard")
    tighten = _level(resolver, "tighten", section["margin_bytes"])
    shed = _level(resolver, "shed", tighten.threshold_bytes // 2)
    return Guard(**section, tighten=tighten, shed=shed, abort=_level(resolver, "abort", shed.threshold_bytes // 2),
                 stop_mode=resolver.section("guard.stop")["mode"])


def _level(resolver: _Resolver, name: str, threshold_bytes: int) -> Level:
    section = f"guard.{name}"
    values = resolver.section(section)
    values["threshold_bytes"] = _size_or(resolver, f"{section}.threshold", values["threshold_bytes"], threshold_bytes)
    values["hysteresis_bytes"] = _size_or(resolver, f"{section}.hysteresis", values["hysteresis_bytes"],
                                          values["threshold_bytes"] // 2)
    return Level(**values)


def _size_or(resolver: _Resolver, key: str, given: int | None, usual: int) -> int:
    if given is None:
        resolver.settle(key, units.format_size(usual))
    return usual if given is None else given


def _workers(resolver: _Resolver, whole: str) -> tuple[Worker, ...]:
    workers = tuple(Worker(**worker) for worker in resolver.table("workers[]"))
    if not workers:
        raise ConfigError(f"{whole}: workers: is required, for example workers: [{{name: a, port: 8001}}]")
    return workers


def _gateway(resolver: _Resolver, http: Http, limits: Limits) -> Gateway:
    section = resolver.section("gateway")
    workers = tuple(GatewayWorker(**worker) for worker in resolver.table("gateway.workers[]"))
    for index, worker in enumerate(workers):
        if worker.name in [earlier.name for earlier in workers[:index]]:
            raise resolver.error(f"gateway.workers[{index}].name", f"{worker.name} stands there twice; names are unique")
        if worker.engine == "atom" and worker.role != "both":
            raise resolver.error(f"gateway.workers[{index}].role", f"{worker.role}: the gateway cannot pair ATOM engines yet; "
                                 "leave it out")
    asked = resolver.has("gateway.supervisors") or not resolver.has("workers[0]")
    if not section["supervisors"] and not (asked and workers):     # else engines without any supervisor: none is asked
        section["supervisors"] = resolver.settle("gateway.supervisors", (units.local_url(http.host, http.port),))
    return Gateway(**section, drain_seconds=limits.drain_seconds, workers=workers)


class _Resolver:
    """Takes keys out of the entries, one section after the other, and notes each as a row."""

    def __init__(self, entries: Mapping[str, Entry], whole: str) -> None:
        self._entries = entries
        self._whole = whole
        self.rows: list[Resolved] = []

    def section(self, section: str, path: str | None = None) -> dict[str, Any]:
        """{field: value} of the keys of `section`, which stand under `path` in the entries."""
        chosen = [key for key in KEYS.values() if key.section == section]
        prefix = section if path is None else path
        return {key.field: self._take(key, f"{prefix}.{_last(key)}" if prefix else key.path) for key in chosen}

    def settle(self, key: str, value: Any) -> Any:
        """`value` for a key that was left out, shown as what it came out to be."""
        self.rows = [replace(row, value=_shown(value)) if row.key == key else row for row in self.rows]
        return value

    def has(self, path: str) -> bool:
        """Whether a source says anything of `path`."""
        return path in self._entries

    def table(self, section: str) -> list[dict[str, Any]]:
        """One {field: value} for each item of the list `section`."""
        start = section.removesuffix("]")
        paths = [path for path in self._entries if path.startswith(start) and path.endswith("]")]
        return [self.section(section, path) for path in paths]

    def error(self, key: str, sentence: str) -> ConfigError:
        """The one-line error of a key that was taken."""
        origin = next(row.origin for row in self.rows if row.key == key)
        return ConfigError(f"{origin}: {key}: {sentence}")

    def _take(self, key: Key, path: str) -> Any:
        entry = self._entries.get(path)
        if entry is None:
            return self._default(key, path)
        try:
            value = _parse(key.kind, entry)
        except ValueError as error:
            written = "" if isinstance(entry.value, Mapping) else f"{_shown(entry.value) or repr('')} "
            raise ConfigError(f"{entry.place}: {path}: {written}{error}") from None
        shown = value if isinstance(key.kind, units.Path) else _shown(entry.value)
        self.rows.append(Resolved(path, shown, entry.place))
        return value

    def _default(self, key: Key, path: str) -> Any:
        if key.required:
            item = self._entries.get(path.rpartition(".")[0])
            place = item.place if item else self._whole
            raise ConfigError(f"{place}: {path}: is required: {key.doc}")
        self.rows.append(Resolved(path, key.default if key.default is not None else f"({key.unset})", "default"))
        if key.default is not None:
            return key.kind.parse(key.default)
        return {units.ListOf: (), units.TableOf: {}}.get(type(key.kind))


def _last(key: Key) -> str:
    return key.path.rpartition(".")[2]


def _shown(value: str | tuple[str, ...] | Mapping[str, str]) -> str:
    """For a person. Values of environment variables may be secrets: their names are enough."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}=..." for name in value) or "{}"
    return value if isinstance(value, str) else "[" + ", ".join(without_secrets(value)) + "]"


def _parse(kind: units.Kind, entry: Entry) -> Any:
    value = entry.value
    if isinstance(value, Mapping):
        assert isinstance(kind, units.TableOf)
        text = units.Text(r"[^\x00]*", "text without a zero byte")
        return {units.parse_item(kind.names, name): text.parse(value[name]) for name in value}
    if isinstance(value, tuple):
        assert isinstance(kind, units.ListOf)
        return kind.parse_all(value)
    parsed = kind.parse(value)
    return str(entry.base / _expanded(parsed)) if isinstance(kind, units.Path) else parsed


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError("starts in a home directory that is not known; write the path out") from None


def _check_across(config: Config) -> None:
    """What no single key can tell. Raises ConfigError."""
    limits = config.limits
    if limits.backoff_longest_seconds < limits.backoff_first_seconds:
        first, longest = map(units.format_duration, (limits.backoff_first_seconds, limits.backoff_longest_seconds))
        raise config.error("limits.backoff_longest", f"{longest} is less than limits.backoff_first, {first}; raise it")
    _check_levels(config)
    if len(set(config.hooks)) < len(config.hooks):
        raise config.error("hooks", f"{', '.join(config.hooks)}: name each hook once")
    if config.hooks and "ranks" not in config.hooks:
        raise config.error("hooks", f"{', '.join(config.hooks)}: the others report by way of ranks; add it")
    if len(set(config.observe)) < len(config.observe):
        raise config.error("observe", f"{', '.join(config.observe)}: name each hook once")
    if alien := sorted(set(config.observe) - set(config.hooks)):
        raise config.error("observe", f"{', '.join(alien)}: not in hooks ({', '.join(config.hooks)}); add it there")
    if config.line.start is not None and config.line.budget != AUTO:
        raise config.error("line.start", f"{config.line.start} is for line.budget auto, which is {config.line.budget}; leave "
                           "one of them out")
    if config.indexer.budget_bytes % 2**20:
        below = config.indexer.budget_bytes >> 20
        raise config.error("indexer.budget", f"{config.indexer.budget_bytes} bytes: must be whole MiB, as engines take it; "
                           f"give {below}MiB or {below + 1}MiB")
    _check_nodes(config)
    for index, worker in enumerate(config.workers):
        _check_worker(config, f"workers[{index}]", worker, config.workers[:index])


def _check_nodes(config: Config) -> None:
    nodes = config.nodes
    if not nodes.addresses:
        if nodes.rank:
            raise config.error("nodes.rank", f"{nodes.rank}: there are no nodes.addresses; name all hosts, the leader first")
        return
    shown = ", ".join(nodes.addresses)
    if len(nodes.addresses) < 2 or len(set(nodes.addresses)) < len(nodes.addresses):
        raise config.error("nodes.addresses", f"{shown}: name two hosts or more, each once")
    if nodes.rank is None or nodes.rank >= nodes.count:
        found = "not given" if nodes.rank is None else str(nodes.rank)
        raise config.error("nodes.rank", f"{found}: must be 0 to {nodes.count - 1}, the place of this host in nodes.addresses; "
                           "start with `tightrank up --node-rank K`")
    if nodes.token_file is None:
        raise config.error("nodes.token_file", "is needed: whoever may speak for a host can end and start ranks")
    if len(config.workers) > 1:
        raise config.error("nodes.addresses", f"{shown}: one worker can span them, and there are {len(config.workers)}")
    if config.as_written:
        raise config.error("nodes.addresses", f"{shown}: `tightrank run` is for one host; write a tightrank.yaml")
    ranks = config.workers[0].tensor_parallel * config.workers[0].pipeline_parallel
    if ranks % nodes.count:
        raise config.error("nodes.addresses", f"{nodes.count} hosts for {ranks} ranks (tensor_parallel x pipeline_parallel): "
                           "each host takes as many; change one of them")


def _check_levels(config: Config) -> None:
    """They fire in their order: each under a mark that is no higher than that of the one before."""
    levels = [(name, level) for name in LEVELS if (level := getattr(config.guard, name)).mode != "off"]
    for (earlier, before), (name, level) in pairwise(levels):
        if level.threshold_bytes > before.threshold_bytes:
            own, other = map(units.format_size, (level.threshold_bytes, before.threshold_bytes))
            raise config.error(f"guard.{name}.threshold", f"{own} is more than guard.{earlier}.threshold, {other}, and "
                               f"{earlier} comes first; lower it")


def _check_worker(config: Config, path: str, worker: Worker, before: Sequence[Worker]) -> None:
    for other, earlier in enumerate(before):
        if earlier.name == worker.name:
            raise config.error(f"{path}.name", f"{worker.name} is the name of workers[{other}] too; names are unique")
    ranks = worker.tensor_parallel * worker.pipeline_parallel // config.nodes.count
    if worker.devices and len(worker.devices) != ranks:
        hosts = f" over {config.nodes.count} hosts" if config.nodes.addresses else ""
        raise config.error(f"{path}.devices", f"{len(worker.devices)} devices for {ranks} ranks (tensor_parallel "
                           f"{worker.tensor_parallel} x pipeline_parallel {worker.pipeline_parallel}{hosts}); name {ranks}")
    if len(set(worker.devices)) < len(worker.devices):
        raise config.error(f"{path}.devices", f"{', '.join(worker.devices)}: name each device once")
    for key, given, variable in (("devices", worker.devices, "CUDA_VISIBLE_DEVICES"),
                                 ("api_key_file", worker.api_key_file, "VLLM_API_KEY")):
        if given and variable in worker.env:
            raise config.error(f"{path}.env", f"{variable} has a key of its own, {path}.{key}, which is set too; leave one out")
    for name in worker.env:
        if name.startswith("TIGHTRANK_"):
            raise config.error(f"{path}.env", f"{name} is set by the supervisor alone; leave it out")
