"""What the adapter and the supervisor say to each other, and where: one run directory for each generation of a worker.

    settings.json     supervisor -> adapter   once, before the engine starts
    control           supervisor -> adapter   a page: the line's budget now (vLLM's scheduler reads it; SGLang gets it as
                                              a control request, since its schedulers are replicas)
    hello-<pid>.json  adapter -> supervisor   one per engine process, replaced whole when a hook's state changes
    beat-<pid>        adapter -> supervisor   a page: progress of the engine's own loop
    stacks-<pid>      adapter -> supervisor   what faulthandler writes on STACK_SIGNAL: the stacks of all threads
    records.sock      adapter -> supervisor   datagrams (JSON objects): "step" and "fault"; they may be lost

Standard library only, no import of ours; the supervisor loads this file by path. Times are CLOCK_MONOTONIC nanoseconds
(one clock for all processes of a host, unmoved by clock changes).
"""
import errno
import json
import os
import socket
from _thread import get_native_id
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

SCHEMA = 3
SETTINGS, CONTROL, RECORDS = "settings.json", "control", "records.sock"
BUDGET_KEY = "tightrank_line_budget"  # SGLang: POST /set_internal_state {"server_args": {BUDGET_KEY: token²}}
ENV_ADAPTER, ENV_RUN = "TIGHTRANK_ADAPTER", "TIGHTRANK_RUN"
# A real-time signal from the middle (they are 34 to 64): no engine, torch or library that was read sets it. SGLang takes
# SIGQUIT, users take SIGUSR1 and SIGUSR2 (Slurm, torchrun), glibc 32 and 33.
STACK_SIGNAL = 50
ROW_KEYS = 30_000  # see `step_cost`

# Which processes of an engine must hold a hook in force. A role that is not named here says hello and no more.
HOOK_ROLES: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "vllm": {"ranks": ("engine-core", "worker"), "line": ("engine-core",), "indexer": ("worker",),
             "headroom": ("worker",), "empty-cache": ("worker",), "heads": ("worker",)},
    "sglang": {"ranks": ("scheduler",), "line": ("scheduler",), "indexer": ("scheduler",), "headroom": ("scheduler",),
               "empty-cache": ("scheduler",)},
    "atom": {"ranks": ("engine-core", "runner"), "indexer": ("runner",), "headroom": ("runner",), "empty-cache": ("runner",)},
}

WANTED, IN_FORCE, OBSERVING, SKIPPED, FAILED = "wanted", "in-force", "observing", "skipped", "failed"
DEGRADED = "degraded"          # after faults of ours: it answers its fallback, or nothing, from here on
PEAKS = "peaks"                # among the values of the hook `ranks`: steps tell the memory that they began with
OBSERVE = "observe"            # among the values of a hook: it computes and records, and changes nothing


class WireError(Exception):
    """A file or record that does not have the agreed form; the message names the path or field."""


class Settings(NamedTuple):
    """settings.json. `hooks` maps each wanted hook to its values; `drill` asks for a fault of ours (fault.py).

    ranks: PEAKS, or nothing. line: the keyword arguments of `line.chunk_tokens` and "budget"; tokens and token². indexer:
    "budget_bytes". headroom: "fraction" (of the rank's memory) or "bytes" (one, or one per rank) with "terms" (what the bytes
    are made of), and "ranks" (of this worker on this host). empty-cache: "when" and "mark_bytes". Any of them: OBSERVE.
    """
    worker: str
    generation: int
    engine: str
    hooks: Dict[str, Dict[str, Any]]
    drill: Optional[Dict[str, Any]] = None

    @property
    def line(self) -> Dict[str, Any]:
        return self.hooks.get("line", {})

    def observes(self, hook: str) -> bool:
        """Whether `hook` must change nothing."""
        return bool(self.hooks.get(hook, {}).get(OBSERVE))


class Hello(NamedTuple):
    """hello-<pid>.json: who a process is and which hooks it holds.

    `start_time` is field 22 of /proc/<pid>/stat (clock ticks after boot); pid and start_time name a process for good.
    `hooks` maps each wanted hook of this role to {"state": WANTED|IN_FORCE|OBSERVING|SKIPPED|FAILED, "wanted": str,
    "found": str}.
    `facts` are small measured facts ("granule_tokens", "maximum_tokens", "kv_tokens", ...).
    """
    pid: int
    start_time: int
    role: str
    engine: str
    engine_version: str
    worker: str
    generation: int
    rank: Optional[int]
    tp_rank: Optional[int]
    pp_rank: Optional[int]
    dp_rank: Optional[int]
    device: Optional[str]
    hooks: Dict[str, Dict[str, str]]
    facts: Dict[str, Any]


class Beat(NamedTuple):
    """A beat page: when the engine's own loop last turned, and its counters since the process started."""
    pid: int
    start_time: int
    monotonic_ns: int
    loops: int
    steps: int
    prefill_tokens: int
    in_flight: int
    step_cost: int = 0  # of the prefill step that was started last; 0: none, or an adapter that does not tell


class Step(NamedTuple):
    """One prefill step of one rank. rows x width <= budget is the line; chunks are [prefix, new tokens] per request.

    As it began, where the hook `ranks` has PEAKS: `rest_bytes`, what `peak_bytes` rose from; `available_bytes` to this rank;
    `untouched_bytes` of its KV cache, which count as available and are not. None: not known, or not looked at for this step.
    """
    generation: int
    pid: int
    sequence: int
    rank: int
    monotonic_ns: int
    rows: int
    width: int
    budget: int
    over: bool
    milliseconds: float
    peak_bytes: Optional[int]
    chunks: List[List[int]]
    rest_bytes: Optional[int] = None
    available_bytes: Optional[int] = None
    untouched_bytes: Optional[int] = None


class Fault(NamedTuple):
    """One of our own functions raised inside the engine. `replicated`: the decision is taken alike on all ranks."""
    generation: int
    pid: int
    hook: str
    where: str
    error: str
    replicated: bool


_KINDS = {"step": Step, "fault": Fault}
_compact = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each record


def start_time(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat. Raises OSError when there is no such process."""
    with open("/proc/%d/stat" % pid, "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _fields(cls: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise WireError("%s: an object was expected, found %s" % (where, type(values).__name__))
    missing = [name for name in cls._fields if name not in values]
    if missing:
        raise WireError("%s: field %s is missing" % (where, missing[0]))
    return _checked(cls(**{name: values[name] for name in cls._fields}), where)


def _checked(record: Any, where: str) -> Any:
    """`record` when every field holds what its annotation says. The writer's process runs other people's code too."""
    for name, kind in type(record).__annotations__.items():
        if not _fits(getattr(record, name), kind):
            raise WireError("%s: field %s is of another form" % (where, name))
    return record


def _fits(value: Any, kind: Any) -> bool:
    origin: Any = getattr(kind, "__origin__", None)
    inner: Any = getattr(kind, "__args__", ())
    if origin is Union:
        return any(_fits(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(item, inner[0]) for item in value)
    if kind is float:
        return type(value) in (int, float)
    return kind is Any or type(value) is kind


def write_json(path: str, values: Dict[str, Any]) -> None:
    """Replaces `path` whole (temporary file, then rename), private to its owner. Raises OSError."""
    text = json.dumps(values)
    temporary = "%s.%d.%d.tmp" % (path, os.getpid(), get_native_id())
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:  # a full disk: the old file stays and no half of a new one
        os.unlink(temporary)
        raise


def read_json(path: str, cls: Any) -> Any:
    """A `Settings` or `Hello` from a file. Raises WireError for another schema or form, OSError when unreadable."""
    with open(path) as file:
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise WireError("%s: not JSON (%s)" % (path, error)) from None
    found = values.get("schema") if isinstance(values, dict) else None
    if found != SCHEMA:
        raise WireError("%s: schema %r, wanted %d: adapter and supervisor are of different versions"
                        % (path, found, SCHEMA))
    result = _fields(cls, values, path)
    if cls is Settings:
        return result
    faults = result.facts.get("faults", [])
    if not _fits(faults, List[Dict[str, Any]]):
        raise WireError("%s: facts.faults is of another form" % path)
    for fault in faults:
        _fields(Fault, dict(fault, generation=result.generation, pid=result.pid), path)
    return result


def write_settings(directory: str, settings: Settings) -> None:
    write_json(os.path.join(directory, SETTINGS), dict(settings._asdict(), schema=SCHEMA))


def read_settings(directory: str) -> Settings:
    settings: Settings = read_json(os.path.join(directory, SETTINGS), Settings)
    return settings


def step_cost(rows: int, width: int) -> int:
    """How much a prefill step computes, in (row, key) pairs, to compare steps with each other.

    A row costs its keys and, whatever they are, the weights: in a dense model of 8e9 parameters as much as 30,000 keys
    (2 x 8e9 operations over 4 x 4096 x 32).
    """
    return rows * (width + ROW_KEYS)


def stacks_path(directory: str, pid: int) -> str:
    return os.path.join(directory, "stacks-%d" % pid)


def hello_path(directory: str, pid: int) -> str:
    return os.path.join(directory, "hello-%d.json" % pid)


def write_hello(directory: str, hello: Hello) -> None:
    write_json(hello_path(directory, hello.pid), dict(hello._asdict(), schema=SCHEMA))


def encode(record: Any) -> bytes:
    """A `Step` or `Fault` as one datagram."""
    kind = "step" if type(record) is Step else "fault"
    return _compact([SCHEMA, kind, *record]).encode()


def decode(datagram: bytes) -> Any:
    """The `Step` or `Fault` of a datagram. Raises WireError."""
    try:
        schema, kind, *values = json.loads(datagram)
        cls = _KINDS[kind]
        if schema != SCHEMA or len(values) != len(cls._fields):  # type: ignore[attr-defined]
            raise WireError("record: schema %r of kind %r with %d fields" % (schema, kind, len(values)))
        return _checked(cls(*values), "record")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError("record: %s: %s" % (type(error).__name__, error)) from None


def socket_address(directory: str, descriptor: int) -> str:
    """The records socket by way of an open directory: a socket's path is limited to 107 bytes, a run directory is not."""
    return "/proc/self/fd/%d/%s" % (descriptor, RECORDS)


class Sender:
    """Sends records; never blocks and never raises. Unsent records wait (bounded) for the next send; then the oldest go."""

    def __init__(self, directory: str, keep: int = 512) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._address = socket_address(directory, self._directory)
        self._waiting: List[bytes] = []
        self._keep = keep
        self.lost = 0

    def send(self, record: Any) -> None:
        self._waiting.append(encode(record))
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            try:
                self._socket.sendto(self._waiting[0], self._address)
            except OSError as error:  # full, or the supervisor is gone: neither may disturb an engine
                if error.errno == errno.EMSGSIZE:  # it never fits, and must not hold up the others
                    del self._waiting[0]
                    self.lost += 1
                    continue
                excess = len(self._waiting) - self._keep
                if excess > 0:
                    del self._waiting[:excess]
                    self.lost += excess
                return
            del self._waiting[0]
