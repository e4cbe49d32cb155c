"""What the images are made of."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import docker_daemon
import pytest
from docker_stack import Stack
from helpers import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

WORKER, GATEWAY, CHANGED = "tightrank-worker:cpu-sglang", "tightrank-gateway", "tightrank-worker:changed"
# Of each module of the adapter: is there a .pyc for this interpreter, and is it one that needs no look at the source?
COMPILED = """
import importlib.util, pathlib
sources = list(pathlib.Path("/opt/tightrank/adapter/inject").rglob("*.py"))
flags = [pathlib.Path(importlib.util.cache_from_source(path)).read_bytes()[4] for path in sources]
print(len(sources), set(flags))
"""


def layers(image: str) -> list[str]:
    found: list[str] = json.loads(docker_daemon.run("docker", "image", "inspect", image).stdout)[0]["RootFS"]["Layers"]
    return found


def run_in_image(image: str, *argv: str) -> str:
    return docker_daemon.run("docker", "run", "--rm", "--network", "none", "--entrypoint", argv[0], image, *argv[1:]).stdout


def test_a_change_of_the_adapter_changes_the_last_layer_alone(stack: Stack, tmp_path: Path) -> None:
    for part in ("docker", "supervisor", "adapter", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", ".dockerignore"):
        shutil.copy(ROOT / file, tmp_path)
    with open(tmp_path / "adapter/inject/tightrank_adapter/line.py", "a") as source:
        source.write("# a change\n")
    names = {"ENGINE_IMAGE": "cpu", "ENGINE": "sglang", "PIP_EXTRA_INDEX_URL": "",
             **{name: stack.environment[name] for name in ("BASE", "WHEELS")}}
    arguments = [word for name, text in names.items() for word in ("--build-arg", f"{name}={text}")]
    docker_daemon.run("docker", "build", *arguments, "-f", tmp_path / "docker/worker.Dockerfile", "-t", CHANGED, tmp_path)
    before, after = layers(WORKER), layers(CHANGED)
    docker_daemon.run("docker", "rmi", CHANGED)
    assert before[:-1] == after[:-1] and before[-1] != after[-1]


def test_the_adapter_is_compiled_for_the_engines_interpreter(stack: Stack) -> None:
    count, flags = run_in_image(WORKER, "python3", "-c", COMPILED).split(maxsplit=1)
    assert int(count) > 10 and flags.strip() == "{1}"         # hash-based and unchecked (PEP 552)


@pytest.mark.parametrize("image", [WORKER, GATEWAY])
def test_what_is_installed_is_what_was_tested(stack: Stack, image: str) -> None:
    code = ("import importlib.metadata as m, json, sys; "
            "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))")
    installed = json.loads(run_in_image(image, "/opt/tightrank/bin/python", "-c", code))
    pins = (ROOT / "scripts/requirements/supervisor.txt").read_text().splitlines()
    tested = {normal(name): version for name, equal, version in (line.partition("==") for line in pins) if equal}
    assert {"fastapi", "uvicorn", "aiohttp"} <= installed.keys() and not {"pip", "pytest", "mypy"} & installed.keys()
    assert {normal(name): version for name, version in installed.items()}.items() <= tested.items()


def normal(name: str) -> str:
    return name.lower().replace("_", "-")
