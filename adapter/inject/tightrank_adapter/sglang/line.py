"""Hook `line` for SGLang >= 0.5.20: every prefill batch of a scheduler keeps under the line.

Two functions of PrefillAdder admit prompt tokens: `add_chunked_req` (the next chunk of the one unfinished prompt) and
`add_one_req` (a new request, behind what it finds in the prefix cache). Both take their limit from `rem_chunk_tokens`,
so it is lowered for the call, never raised, and what the call spent is taken off the engine's own number afterwards.

The engine has one unfinished prompt at a time and lets it fill its step, so whoever comes behind a long one waits for its
end. The line makes that end later, so of a chunk that it lowers it keeps room for the prompts that wait (`_kept`).

The schedulers of a worker are replicas: the decision uses nothing but what is alike on all of them.
"""
from math import lcm
from typing import Any, Dict, List, NamedTuple, Optional

from .. import fault, line, rank, wire

HOOK = "line"
SELECT = "_select_prefill_admission"  # from 0.5.22 on: what an admission would be, before anything is done for it
PAUSE_STEPS = 8  # between rooms that nobody took: who waits may do so for a slot, a LoRA or the KV cache, not for rows


class _Line:
    """What bounds a chunk in this process; `keywords` are those of line.chunk_tokens.

    `scheduler` is the one whose waiting prompts may join an unfinished one in its step, None where they may not.
    """

    def __init__(self, budget: int, keywords: Dict[str, Any], mixed: bool, page: int, scheduler: Any = None) -> None:
        line.chunk_tokens(budget, 0, **keywords)  # checks them once and for all
        self.budget, self.keywords, self.mixed, self.page, self.scheduler = budget, keywords, mixed, page, scheduler
        self.pause = 0  # steps until the next room is kept

    @property
    def least(self) -> int:
        granule: int = self.keywords["granule"]
        return -(-int(self.keywords["minimum"]) // granule) * granule


class _Lowered(NamedTuple):
    """The line, the engine's number before we lowered it, ours, and the prefix that the decision was made for."""
    held: _Line
    before: int
    ours: int
    prefix: int


_line: Optional[_Line] = None


def budget() -> int:
    """The budget in force in this process, token²; 0 without the line."""
    return _line.budget if _line is not None else 0


def is_over(chunks: List[List[int]]) -> bool:
    """Whether a batch of [prefix, new tokens] is over the line."""
    if _line is None:
        return False
    span: bool = _line.keywords["rule"] == "span"
    longest = max(prefix + (new if span else 0) for prefix, new in chunks)
    return sum(new for _, new in chunks) * longest > _line.budget


def install(module: Any) -> None:
    """Gets sglang.srt.managers.scheduler. Raises fault.Missing for a release without what is hooked."""
    adder = fault.require(module, "PrefillAdder")
    other = fault.require(fault.require(module, "AddReqResult"), "OTHER")
    fault.wrap(adder, "add_chunked_req", HOOK, before=_before_chunk, after=_after_chunk, fallback=_least_chunk,
               replicated=True)
    fault.wrap(adder, "add_one_req", HOOK, replicated=True, after=_after_request,
               before=_before_request(other), fallback=_least_request(other))
    if hasattr(adder, SELECT):
        fault.wrap(adder, SELECT, HOOK, replicated=True, after=_only_whole(other), fallback=lambda *args, **kwargs: None)
    scheduler = fault.require(module, "Scheduler")
    fault.wrap(scheduler, "set_internal_state", HOOK, before=_take_budget, after=_set_budget, replicated=True)
    begin = fault.contained(HOOK, "Scheduler.__init__", _begin, adder)
    fault.wrap(scheduler, "__init__", HOOK, after=lambda token, result, self, *args, **kwargs: begin(self))


def _begin(adder: Any, scheduler: Any) -> None:
    """The scheduler is complete: its sizes are known, and from 0.5.22 on it says which adder it really uses."""
    global _line
    choose = getattr(scheduler, "get_prefill_adder_class", None)
    adder = choose() if choose is not None else adder
    for owner, name in ((adder, "add_chunked_req"), (adder, "add_one_req"), (type(scheduler), "set_internal_state")):
        if not fault.is_wrapped(fault.require(owner, name), HOOK):
            raise fault.Missing("%s.%s" % (owner.__qualname__, name), "an override without the hook")
    _line = _sized(scheduler, dict(rank.settings().line), fault.is_wrapped(getattr(adder, SELECT, None), HOOK))
    rank.fact("line_budget", _line.budget)
    rank.fact("granule_tokens", _line.keywords["granule"])
    rank.fact("maximum_tokens", _line.keywords["maximum"])
    rank.hook(HOOK, wire.IN_FORCE)


def _sized(scheduler: Any, values: Dict[str, Any], joined: bool) -> _Line:
    """The configured line, fitted to the engine's page, alignment and chunk size. Raises Missing if it cannot be."""
    page = scheduler.page_size
    granule = lcm(values["granule"], page, scheduler.truncation_align_size or 1)
    size = scheduler.chunked_prefill_size
    observed = rank.settings().observes(HOOK)
    maximum = (values["maximum"] if observed else min(values["maximum"], size or 0)) // granule * granule
    least = max(values["minimum"], granule)
    if maximum < least:
        raise fault.Missing("--chunked-prefill-size of at least %d (minimum %d, granule %d)"
                            % (-(-least // granule) * granule, values["minimum"], granule),
                            "chunked prefill is off" if size is None else "%d" % size)
    keywords = {"minimum": values["minimum"], "maximum": maximum, "granule": granule,
                "rule": values.get("rule", "span"), "step": values.get("step", "granule")}
    return _Line(values["budget"], keywords, scheduler.is_mixed_chunk, page, scheduler if joined else None)


def _prefix(req: Any) -> int:
    """Tokens of `req` in the KV cache: `prefix_len` from 0.5.22 on, before that the length of `prefix_indices`."""
    held = getattr(req, "prefix_len", None)
    return int(held if held is not None else len(req.prefix_indices))


def _extend(req: Any) -> int:
    """New tokens of an admitted `req`: `extend_len` from 0.5.22 on, before that a range."""
    new = getattr(req, "extend_len", None)
    return int(new if new is not None else req.extend_range.length)


def _taken(adder: Any, mixed: bool) -> List[int]:
    """[rows, width] that the batch being built holds; kept on the adder, which lives for one batch.

    With mixed chunks the running requests join as one row each.
    """
    taken = adder.__dict__.get("_tightrank_taken")
    if taken is None:
        running = adder.running_batch.reqs if mixed and adder.running_batch is not None else ()
        taken = adder._tightrank_taken = [len(running), max((req.seqlen + 1 for req in running), default=0)]
    result: List[int] = taken
    return result


def _steered(adder: Any) -> Optional[_Line]:
    """The line, where it is in force: not for diffusion models, which have another budget, nor where chunking is off.

    Observed, it lowers nothing; the record of each step says whether the batch was over it.
    """
    ours = adder.rem_chunk_tokens is not None and getattr(adder, "dllm_config", None) is None
    return _line if ours and not rank.settings().observes(HOOK) else None


def _decide(held: _Line, adder: Any, prefix: int, remaining: int, limit: int) -> int:
    rows, width = _taken(adder, held.mixed)
    return line.accepted_chunk_tokens(held.budget, prefix, remaining, rows, width, alone=not adder.can_run_list,
                                      limit=limit, **held.keywords)


def _lower(held: _Line, adder: Any, prefix: int, tokens: int) -> _Lowered:
    """The engine compares and charges by pages, so the end of a prompt needs its last page's room."""
    before = adder.rem_chunk_tokens
    adder.rem_chunk_tokens = min(before, -(-tokens // held.page) * held.page)
    return _Lowered(held, before, adder.rem_chunk_tokens, prefix)


def _before_chunk(adder: Any, req: Any) -> Optional[_Lowered]:
    held = _steered(adder)
    if held is None:
        return None
    prefix = _prefix(req)
    remaining, limit = len(req.full_untruncated_fill_ids) - prefix, adder.rem_chunk_tokens
    tokens = _decide(held, adder, prefix, remaining, limit)
    if tokens < min(remaining, limit):
        tokens -= _kept(held, adder, tokens)
    return _lower(held, adder, prefix, tokens)


def _kept(held: _Line, adder: Any, tokens: int) -> int:
    """Rows of an unfinished prompt's chunk that are left to the prompts that wait: to as many, in their order, as end within
    half of it. Each is counted in whole granules, as the line counts them when they are admitted."""
    if held.scheduler is None or getattr(adder.running_batch, "batch_is_full", False):
        return 0
    if held.pause:
        held.pause -= 1
        return 0
    granule, kept = held.keywords["granule"], 0
    most = min(tokens // 2, tokens - held.least) // granule * granule
    for req in held.scheduler.waiting_queue if most else ():
        rows = -(-max(len(req.origin_input_ids) + len(req.output_ids) - req.num_matched_prefix_tokens, 1) // granule) * granule
        if kept + rows > most:
            break
        kept += rows
    held.pause = PAUSE_STEPS if kept else 0  # until somebody takes it
    return kept


def _least_chunk(adder: Any, req: Any) -> Optional[_Lowered]:
    """The answer when `_before_chunk` fails: the least chunk, whatever was wrong with the request."""
    held = _steered(adder)
    if held is None:
        return None
    return _lower(held, adder, fault.tried(HOOK, "_prefix", _prefix, 0, True, req), held.least)


def _after_chunk(token: Optional[_Lowered], unfinished: Any, adder: Any, req: Any) -> None:
    if token is not None:
        _account(token, adder, req, unfinished is not None)


def _account(token: _Lowered, adder: Any, req: Any, unfinished: bool) -> bool:
    """Puts the engine's number right after its call; whether the request was admitted.

    An unfinished prompt closes the batch, as it does in the engine, unless others that end in it may join: there is only one
    unfinished prompt, and a second would displace it.
    """
    spent = token.ours - adder.rem_chunk_tokens
    admitted = bool(adder.can_run_list) and adder.can_run_list[-1] is req
    if admitted:
        taken = _taken(adder, token.held.mixed)
        taken[0] += _extend(req)
        taken[1] = max(taken[1], token.prefix + _extend(req))
    closed = unfinished and admitted and token.held.scheduler is None
    adder.rem_chunk_tokens = 0 if closed else token.before - spent
    return admitted


def _before_request(other: Any) -> Any:
    def before(adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: Optional[int]) -> Any:
        held = _steered(adder)
        if held is None:
            return None
        prefix = _prefix(req) + req.host_hit_length
        remaining = len(req.full_untruncated_fill_ids) - prefix
        tokens = _decide(held, adder, prefix, remaining, adder.rem_chunk_tokens // held.page * held.page)
        if tokens == 0 or (tokens < remaining and (has_chunked_req or adder.new_chunked_req is not None)):
            return fault.Answer(other)
        return _lower(held, adder, prefix, tokens)

    return before


def _only_whole(other: Any) -> Any:
    """An admission beside an unfinished prompt that would not end in this step: the engine may cut one for other reasons than
    rows (sliding-window memory), and dies of a second unfinished prompt."""
    def after(token: None, admission: Any, adder: Any, *args: Any, has_chunked_req: bool = False, **kwargs: Any) -> Any:
        second = (has_chunked_req or adder.new_chunked_req is not None) and getattr(admission, "is_chunked", False)
        return fault.Answer(other) if second else None

    return after


def _least_request(other: Any) -> Any:
    """The answer when `_before_request` fails: at most one request in a batch, with the least chunk."""
    def fallback(adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: Optional[int]) -> Any:
        busy = _steered(adder) is not None and (adder.can_run_list or has_chunked_req)
        return fault.Answer(other) if busy else _least_chunk(adder, req)

    return fallback


def _after_request(token: Optional[_Lowered], verdict: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """The verdict on an admitted request is about the next one, so it is asked again with the right number."""
    if token is None or not _account(token, adder, req, adder.new_chunked_req is req):
        return None
    token.held.pause = 0
    return fault.Answer(adder.budget_state())


def _take_budget(scheduler: Any, request: Any) -> Optional[int]:
    """Our key out of a control request. A bad value stays in it: the engine refuses it as an unknown key."""
    wanted = request.server_args.get(wire.BUDGET_KEY)
    if type(wanted) is not int or wanted < 1 or _line is None:
        return None
    request.server_args = {key: value for key, value in request.server_args.items() if key != wire.BUDGET_KEY}
    return wanted


def _set_budget(wanted: Optional[int], answer: Any, scheduler: Any, request: Any) -> None:
    if wanted is not None and _line is not None and answer.updated:
        _line.budget = wanted
        rank.fact("line_budget", wanted)
