"""The number of each worker's last generation, on disk."""
from __future__ import annotations

import json
from pathlib import Path

from tightrank.adapter import wire
from tightrank.errors import ConfigError


class Generations:
    """The last generation number of each worker, on disk before a start uses it: a number is used once, whatever dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: dict[str, int] = {}
        if path.exists():
            try:
                self._numbers = {str(name): int(number) for name, number in json.loads(path.read_text()).items()}
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                raise ConfigError(f"{path}: not a table of generations ({error}); remove it if no engine of this "
                                  "deployment runs", cause="state-directory-unusable") from None

    def next(self, worker: str) -> int:
        """Raises OSError when it cannot be kept."""
        self._numbers[worker] = self._numbers.get(worker, 0) + 1
        wire.write_json(str(self._path), self._numbers)
        return self._numbers[worker]
