"""The one table of keys. Parsing, environment names, JSON Schema, `tightrank check` and the documents come from it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightrank.config.units import Choice, Duration, Kind, ListOf, OrWord, Path, Reserve, Size, TableOf, Text, Url, Whole

ENGINES = ("vllm", "sglang", "atom")
HOOKS = ("ranks", "line", "indexer", "headroom", "empty-cache", "heads")
COMMANDS = {"vllm": ("vllm", "serve"), "sglang": ("python3", "-m", "sglang.launch_server"),
            "atom": ("python3", "-m", "atom.entrypoints.openai_server")}
USUAL_HOOKS = {"atom": ("ranks",)}         # where it is not what the key says

_NAME = Text(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", "1 to 40 of a-z, 0-9 and -, with a letter or digit at both ends")
_ENV_NAME = Text(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and _")
_HOST = Text(r"[A-Za-z0-9.:_-]+", "a host name or an address")
_PORT = Whole(1, 65535)
_TOKENS = Whole(1, 2**30)
_ROLE = Choice(("both", "prefill", "decode"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `default` is text as one would write it; None: `unset` says in words what holds then."""
    path: str
    kind: Kind
    doc: str
    default: str | None = None
    unset: str = ""
    required: bool = False

    @property
    def field(self) -> str:
        """The name of the record's field that the key fills; it carries the unit."""
        return self.path.rpartition(".")[2] + self.kind.suffix

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]


# The levels before `stop`, which is guard.floor itself; in the order in which they fire.
LEVELS: Mapping[str, tuple[str, tuple[str, str, str]]] = {
    "tighten": ("lowers the line's budget, so that prefill chunks are smaller", ("guard.margin", "1s", "10s")),
    "shed": ("refuses long prompts (429)", ("half of guard.tighten.threshold", "2s", "10s")),
    "abort": ("ends the largest prefill in flight", ("half of guard.shed.threshold", "2s", "5s")),
}


def _level(name: str) -> tuple[Key, ...]:
    does, (threshold, duration, pause) = LEVELS[name]
    return (
        Key(f"guard.{name}.mode", Choice(("act", "dry-run", "off")), f"Level {name}: {does}. dry-run: only says that it would.",
            "act"),
        Key(f"guard.{name}.threshold", Size(), "It fires with less available memory than guard.floor + this.", unset=threshold),
        Key(f"guard.{name}.duration", Duration(0, 3600), "For so long it must have been less, or about to be.", duration),
        Key(f"guard.{name}.pause", Duration(0.001, 3600), "It acts again, or goes back by a step, after so long.", pause),
        Key(f"guard.{name}.hysteresis", Size(), "It goes back with more than guard.floor + threshold + this.",
            unset="half of its threshold"))


_ALL = (
    Key("name", _NAME, "Name of the deployment; it names the state directory too.", "tightrank"),
    Key("model", Path(), "Directory of the model (with its config.json).", required=True),
    Key("engine", Choice(ENGINES), "The engine that serves it.", required=True),
    Key("command", ListOf(Text()), "Program to start the engine with; point it into the engine's own environment.",
        unset="[vllm, serve], or [python3, -m, sglang.launch_server] or atom.entrypoints.openai_server"),
    Key("served_model", Text(r"[^\s]+", "a name without spaces"), "The name that a request must give.",
        unset="the model's path as given"),
    Key("state_directory", Path(), "Journal, logs and run directories; one supervisor at a time.",
        unset="/var/lib/tightrank/NAME for root, else $XDG_STATE_HOME/tightrank/NAME"),
    Key("hooks", ListOf(Choice(HOOKS)), "Changes the adapter makes inside the engine. Without `line` (ATOM has "
        "none) the line is off.", "ranks,line"),
    Key("observe", ListOf(Choice(HOOKS[1:])), "Those of `hooks` that compute and record, and change nothing.", ""),
    Key("on_failed", Choice(("hold", "exit")), "When a worker failed for good. hold: its reason is served. exit: the others "
        "are drained; exit code 78 (change the configuration), 69 (the host) or 75.", "hold"),
    Key("http.host", _HOST, "Address of the supervisor's own HTTP.", "127.0.0.1"),
    Key("http.port", _PORT, "Port of the supervisor's own HTTP.", "9470"),
    Key("http.token_file", Path(), "File with the token that writes need on a public address.",
        unset="a public address is read-only"),
    Key("guard.floor", Size(), "Available memory below which all ranks are ended; 0B: no floor.", "1.5GiB"),
    Key("guard.margin", Size(), "Memory kept free above the floor.", "512MiB"),
    Key("guard.priority", Whole(0, 9), "Of several guards on a host the highest acts first: the floor + 64 MiB for each.", "0"),
    *_level("tighten"),
    *_level("shed"),
    *_level("abort"),
    Key("guard.stop.mode", Choice(("act", "dry-run")), "Level stop: under guard.floor the guard ends all ranks. dry-run: only "
        "says that it would; the host is then protected by nobody.", "act"),
    Key("line.budget", OrWord("auto", Whole(1, 10**15)), "Token² budget B: new tokens x longest key length of a batch stay "
        "under it. auto: measured while it serves, for the rank with the least memory.", "2.0e8"),
    Key("line.start", Whole(1, 10**15), "Token² budget that `auto` starts from.",
        unset="2.0e8 while it starts, then what is available / headroom.pair_bytes"),
    Key("line.minimum", _TOKENS, "Smallest chunk (tokens) of a request that was accepted.", "256"),
    Key("line.maximum", _TOKENS, "Largest chunk (tokens), at a short prefix.",
        unset="the chunk flag in `args`, else 2048"),
    Key("line.granule", _TOKENS, "Chunks are multiples of this (tokens).",
        unset="page or block size and the engine's own alignment, at least 64"),
    Key("line.rule", Choice(("span", "prefix")), "span: T x (L+T) <= B. prefix: T x L <= B, as first published.",
        "span"),
    Key("line.step", Choice(("granule", "pow2")), "pow2: only powers of two times the granule.", "granule"),
    Key("line.context", _TOKENS, "Longest request (tokens) that the engine may accept.",
        unset="the smaller of the model's own length and what the line allows"),
    Key("indexer.budget", Size(2**20, 2**40), "What an attention indexer's scores may take at once; whole MiB (hook indexer).",
        "256MiB"),
    Key("headroom.reserve", Reserve(), "Memory kept free of KV on each rank (hook headroom): a fraction of it, a size, one for "
        "each rank (6GiB+4GiB), or derived: a prefill under the line, and what the engine takes after sizing.", "0.08"),
    Key("headroom.pair_bytes", Whole(0, 1000), "What a prefill holds for each (new token, key), for `derived`; published: 14.",
        "14"),
    Key("empty_cache.when", Choice(("never", "pressure", "every-chunk")), "When memory that an engine only keeps goes back, "
        "after a prefill chunk (hook empty-cache).", "pressure"),
    Key("empty_cache.mark", Size(), "Available memory under which that is (`pressure`).",
        unset="guard.floor + guard.margin + what a prefill under the line holds"),
    Key("limits.drain", Duration(0, 86400), "Time for requests in flight to end after SIGTERM.", "30s"),
    Key("limits.start_stall", Duration(1, 86400), "A start without any progress for this long has failed.", "5m"),
    Key("limits.hang", Duration(0, 86400), "Time after which a worker with work that does not move has hung, where no step "
        "takes longer; 0s: never.", "2s"),
    Key("limits.hang_factor", Whole(2, 1000), "A step may take this many times the longest before it.", "5"),
    Key("limits.hang_busy", Duration(1, 86400), "The same time while its processes compute: a compiler, a spin.", "60s"),
    Key("limits.restarts", Whole(0, 1000), "Failures in a row after which a worker stays failed.", "5"),
    Key("limits.backoff_first", Duration(0.001, 86400), "Pause before the first restart; it doubles each time.", "1s"),
    Key("limits.backoff_longest", Duration(0.001, 86400), "The longest such pause.", "5m"),
    Key("hygiene.limit", Duration(1, 3600), "Time in which a generation's device memory must be free again.", "30s"),
    Key("hygiene.tolerance", Size(), "What may be missing of it.", "512MiB"),
    Key("hygiene.drop_page_cache", Choice(("never", "weights")), "weights: between generations the model's files leave "
        "the page cache, for machines whose devices use the host's memory.", "never"),
    Key("nodes.addresses", ListOf(_HOST), "Hosts that the one worker spans, the leader first; its ranks are spread evenly over "
        "them, and each runs `tightrank up --node-rank`.", ""),
    Key("nodes.rank", Whole(0, 255), "Which of them this host is.", unset="needed where there are several"),
    Key("nodes.port", _PORT, "Port on the leader where the engine's ranks meet.", "29500"),
    Key("nodes.token_file", Path(), "File with the token that the hosts' supervisors show each other.",
        unset="needed where there are several"),
    Key("nodes.lease", Duration(1, 60), "A host that the other side has not heard of for so long is lost, and ends its ranks.",
        "3s"),
    Key("pd.transfer", Text(r"[a-z0-9_]+", "a name of a-z, 0-9 and _"), "What carries KV from prefill to decode workers.",
        unset="mooncake for SGLang, nixl for vLLM"),
    # 6 s: NIXL's lease is renewed in whole sixths of it
    Key("pd.patience", Duration(6, 86400), "Time after which the engines themselves give up waiting for a peer; longer than "
        "the longest prefill.", "120s"),
    Key("pd.restart", Choice(("one", "pair")), "pair: where one of prefill and decode is restarted the other is too.", "one"),
    Key("gateway.host", _HOST, "Address of the gateway.", "127.0.0.1"),
    Key("gateway.port", _PORT, "Port of the gateway.", "8000"),
    Key("gateway.supervisors", ListOf(Url()), "Supervisors whose workers the gateway serves.",
        unset="the one of this file, at http.host and http.port"),
    Key("gateway.engine_key_file", Path(), "File with the engines' API key, for requests of the gateway's own.",
        unset="they carry none"),
    Key("gateway.body_limit", Size(1024, 2**32), "Longest body of a request.", "32MiB"),
    Key("gateway.in_flight", Whole(1, 10**6), "Requests at once; more get 429.", "1024"),
    Key("gateway.silence", Duration(1, 86400), "Longest silence of an engine without a supervisor.", "120s"),
    Key("gateway.canary", Duration(1, 86400), "A pair that was idle for this long is tried with a canary.", "30s"),
    Key("gateway.workers[].name", _NAME, "Name of an engine without a supervisor; unique.", required=True),
    Key("gateway.workers[].url", Url(), "Where it answers.", required=True),
    Key("gateway.workers[].engine", Choice(ENGINES), "What it is.", required=True),
    Key("gateway.workers[].role", _ROLE, "What it does of a request.", "both"),
    Key("gateway.workers[].model", Text(r"[^\s]*", "a name without spaces"),
        "The name that a request must give; empty: as the engine says.", ""),
    Key("gateway.workers[].transfer_port", _PORT, "Bootstrap port of an SGLang prefill worker.", "8998"),
    Key("gateway.workers[].context", _TOKENS, "Longest request (tokens) that it takes.", unset="not known"),
    Key("workers[].name", _NAME, "Name of the worker; unique.", required=True),
    Key("workers[].role", _ROLE, "What it does of a request.", "both"),
    Key("workers[].tensor_parallel", Whole(1, 1024), "Devices that share each layer.", "1"),
    Key("workers[].pipeline_parallel", Whole(1, 1024), "Devices in a row.", "1"),
    Key("workers[].devices", ListOf(Text(r"[A-Za-z0-9:._/-]+", "a device number or UUID")),
        "Devices it may use, one per rank.", unset="all that the engine sees"),
    Key("workers[].host", _HOST, "Address the engine listens on.", "127.0.0.1"),
    Key("workers[].port", _PORT, "Port the engine listens on.", "8001"),
    Key("workers[].address", _HOST, "How other machines reach it.", unset="its host"),
    Key("workers[].transfer_port", _PORT, "Where its peers ask for KV (SGLang: bootstrap, vLLM: NIXL's side channel).",
        unset="8998 (SGLang prefill) or 5600 (vLLM); one more for each further worker"),
    Key("workers[].args", ListOf(Text(r"[^\x00]+", "text")), "More arguments for the engine, passed as they are.", ""),
    Key("workers[].env", TableOf(_ENV_NAME), "More environment variables for the engine.", unset="none"),
    Key("workers[].api_key_file", Path(), "File with the engine's API key.", unset="the engine asks for none"),
)
KEYS: Mapping[str, Key] = {key.path: key for key in _ALL}
SECTIONS = ("http", "guard", "guard.tighten", "guard.shed", "guard.abort", "guard.stop", "line", "indexer", "headroom",
            "empty_cache", "limits", "hygiene", "nodes", "pd", "gateway")
TABLES = ("workers[]", "gateway.workers[]")      # lists of such sections

# No settings: the engines' mark and door, the cache of the set-up, the token of the command line's client.
RESERVED = ("TIGHTRANK_RUN", "TIGHTRANK_ADAPTER", "TIGHTRANK_CACHE", "TIGHTRANK_TOKEN")


def env_name(path: str) -> str:
    """`guard.floor` -> TIGHTRANK_GUARD_FLOOR."""
    return "TIGHTRANK_" + path.replace(".", "_").upper()


def overridable() -> dict[str, Key]:
    """Keys that the environment and `--set` may give: all but those in lists, and the program to start."""
    return {path: key for path, key in KEYS.items() if key.section not in TABLES and path != "command"}


def names(section: str) -> frozenset[str]:
    """What may stand in `section` ("": the file): its keys, sections and lists."""
    return frozenset(path.rpartition(".")[2].removesuffix("[]") for path in (*KEYS, *SECTIONS, *TABLES)
                     if path.rpartition(".")[0] == section)


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of tightrank.yaml: of a deployment, or of a gateway alone."""
    top = _object("")
    for section in SECTIONS:
        above, _, name = section.rpartition(".")
        place = top["properties"][above] if above else top
        place["properties"][name] = _object(section)
    for table in TABLES:
        section, _, name = table.removesuffix("[]").rpartition(".")
        place = top["properties"][section] if section else top
        place["properties"][name] = {"type": "array", "items": _object(table)}
    top["properties"]["workers"]["minItems"] = 1
    alone = {"required": ["gateway"], "not": {"required": ["workers"]}}
    either = [{"required": [*top.pop("required"), "workers"]}, alone]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "tightrank.yaml", **top, "anyOf": either}


def _object(section: str) -> dict[str, Any]:
    chosen = [key for key in _ALL if key.section == section]
    properties = {}
    for key in chosen:
        properties[key.path.rpartition(".")[2]] = {
            **key.kind.schema(),
            "description": key.doc + (f" Default: {key.default or key.unset}." if key.default or key.unset else "")}
    return {"type": "object", "additionalProperties": False, "properties": properties,
            "required": [key.path.rpartition(".")[2] for key in chosen if key.required]}
