"""Real engines under the whole tree: deaths, sizing errors, an adapter that is not in force, a fault on one of two ranks."""
from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment, gone
from helpers import wait_until
from raw_engine import CACHE, interpreter, with_settings
from tightrank.hygiene import shared

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHM = Path("/dev/shm")
START_SECONDS = 240        # vLLM on busy cores; 20 s on quiet ones
COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}}
CPU_ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4"),
                 "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                            "--sleep-on-idle")}
POOL = {"vllm": (), "sglang": ("--max-total-tokens", "16384")}
ROLES = {"vllm": ("main", "engine-core", "worker"), "sglang": ("main", "scheduler", "detokenizer")}
Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path, dense_model: str) -> Iterator[Make]:
    made: list[Deployment] = []

    def build(engine: str, args: tuple[str, ...] | None = None, env: dict[str, str | None] | None = None,
              command: list[str] | None = None, **options: Any) -> Deployment:
        settings = options.get("settings", {})
        options["settings"] = {**settings, "limits": {"drain": "30s", **settings.get("limits", {})}}
        program = CACHE / "envs" / engine
        head, *rest = COMMANDS[engine]
        deployment = Deployment(
            tmp_path, engine=engine, model=Path(dense_model), command=command or [str(program / head), *rest],
            args=(*CPU_ARGUMENTS[engine], *(POOL[engine] if args is None else args)),
            env={name: value for name, value in {**ENVIRONMENTS[engine], **(env or {})}.items() if value is not None},
            **options)
        made.append(deployment)
        return deployment.up()

    yield build
    for deployment in made:
        deployment.close()


def up(deployment: Deployment, generation: int) -> dict[str, Any]:
    return deployment.wait_phase("up", timeout=START_SECONDS, generation=generation)


def killed_and_back(deployment: Deployment, role: str, generation: int) -> None:
    """SIGKILL of one process: 503 within 1 s, no process and no port within 10 s, no trace; then up again."""
    tree, left = deployment.tree(), traces(deployment, generation - 1)
    os.kill(deployment.pid(role), signal.SIGKILL)
    wait_until(lambda: deployment.get("/readyz").status_code == 503, 1.0, f"503 after the death of {role}")
    wait_until(gone(tree), 10, f"an empty tree after the death of {role}")
    worker = up(deployment, generation)
    assert not set(tree) & {process["id"]["pid"] for process in worker["processes"]}
    assert not [path for path in left if path.exists()]


def traces(deployment: Deployment, generation: int) -> list[Path]:
    """What it made outside its processes: its temporary directory, the shared memory that it holds."""
    wait_until(lambda: len(found(deployment, generation)["segments"]) > 0, 20, "shared memory of the engine")
    record = found(deployment, generation)
    return [Path(record["temporary"]), *(SHM / name for name in record["segments"])]


def found(deployment: Deployment, generation: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((deployment.state / "run" / f"w0-{generation}.traces.json").read_text())
    return record


def held_by_nobody(before: set[str]) -> list[str]:
    return [name for name in set(os.listdir(SHM)) - before if shared.free(SHM / name)]


@pytest.mark.parametrize(("engine", "roles", "ours"), [
    ("vllm", ("engine-core",), ("guard",)), ("sglang", ("scheduler",), ("daemon",)),
    *(pytest.param(engine, roles, ("daemon", "guard"), marks=pytest.mark.full) for engine, roles in ROLES.items())])
def test_every_death_is_seen_and_healed(make: Make, engine: str, roles: tuple[str, ...], ours: tuple[str, ...]) -> None:
    before = set(os.listdir(SHM))
    deployment = make(engine)
    worker = up(deployment, 1)
    refused_when_too_long(deployment, engine, worker["context_tokens"])
    tracker = next(process["id"]["pid"] for process in worker["processes"]
                   if b"resource_tracker" in Path(f"/proc/{process['id']['pid']}/cmdline").read_bytes())
    os.kill(tracker, signal.SIGKILL)
    for generation, role in enumerate(roles, 2):
        killed_and_back(deployment, role, generation)
    if "daemon" in ours:
        daemon_killed_and_back(deployment, len(roles) + 2)
    if "guard" in ours:
        guard_killed(deployment)
        deployment.up()                  # what the daemon had no time for goes before the next supervisor starts anything
    wait_until(lambda: not held_by_nobody(before), 60, "no shared memory that nobody holds")


def daemon_killed_and_back(deployment: Deployment, generation: int) -> None:
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    os.kill(daemon, signal.SIGKILL)
    wait_until(gone([daemon, *tree]), 5, "engine gone after the daemon")
    up(deployment, generation)


def guard_killed(deployment: Deployment) -> None:
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    assert deployment.process is not None
    deployment.process.kill()
    wait_until(gone([daemon, *tree]), 5, "engine and daemon gone after the guard")


def refused_when_too_long(deployment: Deployment, engine: str, context: int) -> None:
    """The engine's own 400, straight at its port; and ours, before a byte goes to it."""
    ids = [5] * (context + 1)
    path, body = ("/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 1}) if engine == "vllm" else \
        ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
    answer = httpx2.post(f"http://127.0.0.1:{deployment.engine_port}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    ours = deployment.post("/admission", {"prompt_tokens": context + 1})
    assert ours.status_code == 400 and ours.json()["error"]["largest_prompt_tokens"] < context + 1


@pytest.mark.parametrize(("engine", "args", "env", "cause", "flag"), [
    ("vllm", ("--kv-cache-memory-bytes", "8000000"), {"VLLM_CPU_KVCACHE_SPACE": None}, "context-exceeds-kv-pool",
     "--max-model-len"),
    ("sglang", ("--mem-fraction-static", "0.0001"), {}, "kv-pool-too-small", "--mem-fraction-static")])
def test_a_sizing_error_is_told_within_a_second_and_never_restarted(
        make: Make, engine: str, args: tuple[str, ...], env: dict[str, str | None], cause: str, flag: str) -> None:
    deployment = make(engine, args, env)
    deployment.wait_phase("failed", timeout=START_SECONDS)
    answer = deployment.get("/readyz")
    body = answer.json()["workers"]["w0"]
    assert answer.status_code == 503 and body["cause"] == cause, body
    assert flag in body["change"] and body["numbers"] and body["evidence"]
    told = next(event["unix"] for event in deployment.events("cause"))
    assert told - arrived(deployment, body["evidence"][0]) < 1.0
    assert deployment.worker()["generation"] == 1
    assert cause in deployment.output
    assert deployment.terminate() == 69


def arrived(deployment: Deployment, evidence: str) -> float:
    """When the deciding line came through the pipe, by the stamp in the worker's log."""
    for line in (deployment.state / "logs" / "w0.log").read_text().splitlines():
        stamp, _, text = line.partition(" ")
        if text.startswith(evidence[:200]):
            return datetime.fromisoformat(stamp).timestamp()
    raise AssertionError(f"not in the log: {evidence}")


def test_an_engine_without_sitecustomize_and_plugins_is_not_run_silently(make: Make, dense_model: str) -> None:
    python = str(CACHE / "envs" / "sglang" / "bin" / "python")
    deployment = make("sglang", command=[python, "-I", "-m", "sglang.launch_server"])
    worker = deployment.wait_phase("failed", timeout=START_SECONDS)
    assert worker["diagnosis"]["cause"] == "adapter-not-in-force"
    assert "wanted on 1 scheduler, found on 0" in worker["diagnosis"]["summary"]
    assert deployment.terminate() == 69


def test_an_engine_whose_hook_target_was_removed_is_not_run_silently(make: Make, tmp_path: Path) -> None:
    """A release without the method, made by a sitecustomize of the user's own (which ours displaces and runs)."""
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "sitecustomize.py").write_text(
        "import builtins\nbuild = builtins.__build_class__\n"
        "def changed(function, name, *bases, **keywords):\n"
        "    made = build(function, name, *bases, **keywords)\n"
        "    if name == 'PrefillAdder':\n        del made.add_chunked_req\n"
        "    return made\n"
        "builtins.__build_class__ = changed\n")
    deployment = make("sglang", None, {"PYTHONPATH": str(tmp_path / "older")})
    worker = deployment.wait_phase("failed", timeout=START_SECONDS)
    assert worker["diagnosis"]["cause"] == "adapter-not-in-force"
    assert "PrefillAdder.add_chunked_req" in worker["diagnosis"]["summary"] and "0.5.23" in worker["diagnosis"]["summary"]
    assert worker["generation"] == 1
    assert deployment.terminate() == 69


@pytest.mark.full                        # in every run: the same inside the hook headroom (test_headroom.py)
def test_a_fault_on_one_of_two_ranks_ends_the_generation(make: Make, tmp_path: Path) -> None:
    program = with_settings(tmp_path / "wrapped", "settings['drill'] = {'where': 'PrefillAdder.add_one_req', 'ranks': [1]}",
                            [interpreter("sglang"), "-m", "sglang.launch_server"])
    deployment = make("sglang", (*POOL["sglang"],), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, command=[str(program)],
                      tensor_parallel=2, settings={"limits": {"restarts": 0}})
    worker = deployment.wait_phase("failed", timeout=START_SECONDS)
    assert worker["diagnosis"]["cause"] == "adapter-fault", json.dumps(worker["diagnosis"])
    first = next(e for e in deployment.events("cause") if e["data"].get("cause") == "adapter-fault")
    ended = next(e for e in deployment.events("phase") if e["data"].get("to") == "stopping")
    assert ended["unix"] - first["unix"] < 5
    assert deployment.terminate() == 69


def test_two_ranks_are_seen_and_the_tightest_is_named(make: Make) -> None:
    """Balanced ranks: the engine's own number of tokens, 512 bytes a rank each, with the hook headroom in force."""
    deployment = make("sglang", ("--mem-fraction-static", "0.05"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, tensor_parallel=2,
                      settings={"hooks": ["ranks", "line", "headroom"]})
    worker = up(deployment, 1)
    assert worker["headroom"]["bound"] == "engine"
    assert {rank["facts"]["kv_tokens"] for rank in worker["ranks"] if rank["role"] == "scheduler"} == {
        worker["headroom"]["available_bytes"] // 512}
    assert {rank["own_bytes"] for rank in worker["headroom"]["ranks"]} == {worker["headroom"]["available_bytes"]}
    assert sorted(rank["tp_rank"] for rank in worker["ranks"] if rank["role"] == "scheduler") == [0, 1]
    assert deployment.status()["tightest_rank"]["available_bytes"] > 0
    time.sleep(0.1)
    steps = deployment.get("/steps?worker=w0").json()["steps"]
    assert {step["rank"] for step in steps} == {0, 1}
    assert deployment.terminate() == 0
