"""What is to be measured: one worker of /status and /plan, and where its requests go. Pure."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tightrank.config.units import WILDCARDS
from tightrank.errors import ConfigError

Json = Mapping[str, Any]
EVENT_KINDS = ("level", "decision", "dry-run", "cause", "phase", "line")       # what is kept of the journal
PLANNED = ("argv", "env", "hooks", "line", "context_tokens", "tensor_parallel", "pipeline_parallel", "devices")    # how it runs
_FALLBACK_IDS = (5, 250)       # in every vocabulary; the lowest are often special


class NotThere(Exception):
    """Who should answer does not, or is not ready: a sentence. Exit code 69."""


@dataclass(frozen=True, slots=True)
class Target:
    """One worker. `url`: where its requests go; `longest_prompt_tokens` None: it has no limit that the supervisor knows."""
    supervisor: str
    worker: str
    generation: int
    engine: str
    engine_version: str | None
    role: str
    model: str
    served_model: str
    url: str
    longest_prompt_tokens: int | None
    guard_floor_bytes: int
    plan: Json = field(default_factory=dict)           # PLANNED of its entry of /plan

    def identity(self) -> dict[str, Any]:
        """What must be the same for two measurements to be one. Not the generation: the guard may have ended the last."""
        left_out = ("supervisor", "generation", "longest_prompt_tokens")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class Settings:
    """How to ask. `token_range`: from which IDs prompts are drawn."""
    api_key: str | None
    timeout_seconds: float
    token_range: tuple[int, int]


def find(status: Json, plan: Json, supervisor: str, *, worker: str | None, endpoint: str | None,
         gateway: str | None) -> Target:
    """The worker of that name, or the first that takes prompts. `endpoint`: asked for; `gateway`: the configuration's.

    Raises ConfigError for a name or role that cannot be used, NotThere for a worker that is not up.
    """
    takers = [each for each in status["workers"] if each["role"] != "decode"]
    found = next((each for each in takers if worker in (None, each["name"])), None)
    if found is None:
        known = ", ".join(each["name"] for each in takers) or "none"
        raise ConfigError(f"--worker {worker}: takes no prompts here; those that do: {known}")
    if found["engine"] == "atom":
        raise ConfigError(f"--worker {found['name']}: ATOM takes prompts as text only, and a ramp needs their exact length")
    if found["phase"] != "up":
        raise NotThere(f"{found['name']} is {found['phase']}" + (f": {found['reason']}" if found["reason"] else ""))
    url = endpoint or (_engine_url(found, supervisor) if found["role"] == "both" else gateway)
    if url is None:
        raise ConfigError(f"{found['name']} is a prefill worker, whose requests go through a gateway; name it with --endpoint")
    entries = {each["name"]: each for each in plan.get("workers", ())}
    entry = entries.get(found["name"], {})
    return Target(supervisor, found["name"], found["generation"], found["engine"], found["engine_version"], found["role"],
                  str(entry.get("model", "")), found["served_model"], url, found["longest_prompt_tokens"],
                  (status["guard"] or {}).get("floor_bytes") or status["floor_bytes"],
                  {name: entry[name] for name in PLANNED if name in entry})


def _engine_url(worker: Json, supervisor: str) -> str:
    here = urlsplit(supervisor).hostname
    host = str(worker["address"] or (here if worker["host"] in WILDCARDS else worker["host"]))
    return f"http://[{host}]:{worker['port']}" if ":" in host else f"http://{host}:{worker['port']}"


def token_range(model: Json) -> tuple[int, int]:
    """From which IDs (first, end) prompts are drawn: special ones, of images too, lie at the ends of a vocabulary."""
    nested = model.get("text_config")
    size = (nested if isinstance(nested, Mapping) else model).get("vocab_size", model.get("vocab_size"))
    return (size // 4, size // 2) if type(size) is int and size >= 256 else _FALLBACK_IDS


def differences(before: Json, now: Json, path: str = "") -> Iterator[str]:
    """What is not the same in two identities, each with both values."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{path}{key}.")
        elif isinstance(old, list) and isinstance(new, list) and old != new:
            less, more = ([word for word in one if word not in other] for one, other in ((old, new), (new, old)))
            yield f"{path}{key} had {_shown(less)} and has {_shown(more)}"
        elif old != new:
            yield f"{path}{key} was {_shown(old)} and is {_shown(new)}"


def _shown(value: Any) -> str:
    text = (" ".join(map(str, value)) or "nothing more") if isinstance(value, list) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."


# --- what ends a ramp -------------------------------------------------------------------------------------------------

def concerns(event: Json, worker: str) -> bool:
    """Whether an event is one of the worker's, or of the host's memory."""
    return event["kind"] in EVENT_KINDS and event["worker"] in (None, worker)


def trouble(events: Sequence[Json], status: Json | None, target: Target) -> str:
    """The first thing that the guard did, or that befell the worker; "" when there is none. The cause comes first: it
    explains the others."""
    named = {kind: [each for each in events if each["kind"] == kind] for kind in ("cause", "level", "dry-run", "phase")}
    named["level"] = [each for each in named["level"] if each["data"].get("state") == "fires"]
    for found in named.values():
        if found:
            first = found[0]
            return f"{target.worker}: {first['sentence']}" if first["kind"] == "phase" else str(first["sentence"])
    return _standing(status, target) if status is not None else ""


def _standing(status: Json, target: Target) -> str:
    """The same from the status alone: what was in force before, or the journal has lost."""
    level = next((each for each in status["levels"] if each["in_force"]), None)
    if level is not None:
        return f"{level['level']} is in force: {level['sentence']}"
    worker = next((each for each in status["workers"] if each["name"] == target.worker), None)
    if worker is None:
        return f"{target.worker}: the supervisor has it no more"
    if worker["phase"] != "up":
        return f"{target.worker} is {worker['phase']}" + (f": {worker['reason']}" if worker["reason"] else "")
    if worker["generation"] != target.generation:
        return f"{target.worker} was started anew (generation {worker['generation']}, was {target.generation})"
    return ""
