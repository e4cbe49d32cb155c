"""The hook `line` around a PrefillAdder with SGLang's admission arithmetic: what a scheduler makes of it, pass by pass."""
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import INJECT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(INJECT))
from tightrank_adapter import fault, rank, wire
from tightrank_adapter import line as arithmetic
from tightrank_adapter.sglang import line

CONTINUE, OTHER = "continue", "other"


class Request(SimpleNamespace):
    """`tokens` long, of which `prefix_len` lie in the device's cache and `host_hit_length` more in the host's."""

    def __init__(self, tokens: int, prefix: int = 0, host: int = 0) -> None:
        super().__init__(full_untruncated_fill_ids=range(tokens), prefix_len=prefix, host_hit_length=host, extend_end=0,
                         origin_input_ids=range(tokens), output_ids=(), num_matched_prefix_tokens=prefix + host)

    @property
    def extend_len(self) -> int:
        return int(self.extend_end - self.prefix_len)


class Adder:
    """The arithmetic of PrefillAdder in 0.5.23, memory aside: chunk limit, pages, one unfinished prompt."""

    def __init__(self, page: int, limit: int, running: list[Any]) -> None:
        self.page, self.rem_chunk_tokens, self.dllm_config = page, limit - len(running), None
        self.running_batch = SimpleNamespace(reqs=running, batch_is_full=False)
        self.can_run_list, self.new_chunked_req, self.window = [], None, limit

    def _commit(self, req: Request, new: int) -> None:
        req.extend_end = req.prefix_len + new
        self.can_run_list.append(req)
        self.rem_chunk_tokens -= -(-new // self.page) * self.page

    def add_chunked_req(self, req: Request) -> Request | None:
        remaining = len(req.full_untruncated_fill_ids) - req.prefix_len
        truncated = remaining > self.rem_chunk_tokens
        self._commit(req, min(remaining, self.rem_chunk_tokens))
        return req if truncated else None

    def add_one_req(self, req: Request, has_chunked_req: bool, truncation_align_size: int | None) -> str:
        prefix = req.prefix_len + req.host_hit_length
        admission = self._select_prefill_admission(req, has_chunked_req=has_chunked_req)
        if isinstance(admission, str):
            return admission
        if admission.is_chunked:
            assert not has_chunked_req and self.new_chunked_req is None, "a second unfinished prompt"
            self.new_chunked_req = req
        req.prefix_len, req.host_hit_length = prefix, 0
        self._commit(req, admission.new)
        return self.budget_state()

    def _select_prefill_admission(self, req: Request, *, has_chunked_req: bool) -> Any:
        """`window` is what sliding-window memory has room for."""
        prefix = req.prefix_len + req.host_hit_length
        new, limit = len(req.full_untruncated_fill_ids) - prefix, min(self.rem_chunk_tokens, self.window)
        unfinished = -(-new // self.page) * self.page > limit
        if unfinished:
            new = (prefix + limit // self.page * self.page) // self.page * self.page - prefix
        return OTHER if new <= 0 else SimpleNamespace(new=new, is_chunked=unfinished)

    def budget_state(self) -> str:
        return OTHER if self.rem_chunk_tokens <= 0 else CONTINUE


class Engine:
    """SGLang's loop over the waiting queue, with the hooked adder of a fresh class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Any, page: int = 1, size: int = 1024,
                 values: dict[str, Any] | None = None) -> None:
        monkeypatch.setattr(rank, "_settings", wire.Settings("w", 1, "sglang", {"line": values or {}}))
        monkeypatch.setattr(line, "_line", held)
        monkeypatch.setattr(fault, "_counts", {})
        self.adder = type("PrefillAdder", (Adder,), {})
        scheduler = type("Scheduler", (), {"set_internal_state": lambda self, request: SimpleNamespace(
            updated=not request.server_args)})
        line.install(SimpleNamespace(PrefillAdder=self.adder, Scheduler=scheduler,
                                     AddReqResult=SimpleNamespace(OTHER=OTHER)))
        self.page, self.size, self.scheduler = page, size, scheduler
        self.unfinished: Request | None = None
        self.window, self.full, self.queue = size, False, SimpleNamespace(waiting_queue=list[Request]())
        if held is not None:
            held.scheduler = self.queue

    def step(self, waiting: list[Request], running: list[Any] | None = None) -> list[list[int]]:
        """[prefix, new] of the next batch; what was admitted leaves `waiting`."""
        adder = self.adder(self.page, self.size, running or [])
        adder.window, adder.running_batch.batch_is_full = self.window, self.full
        self.queue.waiting_queue = waiting
        if self.unfinished is not None:
            self.unfinished.prefix_len = self.unfinished.extend_end
            self.unfinished = adder.add_chunked_req(self.unfinished)
        for req in list(waiting):
            if adder.budget_state() == OTHER:
                break
            if adder.add_one_req(req, self.unfinished is not None, None) != CONTINUE:
                break
        waiting[:] = [req for req in waiting if req not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            assert self.unfinished is None
            self.unfinished = adder.new_chunked_req
        assert adder.rem_chunk_tokens <= self.size
        return [[req.prefix_len, req.extend_len] for req in adder.can_run_list]


def held(budget: int, page: int = 1, mixed: bool = False) -> Any:
    granule = max(64, page)
    return line._Line(budget, {"minimum": 64, "maximum": 1024, "granule": granule, "rule": "span", "step": "granule"},
                      mixed, page)


def test_a_first_chunk_counts_what_the_host_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(1_500_000))
    keywords = {"minimum": 64, "maximum": 1024, "granule": 64}
    assert engine.step([Request(20_000, 2_000, 6_000)]) == [[8_000, arithmetic.chunk_tokens(1_500_000, 8_000, **keywords)]]


def test_observed_it_lowers_nothing_and_knows_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(1_500_000), values={wire.OBSERVE: True})
    chunks = engine.step([Request(20_000, 2_000, 6_000)])
    assert chunks == [[8_000, 1024]] and line.is_over([[8_000, 1024]]) and not line.is_over([[0, 1024]])
    assert engine.step([]) == [[9_024, 1024]]


def test_a_request_that_would_widen_the_batch_over_the_line_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(1_500_000))
    waiting = [Request(300), Request(8_300, 8_000), Request(10)]
    assert engine.step(waiting) == [[0, 300]]
    assert engine.step(waiting) == [[8_000, 128], [0, 10]], "the schedule at 8000, and who ends within what the granule leaves"
    assert engine.step(waiting) == [[8_128, 128]]


def test_short_prompts_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(1_500_000, 16), page=16)
    assert engine.step([Request(490), Request(64), Request(100)]) == [[0, 490], [0, 64], [0, 100]]


def test_running_requests_that_join_a_mixed_batch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(129 * 30_001, mixed=True))
    assert engine.step([Request(5_000)], [SimpleNamespace(seqlen=30_000)]) == [[0, 128]]
    engine = Engine(monkeypatch, held(129 * 30_001 - 1, mixed=True))
    assert engine.step([Request(5_000)], [SimpleNamespace(seqlen=30_000)]) == [[0, 64]]


def test_a_prompt_whose_last_page_has_no_room_waits_rather_than_leave_a_sliver(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(1_500_000, 8, mixed=True), page=8)
    running = [SimpleNamespace(seqlen=10)] * 12
    assert engine.step([Request(1000), Request(20)], running) == [[0, 1000]], "12 tokens are left, and one page of 8"


def test_nothing_is_steered_without_the_line_or_without_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Engine(monkeypatch, None).step([Request(9_000, 8_000)]) == [[8_000, 1_000]]
    adder = Engine(monkeypatch, held(64)).adder(1, 0, [])
    adder.rem_chunk_tokens = None
    assert line._before_chunk(adder, Request(5)) is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(budget=st.integers(64 * 64, 10**7), page=st.sampled_from((1, 16, 64)), mixed=st.booleans(), faulty=st.booleans(),
       lengths=st.lists(st.tuples(st.integers(1, 6_000), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8))
def test_every_prompt_ends_and_every_batch_is_under_the_line_or_one_request_with_the_least(
        monkeypatch: pytest.MonkeyPatch, budget: int, page: int, mixed: bool, faulty: bool,
        lengths: list[tuple[int, int, int]]) -> None:
    rules = held(budget, page, mixed)
    engine = Engine(monkeypatch, rules, page)
    if faulty:
        monkeypatch.setattr(line, "_decide", lambda *args: 1 // 0)
    waiting = [Request(64 * (device + host) + new, 64 * device, 64 * host) for new, device, host in lengths]
    left = sum(new for new, _, _ in lengths)
    running = [SimpleNamespace(seqlen=500), SimpleNamespace(seqlen=2_000)]
    while left:
        chunks = engine.step(waiting, running)
        assert chunks, "a pass without progress"
        left -= sum(new for _, new in chunks)
        extra = [[request.seqlen, 1] for request in running] if mixed else []
        under = not line.is_over(chunks + extra)
        assert (under and not faulty) or (len(chunks) == 1 and chunks[0][1] <= rules.least)
    assert not waiting and engine.unfinished is None


def test_a_budget_is_taken_out_of_a_control_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = held(1_000)
    engine = Engine(monkeypatch, rules)
    scheduler = engine.scheduler()
    for value, updated, budget in ((5_000, True, 5_000), (0, False, 5_000), (True, False, 5_000), (7e3, False, 5_000)):
        answer = scheduler.set_internal_state(SimpleNamespace(server_args={wire.BUDGET_KEY: value}))
        assert (answer.updated, rules.budget) == (updated, budget)
    assert not scheduler.set_internal_state(SimpleNamespace(server_args={wire.BUDGET_KEY: 9, "other": 1})).updated
    assert rules.budget == 5_000


def deep(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any] | None = None) -> Engine:
    """In the middle of a prompt of which the line allows 512 of 1024 rows at a time."""
    engine = Engine(monkeypatch, held(512 * 30_512), values=values)
    assert engine.step([Request(60_000, 29_488)]) == [[29_488, 512]]
    return engine


def test_of_a_lowered_chunk_the_prompts_that_wait_get_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, waiting = deep(monkeypatch), [Request(32), Request(100), Request(2_060, 2_000), Request(65)]
    assert engine.step(waiting) == [[30_000, 256], [0, 32], [0, 100], [2_000, 60]], "64 + 128 + 64 kept; the last wants more"
    assert engine.step(waiting)[1:] == [[0, 65]]
    assert engine.step(waiting)[0][1] == 448 and not waiting, "alone again"


def test_a_prompt_that_does_not_end_in_half_of_the_chunk_waits_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, waiting = deep(monkeypatch), [Request(300), Request(20)]
    assert engine.step(waiting) == [[30_000, 512]] and len(waiting) == 2


def test_room_that_nobody_takes_is_not_kept_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits may do so for what rows do not give: here for sliding-window memory, which would cut its prompt in two."""
    engine, waiting = deep(monkeypatch), [Request(150)]
    engine.window = 100
    sizes = [engine.step(waiting)[0][1] for _ in range(10)]
    assert sizes == [320, *[448] * 8, 256] and len(waiting) == 1, "192 of 512, and of 448"
    engine.window = engine.size
    assert [len(engine.step(waiting)) for _ in range(9)] == [*[1] * 8, 2] and not waiting


def test_no_room_is_kept_where_no_request_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = deep(monkeypatch)
    engine.full = True
    assert engine.step([Request(32)])[0] == [30_000, 512]


def test_a_release_that_cannot_be_asked_before_it_admits_closes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = deep(monkeypatch)
    line._line.scheduler = None
    waiting = [Request(32)]
    assert engine.step(waiting) == [[30_000, 512]] and waiting


# Functions of ours that run while batches are built, and what they call.
RUNNING = ("_prefix", "_extend", "_taken", "_steered", "_decide", "_lower", "_before_chunk", "_after_chunk", "_account",
           "_least_chunk", "_after_request", "_kept")


@pytest.mark.parametrize("name", RUNNING)
def test_whichever_of_our_functions_raises_the_batches_stay_small_or_the_hook_fails(
        monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Law 7: the least chunk in place of the line's, never the static size; where even that cannot be had, the supervisor is
    told that the hook is not in force. Prompts end in any case, and the engine's own calls are made once each."""
    states: list[str] = []
    monkeypatch.setattr(rank, "hook", lambda hook, state, *args: states.append(state))

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(name)

    monkeypatch.setattr(line, name, raising)
    engine = Engine(monkeypatch, held(1_500_000))
    waiting, chunks = [Request(9_000, 6_000), Request(7_000, 3_000)], []
    for _ in range(400):
        batch = engine.step(waiting)
        chunks += batch
        if not batch:
            break
    assert sum(new for _, new in chunks) == 3_000 + 4_000, "both prompts ended"
    over = [(prefix, new) for prefix, new in chunks if new * (prefix + new) > 1_500_000 and new > 64]
    assert not over or wire.FAILED in states, over


def test_a_request_of_another_form_gets_the_least_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, held(1_500_000))
    monkeypatch.setattr(line, "_prefix", lambda req: 1 // 0)
    assert engine.step([Request(9_000, 6_000)]) == [[6_000, 64]]
