"""The table hooks x engines x releases of README.md and docs/hooks.md, made from what the tests of one whole run proved.

A test that saw a hook do its work says so with the fixture `proves`. scripts/hooks-table writes the table; a whole run of
scripts/test fails where the table says what that run did not prove.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from helpers import ROOT
from tightrank.config.keys import HOOKS

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "hooks.md")
BEGIN, END = "<!-- made by scripts/hooks-table -->\n", "<!-- end -->\n"
COLUMNS = {("sglang", "0.5.22"): "SGLang 0.5.22", ("sglang", "0.5.23"): "SGLang 0.5.23", ("vllm", "0.32.0"): "vLLM 0.32.0",
           ("vllm", "0.33.0"): "vLLM 0.33.0", ("atom", "v0.1.2 - 2026-08"): "ATOM v0.1.2 - 2026-08"}
STRENGTH = ("server", "classes", "stand-in", "not needed", "refused")
Proof = tuple[str, str, str, str]      # engine, release, hook, one of STRENGTH with what follows it


def cells(proofs: Iterable[Proof]) -> Mapping[tuple[str, str, str], str]:
    """The strongest proof of each (engine, release, hook); a release of "*" stands for all of an engine's columns."""
    found: dict[tuple[str, str, str], str] = {}
    for engine, release, hook, by in proofs:
        for column in COLUMNS:
            key = (*column, hook)
            if column[0] == engine and release in ("*", column[1]) and _rank(by) < _rank(found.get(key, "unknown")):
                found[key] = by
    return found


def _rank(by: str) -> int:
    return next((place for place, word in enumerate(STRENGTH) if by.startswith(word)), len(STRENGTH))


def render(proofs: Iterable[Proof]) -> str:
    """The table in Markdown."""
    found = cells(proofs)
    lines = ["| hook | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for hook in HOOKS:
        row = [found.get((*column, hook), "unknown") for column in COLUMNS]
        lines.append(f"| `{hook}` | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def written(path: Path) -> str:
    """The table as a document has it. Raises ValueError where its marks are missing."""
    _, begin, rest = path.read_text().partition(BEGIN)
    table, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: the marks {BEGIN.strip()} and {END.strip()} are missing")
    return table


def write(proofs: Iterable[Proof]) -> None:
    """Into all documents."""
    table = render(proofs)
    for path in DOCUMENTS:
        path.write_text(path.read_text().replace(BEGIN + written(path) + END, BEGIN + table + END))


def problems(proofs: Iterable[Proof]) -> list[str]:
    """What is wrong with the documents after a whole run: another table, a cell that nothing proved."""
    table = render(proofs)
    found = [f"{path.name}: its table is not what this run proved; scripts/hooks-table writes it" for path in DOCUMENTS
             if written(path) != table]
    return found + (["the table has a cell that no test proved"] if "unknown" in table else [])
