"""The memory plan of one worker: what each rank holds at rest, and what is left there for a chunk. Pure.

The arithmetic of each part is its own module's: weights, kv, pool, sizing, process, peak, chunks; what comes of them: answers.
"""
from __future__ import annotations

from tightrank.config.flags import has, value
from tightrank.plan import answers, kv, pool, process, sizing
from tightrank.plan.case import Case
from tightrank.plan.chunks import Chunks, chunks
from tightrank.plan.terms import READ, MemoryPlan, RankPlan, Term, weakest

GIB = 2**30
_BLOCK = {"vllm": 16, "sglang": 1, "atom": 16}


def memory_plan(case: Case) -> MemoryPlan:
    """What cannot be told is a sentence in `unknown`. Raises ConfigError when config.json's length makes no sense."""
    pools = _pools(case) if case.memory else ()
    found = kv_pool(case, int(min(term.value for term in pools))) if pools else None
    rests = [_rest(case, rank, _held(pools[rank], found)) for rank in range(len(pools))]
    spares = [_at_rest(case, rank, rest) for rank, rest in enumerate(rests)]
    tightest = min(range(len(spares)), key=lambda rank: spares[rank]) if spares else None
    planned = chunks(case.spec.line, case.chunk, case.context, case.peak, spares[tightest] if tightest is not None else None)
    ranks = tuple(_rank(case, rank, rest, planned) for rank, rest in enumerate(rests))
    outcome = answers.Outcome(case, ranks, pools, found, planned)
    return MemoryPlan(case.spec.name, ranks, tightest, outcome.numbers(), planned.bands, outcome.first_token(), outcome.binds(),
                      tuple(outcome.unknown()))


def kv_pool(case: Case, pool_bytes: int) -> pool.Pool | None:
    """What the engine makes of so many bytes on each rank; None: it is not known what a token takes."""
    return pool.tokens(_question(case, case.how), pool_bytes) if case.how else None


# --- what the ranks hold ----------------------------------------------------------------------------------------------


def _graphs(case: Case) -> Term:
    off = case.cpu or has(case.spec.argv, "--enforce-eager", "--disable-cuda-graph")
    return process.graphs(case.spec, off, case.flag("requests"), max(case.memory.total_bytes) if case.memory else 0)


def _outside(case: Case, rank: int) -> tuple[Term, ...]:
    """What the rank's process and device context hold beside the model."""
    shared = case.memory is not None and case.memory.shared
    return process.outside(case.spec, rank, case.ranks, shared, case.cpu)


def _sized(case: Case, rank: int) -> sizing.Rank:
    assert case.memory is not None
    mine = [term for term in _outside(case, rank) if term.name != process.SERVER]     # of another process
    return sizing.Rank(case.memory.total_bytes[rank], case.memory.free_bytes[rank], case.memory.part_bytes(rank),
                       weights_bytes=case.weights(rank).value, outside_bytes=sum(term.value for term in mine),
                       peak_bytes=case.peak.row_bytes * case.chunk, graphs_bytes=_graphs(case).value, origin=case.memory.origin)


def _pools(case: Case) -> tuple[Term, ...]:
    """Of each rank, as its own memory allows."""
    space = sizing.kv_space(case.spec, case.environment, case.cpu)
    return tuple(sizing.pool(case.spec, _sized(case, rank), case.ranks, case.chunk, space, case.cpu, rank)
                 for rank in range(case.ranks))


def _question(case: Case, how: kv.Storage) -> pool.Question:
    spec, argv = case.spec, case.spec.argv
    block = case.flag("page") or (256 if case.shape.layers.ratios is not None else
                                  128 if case.cpu and spec.engine == "vllm" else _BLOCK[spec.engine])
    steps = spec.pipeline_parallel if case.cpu else max(2, spec.pipeline_parallel)
    tokens, states, requests = (process.whole(value(argv, flag)) for flag in (
        "--max-total-tokens", "--max-mamba-cache-size", "--max-running-requests"))
    return pool.Question(case.shape, how, spec.engine, case.attention_ranks, spec.pipeline_parallel, block, case.context,
                         steps * case.chunk, kv.element_bytes(spec), case.state_size, tokens, states, requests,
                         not has(argv, "--no-enable-prefix-caching", "--disable-radix-cache"))


def _held(asked: Term, found: pool.Pool | None) -> Term:
    """The pool that the rank makes: all ranks as many tokens as the tightest, or as many as were asked for."""
    if found is None or found.held_bytes >= 0.999 * asked.value:
        return asked
    return Term("KV pool", found.held_bytes, "bytes", f"{found.tokens:,} tokens, as the tightest rank or as asked for",
                asked.origin)


def _rest(case: Case, rank: int, held: Term) -> tuple[Term, ...]:
    later = process.workspaces(case.config, case.spec, case.shape, case.chunk, case.context)
    found = (case.weights(rank), *_outside(case, rank), _graphs(case), *later, held)
    return tuple(term for term in found if term.value or term is held)


def _guard(case: Case) -> Term:
    """The host's floor counts where the ranks use the host's memory: each has its share of it."""
    assert case.memory is not None
    if not case.memory.shared:
        return Term("guard", 0, "bytes", "the floor is one of the host's memory, and the ranks have their own", READ)
    guard, ranks = case.config.guard, case.memory.sharing
    return Term("guard", (guard.floor_bytes + guard.margin_bytes) / ranks, "bytes",
                f"(guard.floor + guard.margin) / {ranks} rank{'s' * (ranks > 1)}", READ)


def _memory(case: Case, rank: int) -> Term:
    assert case.memory is not None
    many = f", divided by {case.memory.sharing} ranks" if case.memory.sharing > 1 else ""
    said = f"available on the host{many}" if case.memory.shared else "free on the device"
    return Term("memory", case.memory.part_bytes(rank), "bytes", said, case.memory.origin, case.memory.source)


def _at_rest(case: Case, rank: int, rest: tuple[Term, ...]) -> float:
    """What is left for a chunk, above the guard."""
    return _memory(case, rank).value - _guard(case).value - sum(term.value for term in rest)


def _rank(case: Case, rank: int, rest: tuple[Term, ...], planned: Chunks) -> RankPlan:
    memory, guard = _memory(case, rank), _guard(case)
    size, tokens, prefix = planned.worst
    top = Term("peak of a chunk", size, "bytes", f"{case.peak.formula}; at its most {tokens:,} new tokens behind {prefix:,}",
               case.peak.origin, case.peak.source)
    left = _at_rest(case, rank, rest) - size
    spare = Term("to spare", left, "bytes", "memory - guard - what it holds - peak of a chunk",
                 weakest(memory.origin, top.origin, *(term.origin for term in rest)))
    return RankPlan(rank, rank % case.spec.tensor_parallel, rank // case.spec.tensor_parallel, memory, rest, guard, top, spare,
                    _rank_binds(rest, top, left))


def _rank_binds(rest: tuple[Term, ...], top: Term, left: float) -> str:
    largest = max((*rest, top), key=lambda term: term.value)
    said = f"{largest.name} is the largest part, {largest.value / GIB:.2f} GiB"
    return f"{left / GIB:.2f} GiB to spare; {said}" if left >= 0 else f"over by {-left / GIB:.2f} GiB; {said}"
