"""Tokens per second of a real engine on the CPU with the adapter and without, by turns. Used by scripts/bench/adapter.

Three servers of one engine run side by side, one of them with all hooks that apply. The same requests go to one after the
other, in every order by turns, so that a drift hits all alike; each round gives a ratio. Processes that do the same differ by
a percent or two in where their memory lies (measured here: the third server is a second one without the adapter, and its ratio
to the first is the noise of the measure), so all are started anew several times.
"""
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[2]
INJECT, STUBS = ROOT / "adapter" / "inject", ROOT / "scripts" / "cpu" / "stubs"
sys.path.insert(0, str(INJECT))
from tightrank_adapter import pages, wire  # noqa: E402

CACHE = Path(os.environ.get("TIGHTRANK_CACHE")
             or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightrank")
READY_SECONDS, CLIENTS, PROMPT, ANSWER = 240, 4, 1500, 48
LINE = {"budget": 1 << 40, "minimum": 64, "maximum": 512, "granule": 64, "rule": "span", "step": "granule"}   # does not bind
HOOKS = {"ranks": {}, "line": LINE, "headroom": {"fraction": 0.01, "ranks": 1},
         "empty-cache": {"when": "pressure", "mark_bytes": 0}}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1"}}


def command(engine, port):
    programs, model = CACHE / "envs" / engine / "bin", str(CACHE / "models" / "dense")
    if engine == "vllm":
        return [str(programs / "vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port),
                "--served-model-name", "tiny", "--max-model-len", "8192", "--max-num-batched-tokens", "512",
                "--enable-chunked-prefill", "--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching"]
    return [str(programs / "python"), "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1",
            "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "32768",
            "--max-running-requests", "8", "--chunked-prefill-size", "512", "--sleep-on-idle", "--disable-radix-cache"]


class Server:
    """One engine, with the adapter or without."""

    def __init__(self, engine, directory, adapted):
        self.engine, self.directory, self.adapted = engine, Path(directory), adapted
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        path = [str(STUBS)] if engine == "sglang" else []
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", wire.ENV_ADAPTER)}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **ENVIRONMENTS[engine]}
        if adapted:
            self.listen()
            path.insert(0, str(INJECT))
            env[wire.ENV_ADAPTER] = str(self.directory)
        env["PYTHONPATH"] = os.pathsep.join(path)
        with open(str(directory) + ".log", "wb") as log:
            self.process = subprocess.Popen(command(engine, self.port), env=env, stdout=log, stderr=log, start_new_session=True)

    def listen(self):
        """Its run directory, as the supervisor makes one. Records are thrown away."""
        self.directory.mkdir(mode=0o700)
        wire.write_settings(str(self.directory), wire.Settings("bench", 1, self.engine, HOOKS))
        self.control = pages.ControlWriter(str(self.directory))
        self.control.publish(LINE["budget"])
        self.records = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        descriptor = os.open(self.directory, os.O_PATH)
        self.records.bind(wire.socket_address(str(self.directory), descriptor))
        os.close(descriptor)
        threading.Thread(target=self.drain, daemon=True).start()

    def drain(self):
        """As the daemon does: a socket that nobody reads is full after ten records."""
        while True:
            self.records.recv(65536)

    def ask(self, connection, number):
        ids = [(place * 7 + number * 13) % 250 + 3 for place in range(PROMPT)]
        if self.engine == "vllm":
            path, body = "/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": ANSWER, "temperature": 0,
                                             "ignore_eos": True}
        else:
            path, body = "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0,
                                                                             "ignore_eos": True}}
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:300]!r}")

    def turn(self, requests):
        """Tokens per second, prompts and answers, over `requests` requests of CLIENTS clients."""
        def client(first):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            for number in range(first, requests, CLIENTS):
                self.ask(connection, number)
            connection.close()
        started = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        seconds = time.perf_counter() - started
        return requests * (PROMPT + ANSWER) / seconds

    def ready(self):
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"{self.engine} did not start: see {self.directory}.log")

    def in_force(self):
        """Every hook that some process holds; raises where one is not in force."""
        hellos = [wire.read_json(str(path), wire.Hello) for path in self.directory.glob("hello-*.json")]
        states = [(hook, state["state"]) for hello in hellos for hook, state in hello.hooks.items()]
        if {hook for hook, state in states if state == wire.IN_FORCE} != set(HOOKS):
            raise RuntimeError(f"not all hooks are in force: {states}")

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


NAMES = ("with", "without", "again")     # the hooks; none; none once more, for the noise


def rounds(engine, turns, requests):
    """[{name: tokens per second}], of `turns` rounds over three freshly started servers."""
    folder = tempfile.mkdtemp(prefix="tightrank-bench-")
    servers = {name: Server(engine, f"{folder}/{name}", name == "with") for name in NAMES}
    try:
        for server in servers.values():
            server.ready()
            server.turn(2 * CLIENTS)
        servers["with"].in_force()
        orders = list(permutations(NAMES))
        return [{name: servers[name].turn(requests) for name in orders[number % len(orders)]} for number in range(turns)]
    finally:
        for server in servers.values():
            server.stop()
        shutil.rmtree(folder)


def ratio(runs, of):
    """The mean over the starts of the median over the rounds of of(round), and its 95 % interval: bootstrap over both."""
    ratios = [[of(rates) for rates in run] for run in runs]
    rng = random.Random(1)
    drawn = sorted(mean(median(rng.choices(run, k=len(run))) for run in rng.choices(ratios, k=len(ratios)))
                   for _ in range(4000))
    return {"ratio": mean(median(run) for run in ratios), "low": drawn[100], "high": drawn[-101],
            "starts": [median(run) for run in ratios]}


def compare(engine, starts, turns, requests):
    """Medians in tokens per second; the ratio of the hooks to none; the ratio of none to none."""
    runs = [rounds(engine, turns, requests) for _ in range(starts)]
    return {**{name: median(rates[name] for run in runs for rates in run) for name in NAMES},
            "adapter": ratio(runs, lambda rates: 2 * rates["with"] / (rates["without"] + rates["again"])),
            "noise": ratio(runs, lambda rates: rates["again"] / rates["without"])}
