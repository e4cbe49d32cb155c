"""scripts/chaos: some of its rounds in every run, all of them with --full; and that it finds what it looks for."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import ROOT, run_command

CHAOS = ROOT / "scripts" / "chaos"


@pytest.mark.timeout(900)
def test_some_blows_leave_nothing_and_end_up_or_failed_with_a_cause() -> None:
    done = run_command([sys.executable, CHAOS, "--rounds", "4", "--seed", "5"], timeout=800)
    assert done.returncode == 0 and "4 rounds, 0 breaches" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(6000)
def test_two_hundred_blows() -> None:
    done = run_command([sys.executable, CHAOS, "--rounds", "200", "--seed", "1"], timeout=5900)
    assert done.returncode == 0 and "200 rounds, 0 breaches" in done.stdout, done.stdout[-8000:] + done.stderr


@pytest.fixture
def chaos() -> ModuleType:
    loader = SourceFileLoader("chaos", str(CHAOS))
    module = module_from_spec(spec_from_loader("chaos", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.fixture
def life(chaos: ModuleType) -> Iterator[Any]:
    made = chaos.Life(chaos.random.Random(0), 3.0)
    yield made
    made.close(keep=False)


def test_it_finds_what_is_left(life: Any) -> None:
    (life.directory / "state").mkdir()
    (life.directory / "state" / "journal.jsonl").write_text('{"sequence": 1}\n')
    assert list(life.leftovers([])) == []
    segment = Path("/dev/shm") / f"sgl_shm_mq_{life.directory.name}_0"
    segment.write_bytes(b"1")
    (life.directory / "tmp" / "x").write_text("")
    (life.directory / "state" / "journal.jsonl").write_text('{"sequence": 1}\n{"torn')
    try:
        found = list(life.leftovers([1]))
    finally:
        segment.unlink()
    assert found[0].startswith("left: process 1 ")
    assert [each for each in found if str(segment) in each] and [each for each in found if each.endswith("/tmp/x")]
    assert found[-1].startswith(f"{life.directory}/state/journal.jsonl:2: ")


@pytest.mark.parametrize(("phase", "diagnosis", "breach"), [
    ("up", None, None), ("starting", None, None), ("failed", {"cause": "rank-died"}, "no fault of its own"),
    ("failed", None, "without a cause")])
def test_it_says_when_a_worker_ends_wrong(chaos: ModuleType, life: Any, phase: str, diagnosis: object,
                                          breach: str | None) -> None:
    life.ends = ()
    life.worker = lambda: {"phase": phase, "diagnosis": diagnosis, "processes": [{"id": {"pid": 7}}]}
    if breach is None:
        assert life.state([]) == ("up" if phase == "up" else None) and life.state([7]) is None
        return
    with pytest.raises(chaos.Breach, match=breach):
        life.state([])
