"""What a restart of the supervisor may start: the breaker on disk, `on_failed`, a changed configuration."""
from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
from deployment import Deployment, Make
from helpers import free_ports, wait_until

SIZING = ("ValueError: To serve at least one request with the model's max seq len (32768), (4.00 GiB KV cache is needed, "
          "which is larger than the available KV cache memory (1.00 GiB). Based on the available memory, the estimated "
          "maximum model length is 8192. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.")
TAKEN = ("ValueError: Free memory on device cuda:0 (1.5/80.0 GiB) on startup is less than desired GPU memory utilization "
         "(0.92, 73.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.")


def starts(deployment: Deployment) -> int:
    """Of the engine, so far."""
    return sum(event["data"].get("to") == "starting" for event in deployment.events("phase"))


def change(deployment: Deployment, **keys: Any) -> None:
    body = json.loads(deployment.file.read_text())
    body["workers"][0].update(keys)
    deployment.file.write_text(json.dumps(body))


def test_a_sizing_error_starts_the_engine_once_however_often_the_supervisor_is_restarted(make: Make) -> None:
    deployment = make(args=("--die-with-line", SIZING)).up()
    deployment.wait_phase("failed")
    assert deployment.terminate() == 69
    for end in (signal.SIGTERM, signal.SIGKILL):
        deployment.up()
        worker = deployment.wait_phase("failed")
        answer = deployment.get("/readyz")
        assert answer.status_code == 503 and answer.json()["workers"]["w0"]["cause"] == "context-exceeds-kv-pool"
        assert "8192" in answer.json()["workers"]["w0"]["change"] and worker["diagnosis"]["evidence"]
        assert deployment.process is not None
        deployment.process.send_signal(end)
        deployment.process.wait(30)
    assert starts(deployment) == 1


def test_the_daemons_death_does_not_start_it_either(make: Make) -> None:
    deployment = make(args=("--die-with-line", SIZING)).up()
    deployment.wait_phase("failed")
    os.kill(deployment.status()["guard"]["daemon_pid"], signal.SIGKILL)
    wait_until(lambda: deployment.status().get("guard", {}).get("daemon_starts") == 2, 30)
    assert deployment.wait_phase("failed")["diagnosis"]["cause"] == "context-exceeds-kv-pool" and starts(deployment) == 1


def test_a_person_starts_it_all_the_same(make: Make) -> None:
    deployment = make(args=("--die-with-line", SIZING)).up()
    deployment.wait_phase("failed")
    deployment.terminate()
    deployment.up()
    deployment.wait_phase("failed")
    assert deployment.run("resume", "w0").returncode == 0
    deployment.wait_phase("failed", generation=2)
    assert starts(deployment) == 2


def test_a_changed_configuration_starts_at_once(make: Make) -> None:
    deployment = make(args=("--die-with-line", SIZING)).up()
    deployment.wait_phase("failed")
    deployment.terminate()
    change(deployment, args=[])
    deployment.up()
    deployment.wait_phase("up", generation=2)


@pytest.mark.parametrize("garbage", [b"", b"{", b"\0" * 512, b'{"w0": {"failures": "many"}}'])
def test_garbage_never_blocks_a_start(make: Make, garbage: bytes) -> None:
    deployment = make()
    deployment.state.mkdir(mode=0o700)
    (deployment.state / "breaker.json").write_bytes(garbage)
    deployment.up().wait_phase("up")
    assert any("breaker.json: not readable" in event["sentence"] for event in deployment.events("daemon"))


def test_what_others_had_taken_is_tried_again_by_the_next_supervisor(make: Make) -> None:
    deployment = make(args=("--die-with-line", TAKEN)).up()
    assert deployment.wait_phase("failed")["diagnosis"]["cause"] == "device-memory-taken"
    deployment.terminate()
    deployment.up()
    deployment.wait_phase("failed", generation=2)
    assert any("failure 1 of at most" in event["sentence"] for event in deployment.events("decision")), "after a pause"


def test_what_was_given_up_stays_given_up(make: Make) -> None:
    deployment = make(args=("--die-with-line", "something went wrong"), settings={"limits": {"restarts": 1}}).up()
    deployment.wait_phase("failed")
    deployment.terminate()
    deployment.up()
    time.sleep(1)
    assert deployment.wait_phase("failed")["generation"] == 0 and starts(deployment) == 2


def test_failures_in_a_row_are_counted_over_the_daemons_death(make: Make) -> None:
    deployment = make(args=("--serve-then-die", "0.2"), settings={"limits": {"restarts": 3, "backoff_first": "1s"}}).up()
    wait_until(lambda: deployment.worker().get("phase") == "backing-off", 30)
    os.kill(deployment.status()["guard"]["daemon_pid"], signal.SIGKILL)
    deployment.wait_phase("failed", timeout=60)
    assert starts(deployment) == 4


@pytest.mark.parametrize(("line", "restarts", "code"), [(SIZING, 5, 78), (TAKEN, 5, 69), ("something went wrong", 0, 75)])
def test_on_failed_exit_ends_with_the_kind(make: Make, line: str, restarts: int, code: int) -> None:
    deployment = make(args=("--die-with-line", line), settings={"on_failed": "exit", "limits": {"restarts": restarts}}).up()
    deployment.wait_phase("failed")
    assert deployment.get("/readyz").status_code == 503
    assert deployment.process is not None and deployment.process.wait(60) == code


def test_on_failed_exit_under_restart_always_starts_the_engine_once(make: Make) -> None:
    deployment = make(args=("--die-with-line", SIZING), settings={"on_failed": "exit"})
    for _ in range(3):
        deployment.up()
        assert deployment.process is not None and deployment.process.wait(60) == 78
    assert starts(deployment) == 1


def test_on_failed_exit_drains_the_others(make: Make) -> None:
    deployment = make(settings={"on_failed": "exit"})
    body = json.loads(deployment.file.read_text())
    body["workers"].append({**body["workers"][0], "name": "w1", "port": free_ports(1)[0],
                            "args": ["--load-seconds", "4", "--die-with-line", SIZING]})
    deployment.file.write_text(json.dumps(body))
    deployment.up()
    deployment.wait_phase("up")
    assert deployment.process is not None and deployment.process.wait(60) == 78
    ends = [event["data"]["to"] for event in deployment.events("phase") if event["worker"] == "w0" and "to" in event["data"]]
    assert ends == ["starting", "up", "stopping", "stopped"]
