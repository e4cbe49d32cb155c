"""The table of the hooks says what was proved, and nothing that was not."""
from __future__ import annotations

from pathlib import Path

import hooks_table
import pytest
from tightrank.config.keys import HOOKS


def test_the_strongest_proof_counts_and_the_rest_is_unknown() -> None:
    table = hooks_table.render([("vllm", "0.32.0", "line", "classes"), ("vllm", "0.32.0", "line", "server"),
                                ("vllm", "0.1.0", "ranks", "server"), ("atom", "*", "heads", "refused (why)")])
    rows = {row.split("|")[1].strip(" `"): [cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines()[2:]}
    assert tuple(rows) == HOOKS
    assert rows["line"] == ["unknown", "unknown", "server", "unknown", "unknown"]
    assert rows["ranks"] == ["unknown"] * 5, "a release that has no column"
    assert rows["heads"][4] == "refused (why)"
    assert "a cell that no test proved" in hooks_table.problems([])[-1]


def test_the_documents_know_every_cell() -> None:
    for path in hooks_table.DOCUMENTS:
        assert "unknown" not in hooks_table.written(path)
        assert hooks_table.written(path).count("\n") == len(HOOKS) + 2


def test_a_document_without_the_marks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hooks.md"
    path.write_text("no table")
    with pytest.raises(ValueError, match=r"hooks.md: the marks"):
        hooks_table.written(path)
