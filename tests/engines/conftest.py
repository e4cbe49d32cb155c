"""What tests of real engines share: the tiny models, made once for a whole run."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_command


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the tiny dense model with random weights."""
    directory: Path = tmp_path_factory.mktemp("models") / "dense"
    made = run_command([sys.executable, ROOT / "scripts" / "cpu" / "make_model.py", "dense", directory])
    assert made.returncode == 0, made.stderr
    return str(directory)
