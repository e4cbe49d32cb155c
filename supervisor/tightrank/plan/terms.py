"""The nouns of a memory plan: every number with its formula and where it comes from. Pure."""
from __future__ import annotations

from dataclasses import dataclass

from tightrank.records import ChunkBand

READ, MEASURED, ASSUMED = "read", "measured", "assumed"


def weakest(*origins: str) -> str:
    """Of a number that is made of others: no better than the worst of them."""
    return max(origins, key=(READ, MEASURED, ASSUMED).index)


@dataclass(frozen=True, slots=True)
class Term:
    """One number. `origin`: read (from files, arguments, this host), measured (in an earlier run here) or assumed; what is
    computed is as good as the worst that went into it. `source`: of what was assumed or measured."""
    name: str
    value: float
    unit: str
    formula: str
    origin: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """What each rank sees, bytes, in the order of the ranks. `sharing`: so many ranks use it together, for it is the host's:
    then each has its part, and the guard's floor and the engine's processes count too; 0: each has its own. `origin`,
    `source`: as of a Term."""
    total_bytes: tuple[int, ...]
    free_bytes: tuple[int, ...]
    sharing: int
    origin: str
    source: str

    @property
    def shared(self) -> bool:
        return self.sharing > 0

    def part_bytes(self, rank: int) -> int:
        """What the rank has to itself of what is free."""
        return self.free_bytes[rank] // max(self.sharing, 1)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank. `rest`: what it holds without work, KV pool as taken; `peak`: of its largest chunk, on top; `spare`: what is
    then left above the guard, negative where it does not fit. `binds`: a sentence."""
    rank: int
    tp_rank: int
    pp_rank: int
    memory: Term
    rest: tuple[Term, ...]
    guard: Term
    peak: Term
    spare: Term
    binds: str

    @property
    def rest_bytes(self) -> float:
        return sum(term.value for term in self.rest)

    def bytes_of(self, name: str) -> float:
        """0 where it holds no such thing."""
        return sum(term.value for term in self.rest if term.name == name)


@dataclass(frozen=True, slots=True)
class PlannedBand(ChunkBand):
    """`by`: what keeps the chunk as it is: maximum | line | memory | minimum (what an accepted request gets in any case)."""
    by: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one worker. `numbers`: those that are of all ranks together, by name; `first_token`: for prompts of several lengths,
    empty where no pace is known. `unknown`: sentences, what could not be told."""
    worker: str
    ranks: tuple[RankPlan, ...]
    tightest_rank: int | None
    numbers: tuple[Term, ...]
    bands: tuple[PlannedBand, ...]
    first_token: tuple[Term, ...]
    binds: str
    unknown: tuple[str, ...]

    def is_tightest(self, rank: RankPlan) -> bool:
        """Whether it has less left than another."""
        return rank.rank == self.tightest_rank and any(other.spare.value > rank.spare.value for other in self.ranks)

    def number(self, name: str) -> Term | None:
        return next((term for term in self.numbers if term.name == name), None)
