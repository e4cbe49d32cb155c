"""A real prefill/decode pair on the CPU: one `tightrank up` with two workers, a gateway over it, and what is asked of them."""
from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from deployment import Deployment
from fleet import GatewayProcess, events
from helpers import wait_until
from raw_engine import CACHE

START_SECONDS = 300        # two engines import at once; 20 s on quiet cores
ROLES = ("prefill", "decode")
COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
# float32: outputs are compared token by token.
ARGUMENTS = {
    "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "49152",
               "--max-running-requests", "8", "--sleep-on-idle"),
    "vllm": ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
}
ENVIRONMENTS = {
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": "1"},
}
# Without CUDA: no early send (it records a CUDA event), retracted KV in plain memory, and TCP.
TRANSFER_ARGUMENTS = {("sglang", "decode"): ("--disaggregation-decode-retraction-backup", "cpu_tensor")}
TRANSFER_ENVIRONMENTS = {
    "sglang": {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0", "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
    "vllm": {"UCX_TLS": "tcp,self"},
}
RANK = {"sglang": "scheduler", "vllm": "worker"}
_BUSY = {"sglang": ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"),
         "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting")}
Json = dict[str, Any]


def low_ports(count: int) -> list[int]:
    """Free ports that no outgoing connection takes while the engine that listens there is dead."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(lowest // 2, lowest)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found


class RealPair:
    """One prefill and one decode worker of `engine`; `start`, and `close` in any case."""

    def __init__(self, engine: str, directory: Path, model: str) -> None:
        self.engine = engine
        self.ports = dict(zip(ROLES, low_ports(2), strict=True))
        transfer = iter(low_ports(2))
        workers: list[Json] = [
            {"name": role, "role": role, "port": self.ports[role],
             "args": [*ARGUMENTS[engine], *TRANSFER_ARGUMENTS.get((engine, role), ())],
             "env": {**ENVIRONMENTS[engine], **TRANSFER_ENVIRONMENTS[engine]}} for role in ROLES]
        for worker in workers:
            if (engine, worker["role"]) != ("sglang", "decode"):
                worker["transfer_port"] = next(transfer)
        head, *rest = COMMANDS[engine]
        self.deployment = Deployment(
            directory, engine=engine, model=Path(model), command=[str(CACHE / "envs" / engine / head), *rest],
            settings={"workers": workers, "line": {"budget": 1_500_000}, "hooks": ["ranks", "line", "empty-cache"],
                      "empty_cache": {"when": "every-chunk"}, "limits": {"drain": "10s", "hang": "0s"},
                      **({"pd": {"transfer": "mooncake_tcp"}} if engine == "sglang" else {})})
        self.gateway = GatewayProcess(directory, supervisors=[f"http://127.0.0.1:{self.deployment.port}"])
        self.client = httpx2.Client(timeout=120, trust_env=False)

    def start(self) -> RealPair:
        self.deployment.up()
        self.gateway.start(ready=False)
        for role in ROLES:
            self.wait_up(role, 1)
        wait_until(self.ready, 60, f"the gateway; {self.gateway.status()}")
        return self

    def ready(self) -> bool:
        return self.gateway.answers("/readyz")

    def worker(self, role: str) -> Json:
        """The worker's status; {} while the supervisor does not answer."""
        try:
            workers = self.client.get(f"http://127.0.0.1:{self.deployment.port}/status").json().get("workers", ())
        except httpx2.TransportError:
            return {}
        return next((dict(worker) for worker in workers if worker["name"] == role), {})

    def wait_up(self, role: str, generation: int) -> Json:
        def there() -> Json | None:
            worker = self.worker(role)
            assert worker.get("phase") != "failed", f"{worker['diagnosis']}\n{self.deployment.output[-6000:]}"
            right = worker and (worker["phase"], worker["generation"]) == ("up", generation)
            time.sleep(0.1)                # the processors are the engines'
            return worker if right else None
        return wait_until(there, START_SECONDS, f"{role} up in generation {generation}")

    def signal(self, role: str, number: int) -> None:
        """To the process that computes."""
        os.kill(next(rank["id"]["pid"] for rank in self.worker(role)["ranks"] if rank["role"] == RANK[self.engine]), number)

    def up_unix(self, role: str) -> float:
        """When it last came up."""
        return max(float(event["unix"]) for event in self.deployment.events("phase")
                   if event["worker"] == role and event["data"].get("to") == "up")

    def steps(self, role: str, since: int = 0) -> list[Json]:
        return [dict(step) for step in self.deployment.get(f"/steps?worker={role}&since={since}").json()["steps"]]

    def ask(self, role: str, path: str, body: Any = None) -> httpx2.Response:
        """Straight at one engine, past the gateway."""
        return self.client.request("GET" if body is None else "POST", f"http://127.0.0.1:{self.ports[role]}{path}", json=body)

    def idle(self) -> bool:
        """Whether no request is left at either engine, as they say."""
        return not any(self.busy(role) for role in ROLES)

    def busy(self, role: str) -> Json:
        if self.engine == "sglang":
            [load] = self.ask(role, "/v1/loads").json()["loads"]
            queues = {name: count for name, count in load["disaggregation"].items() if name.endswith("_reqs") and count}
            return queues | {name: load[name] for name in _BUSY["sglang"] if load[name]}
        lines = [line.partition("{") for line in self.ask(role, "/metrics").text.splitlines()]
        return {name: rest for name, _, rest in lines if name in _BUSY["vllm"] and not rest.endswith(" 0.0")}

    def close(self) -> None:
        for role in ROLES:
            worker = self.worker(role)
            for rank in worker.get("ranks", ()):
                try:
                    os.kill(rank["id"]["pid"], 18)     # SIGCONT: a test that failed may have left one stopped
                except ProcessLookupError:
                    pass
        self.gateway.close()
        self.deployment.close()
        self.client.close()


@dataclass(frozen=True)
class Question:
    """A request, and the text that a single worker answers."""
    path: str
    body: Json
    expected: str = ""


def questions(engine: str) -> Iterator[Question]:
    """One of each kind and length: token IDs and texts, from one token to several chunks of the line."""
    sampling = {"temperature": 0, "ignore_eos": True, "model": "tiny"}
    for salt, length in enumerate((1, 2, 63, 64, 65, 127, 128, 129, 300, 700, 1025, 2500)):
        ids = [3 + salt, *((place * 7 + salt * 13) % 250 + 3 for place in range(1, length))]
        yield Question("/v1/completions", {"prompt": ids, "max_tokens": 3 + salt, **sampling})
        text = "".join(chr(97 + (place * salt + place // 7) % 26) for place in range(length))
        messages = [{"role": "user", "content": text}]
        yield Question("/v1/chat/completions", {"messages": messages, "max_tokens": 16 - salt, **sampling})
        yield Question("/v1/responses", {"input": text[::-1], "max_output_tokens": 4 + salt, "temperature": 0, "model": "tiny"})
        if engine == "sglang":
            yield Question("/generate", {"input_ids": ids[::-1], "sampling_params": {
                "max_new_tokens": 4 + salt, "temperature": 0, "ignore_eos": True}})


def text_of(answer: Json) -> str:
    """The text of a whole answer or of one event."""
    if "type" in answer:                   # an event of /v1/responses
        return str(answer["delta"]) if answer["type"] == "response.output_text.delta" else ""
    if "output" in answer:                 # a whole one: none when the model ended at once
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if "text" in answer:
        return str(answer["text"])
    return "".join(str(part.get("text") or (part.get("message") or part.get("delta") or {}).get("content") or "")
                   for part in answer["choices"])


@dataclass(frozen=True)
class Outcome:
    """What a client got. `text` None: an error, which `error` tells. Times are of CLOCK_MONOTONIC and unix."""
    question: Question
    streamed: bool
    began: float
    seconds: float
    unix: float
    status: int
    text: str | None
    error: str = ""

    @property
    def right(self) -> bool:
        return self.text == self.question.expected


def send(client: httpx2.Client, question: Question, streamed: bool) -> Outcome:
    """One request through the gateway. Raises httpx2.TransportError for a connection that ends without an answer."""
    began = time.monotonic()
    status, text, error = _streamed(client, question) if streamed else _whole(client, question)
    return Outcome(question, streamed, began, time.monotonic() - began, time.time(), status, text, error)


def _whole(client: httpx2.Client, question: Question) -> tuple[int, str | None, str]:
    response = client.post(question.path, json=question.body)
    if response.status_code != 200:
        return response.status_code, None, response.text
    return 200, text_of(response.json()), ""


def _streamed(client: httpx2.Client, question: Question) -> tuple[int, str | None, str]:
    parts: list[Json] = []
    with client.stream("POST", question.path, json={**question.body, "stream": True}) as response:
        if response.status_code != 200:
            return response.status_code, None, response.read().decode()
        last = ""
        for _, last in events(response):
            parts += [json.loads(last)] if last != "[DONE]" else []
    if last != "[DONE]" and parts[-1].get("type") not in ("response.completed", "response.incomplete"):
        assert "error" in last, f"a stream that was cut in silence: {last[:300]}"
        return 200, None, last
    if question.path == "/generate":       # each event has all of the text so far
        return 200, text_of(parts[-1]), ""
    return 200, "".join(map(text_of, parts)), ""
