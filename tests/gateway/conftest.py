"""Fakes and gateways for the tests of this tier. The fleets live for the whole run and are well again before each test."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fleet import FakePeer, Fleet, GatewayProcess, digest
from helpers import wait_until

PATHS = ("/v1/completions", "/v1/chat/completions")


class Stack:
    """A fleet and the gateway over it."""

    def __init__(self, directory: Path, fleet: Fleet, **settings: Any) -> None:
        self.fleet, self.engine = fleet, fleet.engine
        self.gateway = GatewayProcess(directory, [peer.entry() for peer in fleet.peers], **settings)
        self.post, self.status = self.gateway.post, self.gateway.status

    def start(self) -> Stack:
        self.fleet.start()
        self.gateway.start()
        return self

    def standings(self) -> dict[str, str]:
        return {worker["name"]: worker["standing"] for worker in self.status()["workers"]}

    def up(self) -> bool:
        """Whether the gateway holds all workers for up."""
        return all(worker["standing"] == "up" and not worker["legs"] for worker in self.status()["workers"])

    def well(self) -> bool:
        """Whether, besides, a transfer was seen between all pairs."""
        return self.up() and all(pair["paired"] for pair in self.status()["pairs"])

    def trusted(self, role: str) -> FakePeer:
        """A worker of this role that gets requests: one with a pair that was seen to work. A canary takes up to a second."""
        def first() -> str | None:
            return next((pair[role] for pair in self.status()["pairs"] if pair["paired"]), None)
        return self.fleet[str(wait_until(first, 5))]

    def legs(self) -> list[dict[str, Any]]:
        """Those of our requests: what the gateway asks by itself names no user agent."""
        return [event for event in self.fleet.log("start") if event["path"] in PATHS and "user-agent" in event["headers"]]

    def none_runs(self) -> None:
        """No leg is left at an engine: each that has started has ended, or was ended."""
        def over() -> bool:
            ended = {(event["peer"], event["number"]) for event in self.fleet.log("end", "gone")}
            return all((leg["peer"], leg["number"]) in ended for leg in self.legs())
        wait_until(over, 3, f"all legs ended; {self.fleet.log()[-12:]}")

    def right(self, answer: httpx2.Response, prompt: str = "hello") -> bool:
        """Whether this is the whole answer to a completion of 4 tokens, streamed or not."""
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for part in parts for choice in part["choices"])
            return text == digest(prompt) + " 1 2 3" and answer.text.endswith("data: [DONE]\n\n")
        return bool(answer.json()["choices"][0]["text"] == digest(prompt) + " 1 2 3")

    def recover(self) -> None:
        self.fleet.recover()
        wait_until(self.up, 15, f"the gateway holds all for up: {self.status()}")
        for peer in self.fleet.peers:
            peer.reset()                   # what the canaries left in their logs

    def close(self) -> None:
        self.gateway.close()
        self.fleet.close()


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stack]]:
    made: dict[str, Stack] = {}

    def get(kind: str) -> Stack:
        """"sglang" and "vllm": two pairs; "plain": two vLLM workers that serve alone."""
        if kind not in made:
            fleet = Fleet("vllm", 0, 0, alone=2) if kind == "plain" else Fleet(kind)
            made[kind] = Stack(tmp_path_factory.mktemp(kind), fleet)
            made[kind].start()
        return made[kind]

    yield get
    for stack in made.values():
        stack.close()


@pytest.fixture(params=["sglang", "vllm"])
def pairs(request: pytest.FixtureRequest, stacks: Callable[[str], Stack]) -> Stack:
    """Two prefill and two decode workers of each engine."""
    stack = stacks(request.param)
    stack.recover()
    return stack


@pytest.fixture
def plain(stacks: Callable[[str], Stack]) -> Stack:
    """Two workers that serve alone."""
    stack = stacks("plain")
    stack.recover()
    return stack


@pytest.fixture
def sglang(stacks: Callable[[str], Stack]) -> Stack:
    stack = stacks("sglang")
    stack.recover()
    return stack


@pytest.fixture
def vllm(stacks: Callable[[str], Stack]) -> Stack:
    stack = stacks("vllm")
    stack.recover()
    return stack
