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

    def last(self, worker: str) -> int:
        return self._numbers.get(worker, 0)

    def next(self, worker: str, over: int = 0) -> int:
        """One more than the last, and than `over`. Raises OSError when it cannot be kept."""
        return self.take(worker, max(self.last(worker), over) + 1)

    def take(self, worker: str, number: int) -> int:
        """A number that somebody else gave. Raises OSError when it was used before, or cannot be kept."""
        if number <= self.last(worker):
            raise OSError(f"generation {number} is not newer than {self.last(worker)}")
        self._numbers[worker] = number         # first: it may lie on the disk although the writing failed
        wire.write_json(str(self._path), self._numbers)
        return number
