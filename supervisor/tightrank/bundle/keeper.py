"""The daemon's part: remembers memory, and has a bundle made of each failure. Nothing here waits but `close`."""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tightrank import bundle
from tightrank.bundle import parts, secrets
from tightrank.bundle.memory import Memory
from tightrank.config import Config
from tightrank.records import Failure, Snapshot, WorkerSpec
from tightrank.report import Board, Journal
from tightrank.worker import Worker

EVENTS = 1000                # of the journal; about 330 KB
CLOSE_SECONDS = 10.0         # for what is being written when the daemon ends


class Keeper:
    """Of one deployment."""

    def __init__(self, config: Config, specs: Sequence[WorkerSpec], environment: Mapping[str, str],
                 wake: Callable[[], None]) -> None:
        self._config, self._specs = config, specs
        self._directory = bundle.folder(Path(config.state_directory))
        self._scrub = secrets.scrubber(secrets.known(config, environment))
        self._memory = Memory()
        self._writer = bundle.Writer(self._directory, wake)

    def last(self, worker: str) -> str | None:
        """The newest bundle of a worker: one of an earlier daemon's too."""
        with contextlib.suppress(OSError):
            return next((path.name for path in reversed(bundle.found(self._directory))
                         if re.fullmatch(rf"\w+-{worker}-\d+{re.escape(bundle.SUFFIX)}", path.name)), None)
        return None

    def remember(self, snapshot: Snapshot) -> None:
        self._memory.add(snapshot)

    def step(self, workers: Sequence[Worker], board: Board, journal: Journal) -> None:
        """Takes the workers' failures, and tells them what became of the bundles of earlier ones."""
        for failure in (failure for worker in workers for failure in worker.take_failures()):
            scene = parts.Scene(self._config, self._specs, board.status, journal.recent(EVENTS), self._memory.samples())
            self._writer.put(self._job(failure, scene))
        for done in self._writer.take():
            next(worker for worker in workers if worker.template.name == done.worker).bundled(
                done.generation, done.name, done.trouble)

    def _job(self, failure: Failure, scene: parts.Scene) -> bundle.Job:
        name = bundle.name_of(failure.unix, f"{failure.worker}-{failure.generation}")
        return bundle.Job(failure.worker, failure.generation, name, partial(parts.of_failure, failure, scene), self._scrub)

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.close(CLOSE_SECONDS)
