"""Each guard level has its heading, says what a page must say, and names all of its keys."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
from tightrank.cli.show import status_text
from tightrank.config.keys import KEYS
from tightrank.levels.ladder import LEAD_SECONDS, LEVELS, STEPS
from tightrank.metrics import METRICS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "runbooks" / "guard.md").read_text()
BODIES = {found[1]: found[2] for found in re.finditer(r"^## (.+)\n((?:(?!#).*\n)*)", TEXT, re.MULTILINE)}


def test_one_heading_for_each_level_in_the_order_in_which_they_fire() -> None:
    assert list(BODIES) == [*LEVELS, "stop"]


@pytest.mark.parametrize("level", [*LEVELS, "stop"])
def test_a_heading_says_what_to_do_and_how_the_limit_is_set(level: str) -> None:
    parts = re.findall(r"^\*\*(\w+)\.\*\*", BODIES[level], re.MULTILINE)
    assert parts == ["Meaning", "Impact", "Diagnosis", "Mitigation", "Limit"]
    assert "restart" in BODIES[level].partition("**Limit.**")[2]
    assert len(BODIES[level].strip().splitlines()) <= 18, "for a pager at night"


@pytest.mark.parametrize("level", LEVELS)
def test_it_names_all_keys_of_the_level(level: str) -> None:
    keys = {key for key in KEYS if key.startswith(f"guard.{level}.")}
    assert len(keys) == 5 and keys <= set(re.findall(r"`(guard\.[a-z.]+)`", BODIES[level]))


def test_the_keys_and_metrics_it_names_are_there() -> None:
    assert set(re.findall(r"`((?:guard|line|gateway)\.[a-z_.]+)`", TEXT)) <= set(KEYS)
    named = set(re.findall(r"tightrank_(guard_[a-z_]+)", TEXT))
    assert len(named) == 3 and named <= {metric.name for metric in METRICS}


def test_its_numbers_are_those_of_the_code() -> None:
    assert f"within {LEAD_SECONDS:.0f} s" in TEXT and f"in {STEPS} steps" in TEXT


def test_a_level_in_force_is_shown_to_a_person() -> None:
    level = {"level": "shed", "place": "host", "mode": "dry-run", "in_force": True, "sentence": "host: 1700 MiB available"}
    body = {"name": "d", "ready": True, "memory": {"available_bytes": 1, "mem_total_bytes": 2}, "tightest_rank": None,
            "floor_bytes": 1, "guard": {}, "workers": [], "levels": [level, {**level, "level": "abort", "in_force": False}]}
    text = status_text(body)
    assert "level shed is in force (dry run)  host: 1700 MiB available" in text and "abort" not in text
