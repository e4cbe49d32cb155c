"""What the guard says: its page, and its last record when it has acted."""
from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightrank.adapter import pages, wire

_FIELDS = ("pid", "start_time", "monotonic_ns", "samples", "available_bytes", "lowest_available_bytes", "floor_bytes",
           "stops", "last_stop_monotonic_ns", "daemon_pid", "daemon_starts", "locked", "daemon_beat_age_ns", "dry_stops")
_UNKNOWN = 2**64 - 1


class GuardReader:
    """Reads `guard.page` and `guard.jsonl` of the run directory. Without a guard (not yet written) it answers {}."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._page: Any = None
        self._stops = 0
        self._last: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        """The page's fields by name (None: unknown), "age_seconds" of its last sample, and "last": its last record."""
        try:
            if self._page is None:
                self._page = pages.Page(str(self._directory / "guard.page"), f"{len(_FIELDS)}Q", False)
            values = dict(zip(_FIELDS, self._page.read(), strict=True))
        except (OSError, ValueError, wire.WireError):
            return {}
        page: dict[str, Any] = {name: None if value == _UNKNOWN else value for name, value in values.items()}
        page["age_seconds"] = (time.monotonic_ns() - values["monotonic_ns"]) / 1e9
        if values["stops"] != self._stops:
            self._stops, self._last = values["stops"], self._last_record()
        return {**page, "last": self._last}

    def stops(self) -> int:
        """How often the guard has acted; the last number known when its page cannot be read now."""
        self.read()
        return self._stops

    def _last_record(self) -> Mapping[str, Any]:
        try:
            with open(self._directory / "guard.jsonl", "rb") as file:
                lines = file.read()[-65536:].splitlines()
        except OSError:
            return {}
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:
                continue           # torn by a crash, or by our cut
            if isinstance(record, dict):
                return record
        return {}
