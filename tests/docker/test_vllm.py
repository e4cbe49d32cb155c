"""The same files with vLLM: too long for every run."""
from __future__ import annotations

import docker_daemon
import pytest
from docker_stack import Stack

pytestmark = [pytest.mark.docker, pytest.mark.full, pytest.mark.timeout(3000)]


def test_vllm_alone_and_as_a_pair(stack: Stack) -> None:
    stack.down()
    vllm = Stack(docker_daemon.base_image(), docker_daemon.wheels_image(), "vllm")
    try:
        vllm.compose("up", "-d")
        vllm.wait_healthy("worker", "gateway")
        assert vllm.chat()[0] == 200
        vllm.compose("rm", "-s", "-f", "worker")
        vllm.compose("--profile", "pd", "up", "-d")
        vllm.wait_healthy("prefill", "decode", "gateway")
        status, body = vllm.chat()
        assert status == 200 and body["usage"]["completion_tokens"] == 4, body
        assert [pair["paired"] for pair in vllm.gateway("/status")[1]["pairs"]] == [True]
    finally:
        vllm.down()
