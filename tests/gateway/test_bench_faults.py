"""The fault bench itself, short: its scenes can be played and nothing behaves otherwise than it has to (times are for a
machine that does nothing else: scripts/bench/faults)."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import ROOT, run_command


@pytest.mark.full
def test_faults_quick(tmp_path: Path) -> None:
    done = run_command([ROOT / "scripts" / "bench" / "faults", "--quick", "--json", tmp_path / "found.json"], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert {each["row"] for each in found} == {"sglang", "vllm", "sglang supervised", "vllm supervised"} and len(found) >= 20
    assert {each["verdict"] for each in found} <= {"pass", "MISS"}
