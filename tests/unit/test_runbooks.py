"""Each cause has its heading in the runbook and each heading its cause; what it tells people to type is there."""
from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from tightrank.cli import _parser
from tightrank.config.keys import KEYS, SECTIONS, TABLES
from tightrank.errors import CAUSES, Cause

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "runbooks" / "causes.md"
TEXT = PATH.read_text()
BODIES = {found[1]: found[2] for found in re.finditer(r"^## (.+)\n((?:(?!#).*\n)*)", TEXT, re.MULTILINE)}


def test_one_heading_for_each_cause_in_the_same_order() -> None:
    assert re.findall(r"^## (.+)$", TEXT, re.MULTILINE) == list(CAUSES)


@pytest.mark.parametrize("cause", CAUSES.values(), ids=lambda cause: str(cause.id))
def test_a_heading_says_what_it_means_whether_to_restart_and_what_to_do(cause: Cause) -> None:
    body = BODIES[cause.id]
    restart = "Yes" if cause.restart_helps else "No"
    assert re.match(rf"\*\*Meaning\.\*\* {re.escape(cause.meaning)}\n"
                    rf"\*\*Impact\.\*\* .+\. \*\*Restart\.\*\* {restart}(?:: .+)?\.\n"
                    r"\*\*Diagnosis\.\*\* (?:.+\n)+?\*\*Mitigation\.\*\* (?:.+\n)+\n?$", body)
    assert len(body.strip().splitlines()) <= 7, "for a pager at night"


@pytest.mark.parametrize("cause", CAUSES.values(), ids=lambda cause: str(cause.id))
def test_a_cause_leads_to_its_heading(cause: Cause) -> None:
    path, _, anchor = cause.runbook.partition("#")
    assert (ROOT / path, anchor) == (PATH, cause.id)


def test_the_keys_it_names_are_keys() -> None:
    starts = "|".join(re.escape(start) for start in (*SECTIONS, *TABLES))
    named = set(re.findall(rf"`((?:{starts})\.[a-z_]+)`", TEXT))
    assert len(named) > 10 and named <= set(KEYS)


def test_the_commands_it_names_are_commands() -> None:
    known = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    named = set(re.findall(r"`tightrank ([a-z]+)", TEXT))
    assert len(named) > 5 and named <= set(known)
