"""What comes of a memory plan: KV tokens, the longest prompt, times, what binds, and what could not be told. Pure."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tightrank.config.flags import value
from tightrank.plan import kv, pool
from tightrank.plan.case import Case
from tightrank.plan.chunks import Chunks
from tightrank.plan.terms import ASSUMED, MEASURED, READ, MemoryPlan, RankPlan, Term, weakest
from tightrank.records import LineSpec

PROMPTS = (8_000, 32_000, 64_000, 128_000, 200_000, 256_000, 400_000, 500_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`pools`: of each rank, as its own memory allows; () where no memory is known. `found`: the tokens of the smallest."""
    case: Case
    ranks: tuple[RankPlan, ...]
    pools: tuple[Term, ...]
    found: pool.Pool | None
    planned: Chunks

    def numbers(self) -> tuple[Term, ...]:
        """Those that are of all ranks together."""
        return tuple(self._numbers())

    def _numbers(self) -> Iterator[Term]:
        case, planned = self.case, self.planned
        yield Term("longest request", case.context, "tokens", "the engine's maximum length, as set or as the model's own", READ)
        heaviest = max((case.weights(rank) for rank in range(case.ranks)), key=lambda term: term.value)
        if heaviest.value:
            yield replace(heaviest, name="weights of a rank")
        if case.token_bytes is not None and case.how is not None:
            yield Term("KV of a token", case.token_bytes, "bytes", "in all layers that keep every token, on a rank of each "
                       f"stage, stored as {case.how.name}", READ, "config.json")
            of_one = kv.request_bytes(case.shape, case.how, case.attention_ranks, case.context, case.state_size)
            if of_one is not None:
                yield Term("KV of the longest request", of_one, "bytes", "its tokens, and what layers with a window or a state "
                           "keep of it", READ, "config.json")
        if self.found is not None:
            pools = (term.origin for term in self.pools if not self.found.capped)
            origin = weakest(READ if self.found.exact else ASSUMED, *pools)
            yield Term("KV tokens", self.found.tokens, "tokens", self.found.formula, origin)
        yield Term("largest chunk", max(band.chunk_tokens for band in planned.bands), "tokens", "at a short prefix", READ)
        if planned.pairs is not None:
            yield Term("pairs that memory allows", planned.pairs, "token²", "what the tightest rank has left / bytes of a pair",
                       case.peak.origin, case.peak.source)
        if case.spec.line is not None:
            yield _budget(case.spec.line)
        tokens, why = self._longest()
        yield Term("longest prompt", tokens, "tokens", why, weakest(READ, *(term.origin for term in self.pools)))

    def _longest(self) -> tuple[int, str]:
        """(tokens, what keeps it there)."""
        limits = [(self.case.context, "the longest request that the engine takes")]
        if self.found is not None:
            limits.append((self.found.tokens, "what the KV pool holds"))
        if self.planned.longest_tokens is not None:
            limits.append((self.planned.longest_tokens, "what memory allows at the smallest chunk"))
        return min(limits, key=lambda limit: limit[0])

    def first_token(self) -> tuple[Term, ...]:
        """Alone in the engine, nothing cached. Empty without a pace."""
        return tuple(self._first_token(tokens) for tokens in PROMPTS if tokens <= self._longest()[0]) if self.case.pace else ()

    def _first_token(self, tokens: int) -> Term:
        pace = self.case.pace
        assert pace is not None
        said = "extrapolated" if tokens > pace.longest_tokens else f"the pace of {pace.samples} steps"
        return Term(f"first token of {tokens:,}", pace.prompt_seconds(tokens, self.planned.chunk_at), "seconds",
                    "the sum of its chunks' times", MEASURED, said)

    def binds(self) -> str:
        """One sentence."""
        over = next((rank for rank in self.ranks if rank.rest_bytes + rank.guard.value > rank.memory.value), None)
        if over is not None:
            return f"memory: rank {over.rank} holds more at rest than there is; {over.binds}"
        if self.found is not None and self.found.tokens < self.case.context:
            return f"the KV pool: {self.found.tokens:,} tokens, less than one request of {self.case.context:,}"
        if self.planned.by_memory:
            return f"memory: it allows {self.planned.pairs:,} token² a chunk, less than {self.planned.what}"
        worst = next((rank for rank in self.ranks if rank.spare.value < 0), None)
        if worst is not None:
            return f"memory: rank {worst.rank} has no room for its largest chunk; {worst.binds}"
        tokens, why = self._longest()
        return f"{why} ({tokens:,} tokens)"

    def unknown(self) -> Iterator[str]:
        case = self.case
        if case.memory is None:
            yield "the ranks' memory: neither a device's nor the host's can be read; give it with --memory"
        if not any(case.stage_weights):
            yield "the weights: no safetensors files, and config.json does not say enough of the model's shape"
        if case.how is None:
            yield f"KV: what --kv-cache-dtype {value(case.spec.argv, '--kv-cache-dtype')} takes"
        elif case.token_bytes is None:
            yield "KV: config.json does not say how many heads and layers there are"
        elif self.found is not None and not self.found.exact:
            yield "KV tokens, exactly: the engine's pages for a compressed cache are not followed"
        if case.pace is None:
            yield "the time to the first token: no prefill of this worker was measured here yet"


def predicted(plan: MemoryPlan) -> Mapping[str, float]:
    """Terms by the names of `calibration`, to be held against what a start measures: those that are not assumed."""
    named = {"weights_bytes": plan.number("weights of a rank"), "kv_tokens": plan.number("KV tokens")}
    return {name: term.value for name, term in named.items() if term is not None and term.origin != ASSUMED}


def _budget(line: LineSpec) -> Term:
    if not line.auto:
        return Term("line budget", line.budget, "token²", "line.budget", READ)
    words = "what `auto` starts with" + ("" if line.assumed_pair_bytes else ", line.start")
    return Term("line budget", line.budget, "token²", words, ASSUMED if line.assumed_pair_bytes else READ)
