"""When a prompt that is refused while memory is short may come again: one meaning, for /admission and the gateway alike."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from samples import LINE, rank, status, worker
from tightrank.admission import AdmissionRequest, admit
from tightrank.plan.pace import Pace
from tightrank.records import LineSpec, Shed
from tightrank.status import _shed

PACE = Pace(4e-4, 1e-9, 0.02, 64, 50_000)
SHED = Shed(2048, 30, "memory is short")


def run(width: int, context: int | None = 131_072, line: LineSpec | None = LINE, shed: Shed | None = SHED) -> Any:
    """A generation whose last prefill step had `width` keys."""
    return SimpleNamespace(steering=SimpleNamespace(shed_in_force=shed, budget_in_force=None),
                           spec=SimpleNamespace(context_tokens=context, line=line),
                           prefills=SimpleNamespace(width_now=lambda now: width))


@pytest.mark.parametrize(("width", "context", "rest"), [
    (40_000, 131_072, 40_000), (40_000, None, 40_000), (100_000, 131_072, 31_072), (131_072, 131_072, 0), (140_000, 131_072, 0),
    (0, 131_072, 0)])
def test_a_prompt_under_way_may_be_as_long_again(width: int, context: int | None, rest: int) -> None:
    found = _shed(run(width, context), PACE, 0.0)
    exact = PACE.prompt_seconds(rest, lambda _: 1024 if width >= 100_000 else 2048, width)
    assert found is not None and found.retry_after_seconds == pytest.approx(30 + exact, rel=0.05, abs=1)
    assert rest or found == SHED


def test_in_the_chunks_that_the_lowered_line_allows() -> None:
    lowered = run(100_000)
    lowered.steering.budget_in_force = LINE.floor_budget
    found, before = _shed(lowered, PACE, 0.0), _shed(run(100_000), PACE, 0.0)
    exact = PACE.prompt_seconds(31_072, lambda _: 256, 100_000)
    assert found and before and found.retry_after_seconds == pytest.approx(30 + exact, rel=0.02)
    assert found.retry_after_seconds > before.retry_after_seconds
    without = _shed(run(100_000, line=None), PACE, 0.0)
    exact = PACE.prompt_seconds(31_072, lambda _: 2048, 100_000)
    assert without and without.retry_after_seconds == pytest.approx(30 + exact, rel=0.05)


def test_without_a_pace_or_a_shed_nothing_is_added() -> None:
    assert _shed(run(40_000), None, 0.0) == SHED and _shed(run(40_000, shed=None), PACE, 0.0) is None


def test_admission_hands_it_on() -> None:
    shed = _shed(run(40_000), PACE, 0.0)
    verdict = admit(status(worker(ranks=(rank(),), context_tokens=131_072, shed=shed)), AdmissionRequest(100_000), 0.0)
    assert shed and (verdict.status, verdict.retry_after_seconds) == (429, shed.retry_after_seconds) and shed != SHED
