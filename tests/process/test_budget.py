"""How an engine is told a new budget of the line: by the page, or asked until every rank has it; told once when it refuses."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from samples import LINE, rank
from tightrank.adapter import pages
from tightrank.engines.base import Probe
from tightrank.generation import Generation
from tightrank.records import WorkerReading, WorkerSpec
from tightrank.steering import BUDGET_SECONDS


class Orders:
    """In place of the Prober: keeps what is sent; it is answered by the test."""

    def __init__(self) -> None:
        self.sent: list[tuple[Probe, Future[str]]] = []

    def send(self, call: Probe) -> Future[str]:
        self.sent.append((call, Future()))
        return self.sent[-1][1]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Generation] = []
    said: list[str] = []

    def build(engine: str) -> tuple[Generation, list[str]]:
        spec = WorkerSpec(
            name="w", engine=engine, role="both", argv=("sleep", "60"), env={}, host="127.0.0.1", port=1, model="/m",
            served_model="m", tensor_parallel=1, pipeline_parallel=1, devices=(), hooks={"line": {"budget": LINE.budget}},
            line=LINE, context_tokens=None, schedule=(), drain_seconds=1, start_stall_seconds=1, generation=1,
            run_directory=str(tmp_path / engine))
        made.append(Generation(spec, os.environ, 0, lambda kind, sentence, _: said.append(f"{kind}: {sentence}"), 0.0))
        return made[-1], said

    yield build
    for generation in made:
        generation.launched.process.kill()
        generation.launched.process.wait()
        generation.close()


def seen(*budgets: int) -> WorkerReading:
    ranks = tuple(rank(rank=number, facts={"line_budget": budget}) for number, budget in enumerate(budgets))
    return WorkerReading("w", 1, None, (), ranks, (), ())


def test_vllm_reads_it_from_the_page_and_is_not_asked(make: Any, tmp_path: Path) -> None:
    generation, _ = make("vllm")
    orders = Orders()
    generation.steering.tell_budget(1000, 1.0)
    generation.steering.step(orders, seen(LINE.budget), 1.0)
    assert pages.ControlReader(str(tmp_path / "vllm")).budget() == 1000 and orders.sent == []


def test_sglang_is_asked_until_each_rank_has_it(make: Any) -> None:
    generation, said = make("sglang")
    orders = Orders()
    generation.steering.step(orders, seen(LINE.budget, LINE.budget), 1.0)
    assert orders.sent == [], "nothing was wanted"
    generation.steering.tell_budget(1000, 2.0)
    generation.steering.step(orders, seen(LINE.budget, LINE.budget), 2.0)
    assert [call.body for call, _ in orders.sent] == [{"server_args": {"tightrank_line_budget": 1000}}]
    generation.steering.step(orders, seen(LINE.budget, LINE.budget), 60.0)
    assert len(orders.sent) == 1, "one at a time"
    orders.sent[0][1].set_result("")
    generation.steering.step(orders, seen(1000, LINE.budget), 60.1)
    assert len(orders.sent) == 2, "one rank has it still to say"
    orders.sent[1][1].set_result("POST ...: 401")
    generation.steering.step(orders, seen(1000, LINE.budget), 60.2)
    assert len(orders.sent) == 2 and said == ["line: the engine was told the line's budget and refused: POST ...: 401"]
    generation.steering.step(orders, seen(1000, LINE.budget), 60.2 + BUDGET_SECONDS)
    orders.sent[2][1].set_result("POST ...: 401")
    generation.steering.step(orders, seen(1000, 1000), 70.0)
    generation.steering.step(orders, seen(1000, 1000), 80.0)
    assert len(orders.sent) == 3 and len(said) == 1, "it is said once"


def test_the_last_one_counts(make: Any) -> None:
    generation, _ = make("sglang")
    orders = Orders()
    for budget in (1000, 2000):
        generation.steering.tell_budget(budget, time.monotonic())
    generation.steering.step(orders, seen(LINE.budget), time.monotonic())
    assert [call.body["server_args"]["tightrank_line_budget"] for call, _ in orders.sent if call.body] == [2000]
