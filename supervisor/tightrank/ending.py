"""How one generation ends: its stacks first where they are wanted, then its tree, then one look more for its last words."""
from __future__ import annotations

from pathlib import Path

from tightrank import act, stacks
from tightrank.generation import Generation
from tightrank.readers.process import ProcessTable
from tightrank.records import Diagnosis


class End:
    """Of `run`. `cause`: why it is ended; None: somebody asked for it, so that the engine may end what it has."""

    def __init__(self, run: Generation, cause: str | None, now: float) -> None:
        self._run = run
        self._dump: stacks.Dump | None = None
        self.stacks = ""                   # what became of them
        self.gone = self.ended = False     # the tree; the tree, and its last words are read
        patience = run.spec.drain_seconds if cause is None else act.EVIDENCE_SECONDS
        if cause in stacks.WANTED and run.reading is not None:
            self._dump = stacks.Dump(Path(run.spec.run_directory), run.reading.ranks, now)
            patience = stacks.ALL_SECONDS
        run.note_traces()
        self._tree = act.Ending(run.launched.main, run.spec.listens(), now, patience, cause is None, run.traces)

    def step(self, table: ProcessTable, now: float) -> str:
        """Goes on ending the tree. Returns what became of the stacks, once; "" otherwise."""
        told = ""
        if self._dump is not None and self._dump.step(now):
            told = self.stacks = self._dump.sentence
            self._dump = None
            self._tree.patience_seconds = 0.0        # it was for the stacks; hygiene takes the time that it needs
        gone = self._tree.step(now, table, tuple(self._run.known))
        # One tick more than needed: what it printed last may still be in the pipe, and may say why it ended.
        self.gone, self.ended = gone, gone and self.gone
        return told

    def hurry(self) -> None:
        """No more patience."""
        self._tree.hurry()

    @property
    def drains(self) -> bool:
        """Whether the engine may still end what it has."""
        return self._tree.drains

    @property
    def forced(self) -> bool:
        """Whether the drain did not end in time."""
        return self._tree.forced

    def trouble(self, now: float) -> Diagnosis | None:
        """What keeps it from ending, when that takes too long."""
        return self._tree.trouble(now)

    def close(self) -> None:
        """The generation is let go of, its stacks may be half written."""
        if self._dump is not None:
            self._dump.close()
