"""scripts/bench/diagnose: no wrong verdict on its logs, and what each cause is known by is among them."""
from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import pytest
from helpers import SUPERVISOR
from tightrank.diagnose import TABLES
from tightrank.errors import CAUSES

BENCH = SUPERVISOR.parent / "scripts" / "bench" / "diagnose"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    loader = SourceFileLoader("bench_diagnose", str(BENCH))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    __import__("sys").modules[loader.name] = module      # dataclasses look their module up
    loader.exec_module(module)
    return module


def test_no_verdict_is_wrong_and_what_is_known_is_found(bench: ModuleType) -> None:
    scores: dict[tuple[int, bool], Any] = bench.run(seed=7, most=4)
    assert [line for score in scores.values() for line in score.errors] == []
    known = [score for (kind, unseen), score in scores.items() if kind and not unseen]
    assert [line for score in known for line in score.misses] == []
    assert {kind for kind, _ in scores} == set(bench.KINDS)


def test_texts_that_no_signature_was_written_from_are_counted(bench: ModuleType) -> None:
    """Recall is below 1 where it is: a bench whose every log was taken over from the tables proves nothing."""
    unseen = [case for case in bench.read() if case.unseen]
    assert len(unseen) >= 25
    score = bench._sum([score for (_, flag), score in bench.run(seed=1, most=0).items() if flag])
    assert 0 < score.missed < score.right and score.wrong == 0


def test_each_cause_that_a_signature_gives_has_its_log(bench: ModuleType) -> None:
    given = {signature.cause for table in TABLES.values() for signature in table.signatures}
    tested = {case.cause for case in bench.read()}
    ours = {"adapter-fault"}                             # tests/unit/test_headroom.py
    assert given - ours <= tested <= set(CAUSES) | {None}


def test_the_bench_fails_on_a_wrong_verdict(bench: ModuleType, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "judge_exit", lambda case: "disk-full")
    monkeypatch.setattr("sys.argv", ["diagnose", "--variants", "0"])
    assert bench.main() == 1
    assert "disk-full, not context-exceeds-kv-pool" in capsys.readouterr().out
