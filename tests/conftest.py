"""Fixtures for all tiers: a state directory, a free port, processes that do not outlive their test."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import hooks_table
import pytest
from helpers import ROOT, free_ports, kill, run_command, session_pids

TESTS = ROOT / "tests"

TIERS = ("unit", "process", "adapter", "hosts", "engines", "docker")  # the quick ones first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too")
    parser.addoption("--hooks-table", choices=("check", "write"), help="the table of docs/hooks.md and what this run proved")


_proofs: list[hooks_table.Proof] = []


@pytest.fixture
def proves(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`proves(engine, release, hook, ..., by="server")`: this test saw those hooks do their work (tests/hooks_table.py)."""
    def say(engine: str, release: str, *hooks: str, by: str) -> None:
        for hook in hooks:
            record_property("proves", (engine, release.partition("+")[0], hook, by))
    return say


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _proofs.extend(tuple(value) for name, value in report.user_properties if name == "proves")  # type: ignore[misc]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After a whole run: the documents say what was proved, no more and no less."""
    wanted = session.config.getoption("--hooks-table")
    if wanted == "write":
        hooks_table.write(_proofs)
    elif wanted == "check" and (wrong := hooks_table.problems(_proofs)):
        print(*("", *wrong, hooks_table.render(_proofs)), sep="\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tiers, and leaves out what is too long for every run."""
    def tier(item: pytest.Item) -> int:
        part = item.path.relative_to(TESTS).parts[0]
        return TIERS.index(part) if part in TIERS else len(TIERS)

    items.sort(key=tier)
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def state_directory(tmp_path: Path) -> Path:
    """A state directory of the supervisor, private to its owner."""
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    return free_ports(1)[0]


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes in their own session; whatever is left of the session is killed when the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def start(argv: Sequence[str | os.PathLike[str]], env: Mapping[str, str] | None = None,
              **keywords: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
            [os.fspath(part) for part in argv], env={**os.environ, **(env or {})}, start_new_session=True, **keywords)
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in session_pids(process.pid):
            kill(pid)
        process.kill()
        process.wait(timeout=30)


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the tiny dense model with random weights, made once for a whole run."""
    directory: Path = tmp_path_factory.mktemp("models") / "dense"
    made = run_command([sys.executable, ROOT / "scripts" / "cpu" / "make_model.py", "dense", directory])
    assert made.returncode == 0, made.stderr
    return str(directory)
