"""A ramp on disk: report.json, which is its state too, with the report for people beside it. Each file is replaced whole."""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightrank import __version__
from tightrank.errors import ConfigError
from tightrank.verify.plots import chunk_plot, memory_plot, rate_plot
from tightrank.verify.ramp import Chunk, Outcome, Ramp, Size, bands, verdict
from tightrank.verify.report import markdown

SCHEMA = 1
REPORT = "report.json"


def save(directory: Path, ramp: Ramp) -> None:
    """All files of a ramp. Raises OSError; what was there before is then still whole."""
    write_whole(directory / REPORT, json.dumps(to_json(ramp), indent=1) + "\n")
    write_whole(directory / "report.md", markdown(ramp))
    for name, plot in (("rate.svg", rate_plot), ("chunk.svg", chunk_plot), ("memory.svg", memory_plot)):
        write_whole(directory / name, plot(ramp))


def write_whole(path: Path, text: str) -> None:
    """Replaces `path`: the old text or the new one, never a part of it, whatever happens meanwhile. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None      # a write's own names no file


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory is ours alone meanwhile. Raises ConfigError when another ramp holds it, OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{directory}: another ramp writes there; let it end, or take another directory") from None
        yield
    finally:
        os.close(descriptor)


def to_json(ramp: Ramp) -> dict[str, Any]:
    """With what follows from it, for other readers: `verdict`, and `bands` and `tokens_per_second` of each size."""
    passed, sentence = verdict(ramp)
    body = {"schema": SCHEMA, "kind": "ramp", "tightrank": __version__, "verdict": {"passed": passed, "sentence": sentence},
            **asdict(ramp)}
    for entry, size in zip(body["sizes"], ramp.sizes, strict=True):
        entry["tokens_per_second"] = size.rate
        entry["bands"] = [{**asdict(band), "tokens_per_second": band.rate} for band in bands(size.chunks)]
    return body


def load(path: Path) -> Ramp:
    """A ramp from its report.json, or the directory of one. Raises ConfigError, which names the file."""
    file = path / REPORT if path.is_dir() else path
    try:
        return from_json(read_json(file, "ramp"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: has not the form of a ramp's report ({type(error).__name__}: {error}); it was left as it "
                          "is, so repair it or start anew") from None


def read_json(file: Path, kind: str) -> Mapping[str, Any]:
    """One of our own reports. Raises ConfigError, which names the file."""
    try:
        body = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is no JSON ({str(error)[:100]}); it was left as it is: repair it or start anew") from None
    if not isinstance(body, dict) or body.get("kind") != kind or body.get("schema") != SCHEMA:
        raise ConfigError(f"{file}: is no report of `tightrank verify {kind}` of this version (kind {kind}, schema {SCHEMA})")
    return body


def from_json(body: Mapping[str, Any]) -> Ramp:
    """Raises KeyError, TypeError, ValueError or AttributeError for another form."""
    return Ramp(
        started_unix=float(body["started_unix"]), target=dict(body["target"]), floor_bytes=int(body["floor_bytes"]),
        guard_floor_bytes=int(body["guard_floor_bytes"]), sizes_tokens=tuple(map(int, body["sizes_tokens"])),
        answer_tokens=int(body["answer_tokens"]), sizes=tuple(map(_size, body["sizes"])))


def _size(entry: Mapping[str, Any]) -> Size:
    first = entry["first_token_seconds"]
    return Size(
        tokens=int(entry["tokens"]), outcome=Outcome(entry["outcome"]), why=str(entry["why"]), seed=int(entry["seed"]),
        generation=int(entry["generation"]), started_unix=float(entry["started_unix"]), seconds=float(entry["seconds"]),
        first_token_seconds=None if first is None else float(first), chunks=tuple(map(_chunk, entry["chunks"])),
        shared_steps=int(entry["shared_steps"]), memory=tuple((float(at), int(free)) for at, free in entry["memory"]),
        lowest_bytes=_bytes(entry["lowest_bytes"]), peak_bytes=_bytes(entry["peak_bytes"]),
        events=tuple(map(str, entry["events"])))


def _chunk(values: Mapping[str, Any]) -> Chunk:
    peak = values["peak_bytes"]
    return Chunk(int(values["prefix"]), int(values["tokens"]), float(values["seconds"]), None if peak is None else int(peak))


def _bytes(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in values.items()}
