"""The kinds of values that a configuration holds: text as written -> value, and back. Pure.

A kind's `parse` raises ValueError whose message completes the sentence "<key>: <text as written> ...".
Text is what stands in the file, the environment or on the command line, so YAML's own guesses (`no`, 1:30, 0o10) never
apply.
"""
from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
          "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_URL = re.compile(r"http://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/?")
_COUNT = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?")


WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}      # all addresses: how this host reaches what listens on them


def local_url(host: str, port: int) -> str:
    """How this host reaches an HTTP server that listens there."""
    name = WILDCARDS.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or address means this host only; other names are not looked up."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Kind(Protocol):
    """A kind of value. `suffix` is what the field's name carries as its unit."""

    @property
    def suffix(self) -> str: ...
    def parse(self, text: str) -> Any: ...
    def schema(self) -> dict[str, Any]: ...


def _with_unit(text: str, units: dict[str, Any], example: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"must be a number with one of the units {', '.join(units)}, for example {example}")
    return float(match[1]) * float(units[match[2]])


def format_size(size: int) -> str:
    """The shortest exact way to write `size` bytes that `Size` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _SIZES[unit] and size % (_SIZES[unit] // 4) == 0:
            return f"{size / _SIZES[unit]:.2f}".rstrip("0").rstrip(".") + unit
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """The shortest way to write `seconds` that `Duration` reads back (to the millisecond)."""
    milliseconds = round(seconds * 1000)
    for unit, scale in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % scale == 0:
            return f"{milliseconds // scale}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def _between(value: float, least: float, most: float, show: Any) -> None:
    if not least <= value <= most:
        raise ValueError(f"must be between {show(least)} and {show(most)}")


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, written with a unit: 1.5GiB, 512MiB."""
    least: int = 0
    most: int = 2**50
    suffix: str = "_bytes"

    def parse(self, text: str) -> int:
        size = _with_unit(text, _SIZES, "1.5GiB")
        _between(size, self.least, self.most, lambda value: format_size(int(value)))
        if size != int(size):
            raise ValueError("must be a whole number of bytes")
        return int(size)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": rf"^\d+(\.\d+)? ?({'|'.join(_SIZES)})$"}


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory to keep free on each rank: a fraction of it, a size, a size for each rank, or `derived`."""
    suffix: str = ""

    def parse(self, text: str) -> float | str | tuple[int, ...]:
        if text == "derived":
            return text
        if re.fullmatch(r"0?\.[0-9]{1,18}|0", text):
            return float(text)
        if not re.search(r"[A-Za-z]", text):
            raise ValueError("must be a fraction under 1 (0.08), a size (4GiB), one for each rank (6GiB+4GiB), or derived")
        try:
            return tuple(Size().parse(part.strip()) for part in text.split("+"))
        except ValueError as error:
            raise ValueError(f"{error}; or it is a fraction under 1 (0.08), or derived") from None

    def schema(self) -> dict[str, Any]:
        size = rf"\d+(\.\d+)? ?({'|'.join(_SIZES)})"
        return {"type": ["number", "string"], "minimum": 0, "exclusiveMaximum": 1,
                "pattern": rf"^(derived|0|0?\.\d{{1,18}}|{size}( ?\+ ?{size})*)$"}


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, written with a unit: 250ms, 10s, 5m, 1h."""
    least: float = 0.0
    most: float = 7 * 86400.0
    suffix: str = "_seconds"

    def parse(self, text: str) -> float:
        seconds = round(_with_unit(text, _DURATIONS, "10s"), 6)
        _between(seconds, self.least, self.most, format_duration)
        return seconds

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": rf"^\d+(\.\d+)? ?({'|'.join(_DURATIONS)})$"}


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number, written 2048, 200_000_000 or 2.0e8."""
    least: int
    most: int
    suffix: str = ""

    def parse(self, text: str) -> int:
        if not _COUNT.fullmatch(text) or re.match(r"0[0-9_]", text):
            raise ValueError("must be a whole number, for example 2048, 200_000_000 or 2.0e8")
        digits = text.replace("_", "")
        value = int(digits) if digits.isdigit() and len(digits) < 100 else float(digits)
        _between(value, self.least, self.most, lambda bound: str(int(bound)))
        if value != int(value):
            raise ValueError("must be a whole number")
        return int(value)

    def schema(self) -> dict[str, Any]:
        # minimum and maximum bind a number, the pattern a string: YAML readers take 2.0e8 for a string
        return {"type": ["integer", "string"], "minimum": self.least, "maximum": self.most,
                "pattern": f"^{_COUNT.pattern}$"}


@dataclass(frozen=True, slots=True)
class OrWord:
    """A whole number, or one word."""
    word: str
    number: Whole
    suffix: str = ""

    def parse(self, text: str) -> int | str:
        if text == self.word:
            return text
        try:
            return self.number.parse(text)
        except ValueError as error:
            raise ValueError(f"{error}; or it is {self.word}") from None

    def schema(self) -> dict[str, Any]:
        found = self.number.schema()
        return {**found, "pattern": f"^({self.word}|{_COUNT.pattern})$"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""
    words: tuple[str, ...]
    suffix: str = ""

    def parse(self, text: str) -> str:
        if text not in self.words:
            raise ValueError(f"must be one of {', '.join(self.words)}")
        return text

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that matches `pattern`; `what` says in words what that is."""
    pattern: str = r"[^\x00\n]+"
    what: str = "one line of text"
    suffix: str = ""

    def parse(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f"must be {self.what}")
        return text

    def schema(self) -> dict[str, Any]:
        # a reader of YAML may take a number or a boolean for what is text here; the pattern binds strings only
        return {"type": ["string", "number", "boolean"], "pattern": f"^{self.pattern}$"}


@dataclass(frozen=True, slots=True)
class Url:
    """Where an HTTP server listens: http://HOST:PORT and nothing more."""
    suffix: str = ""

    def parse(self, text: str) -> str:
        match = _URL.fullmatch(text)
        if match is None:
            raise ValueError("must be http://HOST:PORT, without a path, a query or credentials, for example http://10.0.0.2:9470")
        try:
            Whole(1, 65535).parse(match[1])
        except ValueError as error:
            raise ValueError(f"has the port {match[1]}, which {error}") from None
        return text.removesuffix("/")

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_URL.pattern}$"}


@dataclass(frozen=True, slots=True)
class Path:
    """A path; a relative one starts at the folder of the file that names it. `~` is the home directory."""
    suffix: str = ""

    def parse(self, text: str) -> str:
        return Text().parse(text)

    def schema(self) -> dict[str, Any]:
        return {"type": "string"}


def parse_item(kind: Kind, text: str) -> Any:
    """`text` as one of several. Raises ValueError whose message names it."""
    try:
        return kind.parse(text)
    except ValueError as error:
        raise ValueError(f"has '{text}', which {error}") from None


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list; outside the file it is written with commas."""
    kind: Kind
    suffix: str = ""

    def parse(self, text: str) -> tuple[Any, ...]:
        return self.parse_all(text.split(",") if text else [])

    def parse_all(self, texts: Sequence[str]) -> tuple[Any, ...]:
        return tuple(parse_item(self.kind, text) for text in texts)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.kind.schema()}


@dataclass(frozen=True, slots=True)
class TableOf:
    """Names with texts, such as environment variables."""
    names: Text
    suffix: str = ""

    def parse(self, text: str) -> dict[str, str]:
        raise ValueError("can only be set in the file")

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "propertyNames": {"pattern": f"^{self.names.pattern}$"},
                "additionalProperties": {"type": ["string", "number", "boolean"]}}
