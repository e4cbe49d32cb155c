"""What goes into a bundle: (name, text) pairs, made one after the other in the thread that writes them."""
from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightrank import __version__, plan
from tightrank.bundle import MEMBER_BYTES, Part
from tightrank.bundle.memory import Sample
from tightrank.config import Config
from tightrank.diagnose import without_secrets
from tightrank.records import Failure, Line, Status, WorkerSpec
from tightrank.report import diagnosis_json, plain, status_json

LINES = 500                  # the last of each stream of each process
STREAMS = 64
KERNEL = "/dev/kmsg"
KERNEL_LINES = 500
RUNS = 3                     # newest generations of each worker whose stacks `tightrank bundle` takes
# How engines mark whose line it is: vLLM "(Worker_TP0 pid=12)", SGLang "[2026-11-30 12:00:00 TP0]".
_PROCESS = re.compile(r"\(([A-Za-z][\w.-]*) (?:rank=\d+ )?pid=(\d+)\)|"
                      r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ([A-Z]+\d+(?: [A-Z]+\d+)*)\]")


@dataclass(frozen=True, slots=True)
class Scene:
    """What a failure happened in, as it was then; nothing here changes any more."""
    config: Config
    specs: Sequence[WorkerSpec]
    status: Status | None
    events: Sequence[Mapping[str, Any]]
    memory: Sequence[Sample]


def of_failure(failure: Failure, scene: Scene) -> Iterator[Part]:
    """The bundle of one failure."""
    yield "summary.json", _json({
        "worker": failure.worker, "generation": failure.generation, "unix": failure.unix, "cause": failure.diagnosis.cause,
        "summary": failure.diagnosis.summary, "change": failure.diagnosis.change, "stacks": failure.stacks})
    yield "diagnosis.json", _json(diagnosis_json(failure.diagnosis))
    yield "versions.json", _json(versions({failure.worker: failure.engine_version}))
    yield "journal.jsonl", _rows(scene.events)
    if scene.status is not None:
        yield "status.json", _json(status_json(scene.status))
    yield "config.json", config_json(scene.config)
    yield "plan.json", _json(plan.to_json(scene.specs))
    yield "memory.jsonl", _rows([{**sample._asdict(), "ranks": dict(sample.ranks)} for sample in scene.memory])
    yield from line_parts(failure.lines)
    yield from kernel_part()
    if failure.run_directory:
        yield from stack_parts(Path(failure.run_directory))


def of_state(state: Path, config: Config, specs: Sequence[WorkerSpec], status: str) -> Iterator[Part]:
    """The bundle of a state directory, whether a supervisor runs there or not. `status`: its /status, or why there is none."""
    yield "versions.json", _json(versions({}))
    for name in ("journal.jsonl.1", "journal.jsonl", "run/guard.jsonl", "generations.json"):
        if text := tail(state / name):
            yield name.replace("/", "-"), text
    yield "status.json", status
    yield "config.json", config_json(config)
    yield "plan.json", _json(plan.to_json(specs))
    for worker in config.workers:
        yield f"logs/{worker.name}.log", _shown(tail(state / "logs" / f"{worker.name}.log"))
        for run in _newest_runs(state / "run", worker.name):
            yield from ((f"{run.name}/{name}", text) for name, text in stack_parts(run))
    yield from kernel_part()


def _newest_runs(directory: Path, worker: str) -> list[Path]:
    found = [(int(number), path) for path in directory.glob(f"{worker}-*")
             if (number := path.name.removeprefix(f"{worker}-")).isdecimal()]
    return [path for _, path in sorted(found)[-RUNS:]]


def versions(engines: Mapping[str, str | None]) -> Mapping[str, Any]:
    """`engines`: of each worker, as its ranks say it."""
    return {"tightrank": __version__, "engines": dict(engines), "python": platform.python_version(),
            "libc": " ".join(platform.libc_ver()), "kernel": " ".join(os.uname())}


def config_json(config: Config) -> str:
    """The configuration with secrets as ***."""
    values = json.loads(config.to_json())
    values["gateway"].pop("engine_key", None)
    for worker in values["workers"]:
        worker["args"], worker["env"] = plan.masked_arguments(worker["args"]), plan.masked_environment(worker["env"])
    return _json(values)


def line_parts(lines: Sequence[Line]) -> Iterator[Part]:
    """The last lines of each stream, and of each process that marks its own."""
    streams: dict[str, deque[Line]] = defaultdict(lambda: deque(maxlen=LINES))
    for line in lines:
        name = _stream(line)
        streams[name if name in streams or len(streams) < STREAMS else line.stream].append(line)
    for name, kept in sorted(streams.items()):
        yield f"lines/{name}.txt", "".join(f"{line.unix:.3f} {without_secrets(line.text)}\n" for line in kept)


def _stream(line: Line) -> str:
    match = _PROCESS.search(line.text[:200])
    if match is None:
        return line.stream
    return f"{line.stream}-" + (f"{match[1]}-{match[2]}" if match[1] else match[3].replace(" ", "-"))


def stack_parts(run_directory: Path) -> Iterator[Part]:
    """What the processes of a generation wrote of their stacks (stacks.py), named after who they are."""
    for path in sorted((*run_directory.glob("stacks-*"), *run_directory.glob("pyspy-*"))):
        if text := tail(path):
            yield f"stacks/{_who(run_directory, path.name.rpartition('-')[2])}{path.name}.txt", text


def _who(run_directory: Path, pid: str) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        hello = json.loads((run_directory / f"hello-{pid}.json").read_text())
        role = re.sub(r"[^a-z-]", "", hello["role"])
        return f"{role}-" if hello["rank"] is None else f"{role}-{int(hello['rank'])}-"
    return ""


def kernel_part(path: str = KERNEL) -> Iterator[Part]:
    """The kernel's last lines, where we may read them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        lines = deque(_records(lambda: os.read(descriptor, 8192)), maxlen=KERNEL_LINES)
    finally:
        os.close(descriptor)
    if lines:
        yield "kernel.txt", "".join(f"{line}\n" for line in lines)


def _records(read: Callable[[], bytes]) -> Iterator[str]:
    for _ in range(200_000):               # the ring is some MiB, and is written to while we read
        try:
            record = read()
        except BrokenPipeError:            # overwritten under our hands: the next read goes on behind it
            continue
        except OSError:                    # EAGAIN: the end
            return
        if not record:
            return
        yield record.decode(errors="replace").rstrip("\n")


def tail(path: Path, most_bytes: int = MEMBER_BYTES) -> str:
    """The last whole lines of a file; "" where there is none; in its place why it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - most_bytes, 0))
            text = file.read(most_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"
    return text if size <= most_bytes else text.partition("\n")[2]      # half a line may hold half a secret


def _shown(text: str) -> str:
    return "".join(f"{without_secrets(line)}\n" for line in text.splitlines())


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(plain(row)) + "\n" for row in rows)


def _json(value: Any) -> str:
    return json.dumps(plain(value), indent=1) + "\n"
