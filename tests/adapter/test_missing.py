"""Every hook of every engine, given a module of the engine in which nothing is where it was: it says so."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import INJECT
from tightrank_adapter import boot, wire

ROWS = [(engine, *row) for engine, rows in boot.HOOKS.items() for row in rows]
PROGRAM = """
import sys, types
from tightrank_adapter import boot, rank
directory, role, engine, hook, name, target = sys.argv[1:]
rank.settings(directory)
rank.hello(role, rank=0)
module = types.ModuleType(name)
boot._installer(directory, engine, hook, target)(module)
"""


@pytest.mark.parametrize(("engine", "hook", "module", "target"), ROWS, ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in ROWS])
def test_a_module_without_what_a_hook_needs(tmp_path: Path, engine: str, hook: str, module: str, target: str) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    values = {"line": {"budget": 10**6, "minimum": 64, "maximum": 1024, "granule": 64}, "indexer": {"budget_bytes": 1 << 24},
              "headroom": {"fraction": 0.08}, "empty-cache": {"when": "pressure", "mark_bytes": 0}}
    wire.write_settings(str(run), wire.Settings("w", 1, engine, {hook: values.get(hook, {})}))
    role = wire.HOOK_ROLES[engine][hook][0]
    argv = [sys.executable, "-c", PROGRAM, str(run), role, engine, hook, module, target]
    done = subprocess.run(argv, timeout=60, check=False, capture_output=True, text=True,
                          env={"PYTHONPATH": str(INJECT), "TIGHTRANK_ADAPTER": str(run)})
    assert done.returncode == 0, done.stderr
    [path] = run.glob("hello-*.json")
    state = json.loads(path.read_text())["hooks"][hook]
    assert state["state"] in (wire.FAILED, wire.WANTED), state    # `wanted` is refused when the engine is up
    assert state["state"] == wire.WANTED or (state["wanted"] and state["found"]), state
