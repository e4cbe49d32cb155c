"""Who may import whom (the design's layers), read from the sources: no cycles, an adapter and a guard that stand alone."""
from __future__ import annotations

import ast
import graphlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import INJECT, SUPERVISOR

PACKAGE = SUPERVISOR / "tightrank"
GUARD = PACKAGE / "guard"
# A module imports from lower layers and from its own package only. Each name is a file or package under tightrank/.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("records", "errors", "adapter", "sockets", "least_squares", "bell", "__init__"),
    ("config", "numbering"),
    ("engines", "host", "inputs", "logs", "gateway", "hang", "auto", "verify"),
    ("readers",),
    ("plan", "diagnose", "decide", "levels", "watch", "launch", "admission", "breaker", "hygiene", "clues"),
    ("check", "act", "calibration", "prefills", "steering"),
    ("generation", "stacks", "survey", "leftovers"),
    ("ending",),
    ("worker",),
    ("status", "report", "nodes"),
    ("metrics", "edge", "bundle"),
    ("api", "serve"),
    ("daemon", "cli"),
)
ALONE = {"guard", "exec_engine"}      # run as programs; import nothing of ours
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OWN_LINES = 300


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield parts[0], path


def imports(path: Path) -> set[str]:
    """Full names of what `path` imports at any depth, type-checking blocks left out."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
               for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    """The parts of tightrank (files or packages right under it) that `path` imports."""
    parts = {name.split(".")[1] for name in imports(path) if name.startswith("tightrank.")}
    return {part if part in LEVEL or part in ALONE else "__init__" for part in parts}


def file_of(full_name: str) -> Path | None:
    """The file under tightrank/ that an imported name lies in."""
    path = SUPERVISOR.joinpath(*full_name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py"),
                      path.parent / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def test_there_are_no_cycles() -> None:
    graph = {path: {file_of(name) for name in imports(path) if name.startswith("tightrank.")} - {None, path}
             for _, path in modules()}
    assert sum(map(len, graph.values())) > 100
    graphlib.TopologicalSorter(graph).prepare()      # raises CycleError, which names the files


def test_the_guard_hides_no_standard_module_and_has_no_cycles() -> None:
    """It is run as a directory, which comes first in sys.path."""
    rooms = {path.stem: {full.split(".")[0] for full in imports(path)} for path in GUARD.glob("*.py")}
    assert "__main__" in rooms and not rooms.keys() & sys.stdlib_module_names
    graphlib.TopologicalSorter({room: found & rooms.keys() for room, found in rooms.items()}).prepare()


def test_every_module_has_its_layer() -> None:
    unknown = {name for name, _ in modules()} - set(LEVEL) - ALONE
    assert not unknown, f"give {sorted(unknown)} a place in LAYERS"


@pytest.mark.parametrize(("name", "path"), [pytest.param(*item, id=str(item[1].relative_to(PACKAGE))) for item in modules()])
def test_imports_go_down(name: str, path: Path) -> None:
    if name in ALONE:
        rooms = {room.stem for room in GUARD.glob("*.py")} if path.parent == GUARD else set()
        assert ours(path) == set()
        assert {full.split(".")[0] for full in imports(path)} <= sys.stdlib_module_names | rooms
        return
    wrong = {part for part in ours(path) - {name} if LEVEL[part] >= LEVEL[name]}
    assert not wrong, f"{name} (layer {LEVEL[name]}) imports {sorted(wrong)}"


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in sorted(INJECT.rglob("*.py"))])
def test_the_adapter_needs_only_the_standard_library(path: Path) -> None:
    """At module level; inside a hook an engine and torch are there already. Python 3.10 must be able to read it."""
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {"tightrank_adapter" if node.level else (node.module or "").split(".")[0]}
    assert found <= sys.stdlib_module_names | {"tightrank_adapter"}


@pytest.mark.parametrize("name", ["line", "wire"])
def test_what_the_supervisor_loads_by_path_stands_alone(name: str) -> None:
    found = {full.split(".")[0] for full in imports(INJECT / "tightrank_adapter" / f"{name}.py")}
    assert found <= sys.stdlib_module_names


def test_the_adapter_is_not_imported_by_name() -> None:
    assert not [path for _, path in modules() if any(name.startswith("tightrank_adapter") for name in imports(path))]


def test_long_files_are_pointed_out() -> None:
    for path in [*PACKAGE.rglob("*.py"), *INJECT.rglob("*.py")]:
        lines = len(path.read_text().splitlines())
        if lines > OWN_LINES:
            warnings.warn(f"{path.relative_to(SUPERVISOR.parent)}: {lines} lines (aim: {OWN_LINES})", stacklevel=1)
