"""compose.yaml with the CPU override, as a person uses it: real containers, a real engine, a real pair. In this order."""
from __future__ import annotations

import json
import time
from pathlib import Path

import docker_daemon
import pytest
from docker_stack import Stack

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
CALM_SECONDS = 20         # a restart by Docker comes within 0.1 s, one by the supervisor within 1 s
# Fills memory until the kernel has killed something in this container. Pages of a memfd are nobody's resident memory, so the
# kernel does not take the one that fills them for what it should kill.
HOG = """
import os, time
version_1 = "/sys/fs/cgroup/memory/memory.oom_control"
path = version_1 if os.path.exists(version_1) else "/sys/fs/cgroup/memory.events"
kills = lambda: next(int(line.split()[1]) for line in open(path) if line.startswith("oom_kill "))
before, held = kills(), os.memfd_create("hog")
while kills() == before:
    os.write(held, b"x" * (16 << 20))
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def up(stack: Stack) -> Stack:
    """Healthy, with what comes up when nothing is said."""
    stack.compose("up", "-d")
    stack.wait_healthy("worker", "gateway")
    assert stack.running() == {"worker", "gateway"}
    return stack


def test_it_becomes_healthy_and_answers_a_chat(up: Stack) -> None:
    status, body = up.chat()
    assert status == 200 and body["usage"]["completion_tokens"] == 4, body
    assert up.gateway("/readyz")[1]["ready"]
    missing = [each["url"] for each in up.gateway("/status")[1]["supervisors"] if not each["heard"]]
    assert missing == ["http://prefill:9470", "http://decode:9470"]     # shown, and in nobody's way


@pytest.mark.parametrize("service", ["worker", "gateway"])
def test_a_container_has_no_more_than_it_needs(up: Stack, service: str) -> None:
    found = up.inspect(service)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and "no-new-privileges:true" in host["SecurityOpt"]
    assert not host["CapAdd"] and not host["Privileged"]
    assert up.run_in(service, "id", "-u").strip() == "10001"
    refused = up.run_in(service, "touch", "/opt/tightrank/x", "/etc/x", ok=False)
    assert refused.count("Read-only file system") == 2
    effective = up.run_in(service, "grep", "CapEff", "/proc/self/status").split()[1]
    assert int(effective, 16) == 0


def test_all_is_below_the_guard_and_the_engine_is_as_it_was(up: Stack) -> None:
    guard, = up.run_in("worker", "cat", "/proc/1/task/1/children").split()
    assert "tightrank/guard" in up.run_in("worker", "cat", f"/proc/{guard}/cmdline").replace("\0", " ")
    seen = up.run_in("worker", "python3", "-c", "import os, sglang, importlib.util as u; "
                     "print(u.find_spec('tightrank'), u.find_spec('tightrank_adapter'), os.environ.get('PYTHONPATH'))")
    assert seen.split() == ["None", "None", "None"]
    hooks = {rank["role"]: rank["hooks"] for rank in up.supervisor("worker", "/status")["workers"][0]["ranks"]}
    assert hooks["scheduler"]["line"]["state"] == "in-force", hooks


@pytest.mark.parametrize(("service", "port"), [("worker", "9470"), ("gateway", "8000")])
def test_a_health_check_costs_little(up: Stack, service: str, port: str) -> None:
    """By the kernel's account of the child. The parent imports nothing: what it holds counts until the child's exec."""
    argv = up.inspect(service)["Config"]["Healthcheck"]["Test"][1:]
    assert argv[-1] == port
    code = ("import posix, sys\n"
            "child = posix.fork() or posix.execv(sys.argv[1], sys.argv[1:])\n"
            "_, status, used = posix.wait4(child, 0)\n"
            "print(status, used.ru_utime + used.ru_stime, used.ru_maxrss)")
    measured = [up.run_in(service, argv[0], "-I", "-S", "-B", "-c", code, *argv).splitlines()[-1].split() for _ in range(3)]
    assert {status for status, _, _ in measured} == {"0"}
    assert min(float(seconds) for _, seconds, _ in measured) <= 0.040
    assert max(int(kib) for _, _, kib in measured) <= 15 * 1024


def test_stop_lets_a_request_in_flight_end(up: Stack) -> None:
    response = up.send("POST", "/v1/completions", {"model": "model", "prompt": "once", "max_tokens": 400, "stream": True,
                                                   "ignore_eos": True, "stream_options": {"include_usage": True}})
    assert response.status == 200 and response.readline().startswith(b"data: ")
    began = time.monotonic()
    up.compose("stop")
    events = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]", events[-1]
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 400
    assert time.monotonic() - began < 60              # well within stop_grace_period, after which Docker kills
    for service in ("worker", "gateway"):
        state = up.state(service)
        assert not state["Running"] and state["ExitCode"] == 0 and not state["OOMKilled"], state


@pytest.mark.parametrize("service", ["worker", "gateway"])
def test_a_stop_right_after_the_start_is_not_lost(stack: Stack, service: str) -> None:
    container = stack.inspect(service)["Id"]
    docker_daemon.run("docker", "start", container)
    docker_daemon.run("docker", "stop", container)
    assert stack.state(service)["ExitCode"] == 128 + 15      # 137: Docker has waited for stop_grace_period, in vain


def test_a_kill_by_the_kernel_is_told_at_the_gateway(stack: Stack) -> None:
    stack.compose("up", "-d", more=(HERE / "oom.yaml",))
    stack.wait_healthy("worker", "gateway")
    stack.run_in("worker", "/opt/tightrank/bin/python", "-c", HOG)
    worker = stack.wait_cause("killed-by-oom")
    assert worker["phase"] != "up" and "killed-by-oom" in stack.gateway("/readyz")[1]["reason"]
    status, body = stack.chat()
    assert status == 503 and "killed-by-oom" in json.dumps(body), body
    assert stack.inspect("worker")["RestartCount"] == 0 and stack.state("worker")["Running"]


def test_a_start_that_cannot_work_is_tried_once(stack: Stack) -> None:
    stack.compose("rm", "-s", "-f", "-v", "worker")
    docker_daemon.run("docker", "volume", "rm", "--force", f"{stack.environment['COMPOSE_PROJECT_NAME']}_worker")
    stack.compose("up", "-d", more=(HERE / "sizing.yaml",))
    assert stack.inspect("worker")["HostConfig"]["RestartPolicy"]["Name"] == "always"
    worker = stack.wait_cause("kv-pool-too-small")
    assert "--mem-fraction-static" in str(worker["change"])
    time.sleep(CALM_SECONDS)
    assert stack.inspect("worker")["RestartCount"] == 0 and stack.state("worker")["Running"]
    seen = stack.supervisor("worker", "/status")["workers"][0]
    assert (seen["phase"], seen["generation"]) == ("failed", 1)
    status, body = stack.chat()
    assert status == 503 and "kv-pool-too-small" in json.dumps(body), body
    for _ in range(2):                     # as a host's reboot or a nervous operator does; it is the same start again
        docker_daemon.run("docker", "restart", stack.inspect("worker")["Id"])
        time.sleep(CALM_SECONDS / 4)
        assert stack.wait_cause("kv-pool-too-small")["phase"] == "failed"
    time.sleep(CALM_SECONDS)
    seen = stack.supervisor("worker", "/events?limit=2048")["events"]
    assert sum(event["kind"] == "phase" and event["data"].get("to") == "starting" for event in seen) == 1
    assert sum("daemon started" in event["sentence"] for event in seen) == 3


@pytest.mark.full
def test_the_profile_pd_answers_through_a_real_pair(stack: Stack) -> None:
    stack.compose("rm", "-s", "-f", "worker")
    stack.compose("--profile", "pd", "up", "-d")
    stack.wait_healthy("prefill", "decode", "gateway")
    assert stack.running() == {"prefill", "decode", "gateway"}      # the flag takes the place of the profile in .env
    with stack.send("POST", "/v1/completions", {"model": "model", "prompt": "once upon a time", "max_tokens": 8,
                                                "ignore_eos": True}) as response:
        body = json.loads(response.read())
        assert response.status == 200 and body["usage"]["completion_tokens"] == 8, body
        assert response.headers["X-Tightrank-Worker"].split(",") == ["prefill@prefill:9470", "decode@decode:9470"]
    assert [pair["paired"] for pair in stack.gateway("/status")[1]["pairs"]] == [True]
