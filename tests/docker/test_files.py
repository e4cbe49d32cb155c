"""The compose files against two judges: the schema of the Compose Specification, and docker-compose as it is installed."""
from __future__ import annotations

from pathlib import Path

import docker_daemon
import pytest
import yaml
from helpers import ROOT, run_command
from raw_engine import CACHE

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

CHECKER = "check-jsonschema==0.39.0"        # it carries the specification's schema
OVERRIDES = ("compose.nvidia.yaml", "compose.amd.yaml", "compose.cpu.yaml")


@pytest.fixture(scope="module")
def checker() -> list[str | Path]:
    """A command that judges the compose files named behind it."""
    place = docker_daemon.HOME / CHECKER
    python = CACHE / "envs/supervisor/bin/python"
    if not (place / "check_jsonschema").exists():
        docker_daemon.run(python, "-m", "pip", "install", "--quiet", "--target", place, CHECKER)
    return ["env", f"PYTHONPATH={place}", python, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]


def merged(override: str) -> str:
    """compose.yaml and an override as docker-compose understands them, all profiles."""
    docker_daemon.install()
    return docker_daemon.run(docker_daemon.COMPOSE, "-f", "compose.yaml", "-f", override, "config").stdout


@pytest.mark.parametrize("file", ["compose.yaml", *OVERRIDES])
def test_a_file_is_valid(checker: list[str | Path], file: str) -> None:
    done = run_command([*checker, ROOT / file])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("override", OVERRIDES)
def test_what_compose_makes_of_two_files_is_valid(checker: list[str | Path], override: str, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(merged(override))
    done = run_command([*checker, tmp_path / "compose.yaml"])
    assert done.returncode == 0, done.stdout


def test_an_unknown_key_is_not_valid(checker: list[str | Path], tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text((ROOT / "compose.yaml").read_text().replace("stop_grace_period", "stop_grace"))
    assert "stop_grace" in run_command([*checker, tmp_path / "compose.yaml"]).stdout


def test_docker_waits_longer_than_the_drain() -> None:
    for name, service in yaml.safe_load(merged("compose.nvidia.yaml"))["services"].items():
        assert seconds(service["stop_grace_period"]) >= seconds(service["environment"]["TIGHTRANK_LIMITS_DRAIN"]) + 30, name


def seconds(text: str) -> float:
    """Of a duration as docker-compose writes it: 90s, 1m30s."""
    minutes, _, rest = text.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s") or 0)


def test_without_env_file_the_profile_is_asked_for(tmp_path: Path) -> None:
    docker_daemon.install()
    done = docker_daemon.run(docker_daemon.COMPOSE, "--project-directory", tmp_path, "-f", "compose.yaml", "config", ok=False)
    assert done.returncode and "it is worker or pd, see .env" in done.stdout
