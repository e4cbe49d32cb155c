"""The whole tree with the fake engine: up, death of each process, the guard's and the daemon's death, drains, failures."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployment import Make, gone
from helpers import FAKE_ENGINE, wait_until


def port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_comes_up_serves_its_state_and_stops_clean(make: Make, engine: str) -> None:
    deployment = make(engine=engine).up()
    worker = deployment.wait_phase("up")
    assert worker["generation"] == 1 and worker["ready"]
    assert all(state["state"] == "in-force" for rank in worker["ranks"] for state in rank["hooks"].values())
    assert deployment.get("/readyz").status_code == 200
    assert deployment.get("/steps?worker=w0").json()["steps"]
    tree = deployment.tree()
    assert deployment.terminate() == 0
    assert gone(tree)()
    assert [event["data"]["to"] for event in deployment.events("phase") if "to" in event["data"]] == [
        "starting", "up", "stopping", "stopped"]


@pytest.mark.parametrize(("engine", "role"), [
    ("vllm", "main"), ("vllm", "engine-core"), ("vllm", "worker"),
    ("sglang", "main"), ("sglang", "scheduler"), ("sglang", "detokenizer")])
def test_death_of_each_process_ends_the_generation_and_the_next_comes_up(make: Make, engine: str, role: str) -> None:
    deployment = make(engine=engine, args=("--orphan",)).up()
    deployment.wait_phase("up")
    tree = deployment.tree()
    os.kill(deployment.pid(role), signal.SIGKILL)
    wait_until(lambda: deployment.get("/readyz").status_code == 503, 1.0, "503 after the death")
    wait_until(gone(tree), 10, "an empty tree")
    worker = deployment.wait_phase("up", generation=2)
    assert worker["restarts"] == 1
    assert deployment.events("cause")[0]["data"]["cause"] in ("rank-died", "engine-exited")


@pytest.mark.parametrize(("engine", "first", "named"), [
    ("sglang", "detokenizer", "scheduler"), ("sglang", "scheduler", "scheduler"), ("vllm", "engine-core", "worker")])
def test_of_several_that_are_gone_at_once_one_that_computes_is_named(make: Make, engine: str, first: str, named: str) -> None:
    """A daemon that could not look meanwhile: the engine has taken the others with it."""
    deployment = make(engine=engine).up()
    deployment.wait_phase("up")
    tree, daemon, victim = deployment.tree(), deployment.status()["guard"]["daemon_pid"], deployment.pid(first)
    os.kill(daemon, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    wait_until(gone(tree), 10, "the engine has ended")
    os.kill(daemon, signal.SIGCONT)
    deployment.wait_phase("up", generation=2)
    told = deployment.events("cause")[0]
    assert told["data"]["cause"] == "rank-died" and f"({named}" in told["sentence"], told["sentence"]


def test_a_dead_resource_tracker_ends_nothing(make: Make) -> None:
    deployment = make().up()
    worker = deployment.wait_phase("up")
    tracker = next(p["id"]["pid"] for p in worker["processes"] if "resource" in p["name"])
    os.kill(tracker, signal.SIGKILL)
    time.sleep(2)
    assert deployment.worker()["phase"] == "up" and deployment.worker()["generation"] == 1


def test_the_daemons_death_ends_the_engines_and_all_comes_back(make: Make) -> None:
    deployment = make(args=("--orphan",)).up()
    deployment.wait_phase("up")
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    os.kill(daemon, signal.SIGKILL)
    wait_until(gone([daemon, *tree]), 5, "engines gone after the daemon")
    deployment.wait_phase("up", generation=2)
    assert deployment.terminate() == 0


def test_the_guards_death_ends_the_engines(make: Make) -> None:
    deployment = make(args=("--orphan",)).up()
    deployment.wait_phase("up")
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    environment = Path(f"/proc/{tree[0]}/environ").read_text().split("\0")
    mark = next(item.partition("=")[2] for item in environment if item.startswith("TIGHTRANK_RUN="))
    with subprocess.Popen(["sleep", "60"], env={"TIGHTRANK_RUN": mark}) as strayed:   # no reading has seen it in the tree
        assert deployment.process is not None
        deployment.process.kill()
        wait_until(gone([daemon, strayed.pid, *tree]), 5, "engines and daemon gone after the guard")


def test_guard_and_daemon_die_together_and_the_next_supervisor_ends_what_is_left(make: Make) -> None:
    deployment = make(args=("--orphan",)).up()
    deployment.wait_phase("up")
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    os.kill(daemon, signal.SIGSTOP)
    assert deployment.process is not None
    deployment.process.kill()
    os.kill(daemon, signal.SIGKILL)
    deployment.process.wait(10)
    deployment.up()
    deployment.wait_phase("up", generation=2)
    assert gone(tree)()


def test_a_sizing_error_is_final_named_and_served(make: Make) -> None:
    text = ("ValueError: To serve at least one request with the model's max seq len (32768), (4.00 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (1.00 GiB). Based on the available memory, the estimated "
            "maximum model length is 8192. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.")
    deployment = make(args=("--die-with-line", text)).up()
    worker = deployment.wait_phase("failed")
    answer = deployment.get("/readyz")
    body = answer.json()["workers"]["w0"]
    assert answer.status_code == 503 and body["cause"] == "context-exceeds-kv-pool"
    assert "8192" in body["change"] and "max seq len" in body["evidence"][0]
    assert worker["restarts"] == 0
    wait_until(lambda: "context-exceeds-kv-pool" in deployment.output, 5, "the cause on stderr")
    time.sleep(1.5)
    assert deployment.worker()["generation"] == 1
    assert deployment.get("/livez").status_code == 200
    assert deployment.post("/admission", {"prompt_tokens": 10}).status_code == 503
    assert deployment.terminate() == 69


def test_what_a_restart_may_fix_is_tried_again_and_then_given_up(make: Make) -> None:
    deployment = make(args=("--die-with-line", "something went wrong"), settings={"limits": {"restarts": 2}}).up()
    worker = deployment.wait_phase("failed")
    assert worker["generation"] == 3 and worker["restarts"] == 2
    assert [e["data"]["action"] for e in deployment.events("decision")].count("back-off") == 2


@pytest.mark.parametrize("argument", [("--no-hello",), ("--hook-failed", "line")])
def test_an_adapter_that_is_not_in_force_is_a_failure(make: Make, argument: tuple[str, ...]) -> None:
    deployment = make(args=argument).up()
    worker = deployment.wait_phase("failed")
    assert worker["diagnosis"]["cause"] == "adapter-not-in-force"
    assert "wanted" in worker["diagnosis"]["summary"] and "found" in worker["diagnosis"]["summary"]


def test_an_observed_hook_is_shown_as_such_and_the_worker_comes_up(make: Make) -> None:
    hooks = {"hooks": ["ranks", "line", "empty-cache"], "observe": ["line", "empty-cache"]}
    deployment = make(settings=hooks, engine="sglang", tensor_parallel=2, args=("--children", "2")).up()
    worker = deployment.wait_phase("up")
    states = {hook: state["state"] for rank in worker["ranks"] for hook, state in rank["hooks"].items()}
    assert states == {"ranks": "in-force", "line": "observing", "empty-cache": "observing"}
    assert worker["line"] is None and worker["context_tokens"] is None
    assert "line=observing" in deployment.run("status").stdout
    assert deployment.post("/admission", {"prompt_tokens": 10**6}).status_code == 200, "an observed line refuses nobody"


def test_a_start_without_progress_is_ended(make: Make) -> None:
    deployment = make(args=("--load-seconds", "600"), settings={"limits": {"start_stall": "2s", "restarts": 0}}).up()
    assert deployment.wait_phase("failed")["diagnosis"]["cause"] == "start-stalled"


@pytest.mark.parametrize(("fault", "cause"), [("--mute", "start-stalled"), ("--block-in-futex", "canary-failed")])
def test_an_engine_that_answers_nothing_never_becomes_ready(make: Make, fault: str, cause: str) -> None:
    """Blocked, its port still says that it is healthy, as a real engine's does."""
    deployment = make(args=(fault,), settings={"limits": {"start_stall": "3s", "restarts": 0}}).up()
    assert deployment.wait_phase("failed")["diagnosis"]["cause"] == cause


def test_a_drain_that_is_ignored_is_forced_and_not_clean(make: Make) -> None:
    deployment = make(args=("--ignore-sigterm",), settings={"limits": {"drain": "1s"}}).up()
    deployment.wait_phase("up")
    tree = deployment.tree()
    assert deployment.terminate() == 75
    assert gone(tree)()


def test_a_second_sigterm_ends_now(make: Make) -> None:
    deployment = make(args=("--ignore-sigterm",), settings={"limits": {"drain": "10m"}}).up()
    deployment.wait_phase("up")
    assert deployment.process is not None
    deployment.process.send_signal(signal.SIGTERM)
    wait_until(lambda: deployment.worker().get("phase") == "stopping", 5)
    started = time.monotonic()
    assert deployment.terminate() == 75
    assert time.monotonic() - started < 9


def test_a_stop_while_a_worker_is_being_restarted_is_not_lost(make: Make) -> None:
    deployment = make(args=("--ignore-sigterm",), settings={"limits": {"drain": "3s"}}).up()
    deployment.wait_phase("up")
    assert deployment.post("/workers/w0/restart").status_code == 202
    deployment.wait_phase("stopping")
    assert deployment.terminate(30) == 75
    assert deployment.events("phase")[-1]["data"]["to"] == "stopped"


def test_a_reader_of_our_output_that_goes_away_ends_nothing(make: Make) -> None:
    deployment = make()
    reading, writing = os.pipe()
    deployment.up(writing)
    os.close(writing)
    deployment.wait_phase("up")
    os.close(reading)
    assert deployment.post("/workers/w0/drain").status_code == 202     # said on stderr, as each decision is
    deployment.wait_phase("draining", generation=1)
    assert deployment.post("/workers/w0/resume").status_code == 202
    deployment.wait_phase("up", generation=1)
    assert deployment.status()["guard"]["daemon_starts"] == 1 and deployment.terminate() == 0


def test_drain_resume_restart_by_request(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("up")
    assert deployment.post("/workers/w0/drain").status_code == 202
    deployment.wait_phase("draining")
    assert deployment.get("/readyz").status_code == 503
    assert deployment.post("/admission", {"prompt_tokens": 10}).status_code == 503
    assert deployment.run("resume", "w0").returncode == 0
    deployment.wait_phase("up", generation=1)
    assert deployment.run("restart", "w0").returncode == 0
    deployment.wait_phase("up", generation=2)
    assert deployment.run("status").returncode == 0
    assert deployment.run("logs", "w0").stdout.count("\n") > 3
    assert deployment.run("stop").returncode == 0
    assert deployment.process is not None and deployment.process.wait(20) == 0


def test_a_second_supervisor_on_the_same_state_directory_is_refused(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("starting", "up")
    second = deployment.run("up", "--set", "http.port=1")
    assert second.returncode == 78
    assert "held by another supervisor" in second.stderr and second.stderr.count("\n") == 1


def test_the_engines_environment_holds_nothing_of_ours_but_two_names(make: Make) -> None:
    deployment = make()
    deployment.env["TIGHTRANK_TOKEN"] = "s3cret"
    deployment.up().wait_phase("up")
    environment = Path(f"/proc/{deployment.pid('main')}/environ").read_bytes().split(b"\0")
    ours = {item.split(b"=")[0] for item in environment if item.startswith(b"TIGHTRANK_")}
    assert ours == {b"TIGHTRANK_ADAPTER", b"TIGHTRANK_RUN"}
    assert b"s3cret" not in b"".join(environment)
    assert "s3cret" not in deployment.output + (deployment.state / "journal.jsonl").read_text()


def test_run_supervises_a_command_line_without_a_file(make: Make, tmp_path: Path) -> None:
    deployment = make()
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_ENGINE} --engine vllm "$@"\n')
    program.chmod(0o755)
    settings = {"http.port": deployment.port, "state_directory": deployment.state, "guard.floor": "64MiB"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    deployment.start("run", *words, "--", str(program), "serve", str(tmp_path / "model"), "--host", "127.0.0.1", "--port",
                     str(deployment.engine_port), "--served-model-name", "tiny")
    worker = deployment.wait_phase("up")
    assert (worker["name"], worker["engine"], worker["port"]) == ("worker", "vllm", deployment.engine_port)
    assert deployment.terminate() == 0


def test_a_request_that_the_phase_cannot_take_is_refused(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("up")
    answer = deployment.post("/workers/w0/resume")
    assert answer.status_code == 409 and "draining" in answer.json()["error"]["message"]


def test_a_program_that_vanished_after_the_check_is_named(make: Make, tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text("#!/nowhere/python\n")
    program.chmod(0o755)
    worker = make(command=[str(program)]).up().wait_phase("failed")
    assert worker["diagnosis"]["cause"] == "engine-binary-missing" and str(program) in worker["diagnosis"]["summary"]
    assert worker["generation"] == 1
