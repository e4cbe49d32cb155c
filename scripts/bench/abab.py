"""Tokens per second of a real engine on the CPU with the adapter's hooks and without, by turns. Used by scripts/bench/adapter.

One server has all hooks that apply. Between two turns of the same requests they are taken out of its processes or put back
(toggle/sitecustomize.py), A-B-B-A, so that a drift hits both alike; each pair of turns gives a ratio. Two servers side by
side tell nothing: two vLLMs without the adapter differed by up to 4 % (six starts: 0.96, 0.97, 1.04, 0.96, 0.99, 0.97).
Pairs of two turns without the hooks, among the others, show the noise that is left. What each turn was is proved by the
records that came: none without the hooks.
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
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[2]
INJECT, STUBS = ROOT / "adapter" / "inject", ROOT / "scripts" / "cpu" / "stubs"
TOGGLE = ROOT / "scripts" / "bench" / "toggle"
sys.path.insert(0, str(INJECT))
from tightrank_adapter import pages, wire  # noqa: E402

CACHE = Path(os.environ.get("TIGHTRANK_CACHE")
             or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightrank")
READY_SECONDS, CLIENTS, PROMPT, ANSWER = 240, 4, 1500, 48
# The tiny model's two layers take 4 ms for a step, less than any model that is served for money; with these a decode step
# takes as long as that of a large one on a fast device.
OVERRIDE = json.dumps({"num_hidden_layers": 12})
LINE = {"budget": 1 << 40, "minimum": 64, "maximum": 512, "granule": 64, "rule": "span", "step": "granule"}   # does not bind
HOOKS = {"ranks": {}, "line": LINE, "headroom": {"fraction": 0.01, "ranks": 1},
         "empty-cache": {"when": "pressure", "mark_bytes": 0}}
STEPPING = ("scheduler", "engine-core", "worker")     # the processes whose loops the hooks are in
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1"}}


def command(engine, port):
    programs, model = CACHE / "envs" / engine / "bin", str(CACHE / "models" / "dense")
    if engine == "vllm":
        return [str(programs / "vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port),
                "--served-model-name", "tiny", "--max-model-len", "8192", "--max-num-batched-tokens", "512",
                "--enable-chunked-prefill", "--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching",
                "--load-format", "dummy", "--hf-overrides", OVERRIDE]
    return [str(programs / "python"), "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1",
            "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "32768",
            "--max-running-requests", "8", "--chunked-prefill-size", "512", "--sleep-on-idle", "--disable-radix-cache",
            "--load-format", "dummy", "--json-model-override-args", OVERRIDE]


class Server:
    """One engine with the adapter, whose hooks can be taken out and put back."""

    def __init__(self, engine, directory):
        self.engine, self.directory, self.records, self.hooked = engine, Path(directory), 0, True
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        path = [str(INJECT), str(TOGGLE), *([str(STUBS)] if engine == "sglang" else [])]
        self.toggles = Path(f"{directory}.toggle")
        self.toggles.mkdir()
        self.listen()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **ENVIRONMENTS[engine],
               "PYTHONPATH": os.pathsep.join(path), wire.ENV_ADAPTER: str(self.directory), "BENCH_TOGGLE": str(self.toggles)}
        with open(str(directory) + ".log", "wb") as log:
            self.process = subprocess.Popen(command(engine, self.port), env=env, stdout=log, stderr=log, start_new_session=True)

    def listen(self):
        """Its run directory, as the supervisor makes one. Records are thrown away."""
        self.directory.mkdir(mode=0o700)
        wire.write_settings(str(self.directory), wire.Settings("bench", 1, self.engine, HOOKS))
        self.control = pages.ControlWriter(str(self.directory))
        self.control.publish(LINE["budget"])
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        descriptor = os.open(self.directory, os.O_PATH)
        self.socket.bind(wire.socket_address(str(self.directory), descriptor))
        os.close(descriptor)
        threading.Thread(target=self.drain, daemon=True).start()

    def drain(self):
        """As the daemon does: a socket that nobody reads is full after ten records."""
        while True:
            self.socket.recv(65536)
            self.records += 1

    def hook(self, wanted):
        """Puts the hooks in or takes them out; returns once every process has said so."""
        if wanted != self.hooked:
            files = [self.toggles / str(hello.pid) for hello in self.hellos() if hello.role in STEPPING]
            for path in files:
                os.kill(int(path.name), signal.SIGUSR2 if wanted else signal.SIGUSR1)
            deadline = time.monotonic() + 10
            while {path.read_text() for path in files} != {"on" if wanted else "off"}:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"hooks: wanted {wanted}, found { {path.name: path.read_text() for path in files} }")
                time.sleep(0.01)
            self.hooked = wanted

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

    def turn(self, requests, hooked=True):
        """Tokens per second, prompts and answers, over `requests` requests of CLIENTS clients."""
        self.hook(hooked)
        before = self.records

        def client(first):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            for number in range(first, requests, CLIENTS):
                self.ask(connection, number)
            connection.close()
        started = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        seconds = time.perf_counter() - started
        time.sleep(0.05)                     # for the last record
        if (self.records > before) != hooked:
            raise RuntimeError(f"hooks {hooked}: {self.records - before} records came")
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

    def hellos(self):
        return [wire.read_json(str(path), wire.Hello) for path in self.directory.glob("hello-*.json")]

    def in_force(self):
        """Every hook that some process holds; raises where one is not in force."""
        states = [(hook, state["state"]) for hello in self.hellos() for hook, state in hello.hooks.items()]
        if {hook for hook, state in states if state == wire.IN_FORCE} != set(HOOKS):
            raise RuntimeError(f"not all hooks are in force: {states}")

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


ROUNDS = ((True, False), (False, True), (False, False))      # with and without, by turns; without and without, for the noise


def rounds(engine, turns, requests):
    """{"adapter": [with / without], "noise": [without / without], "with": [...], "without": [...]} of one started server."""
    folder = tempfile.mkdtemp(prefix="tightrank-bench-")
    server = Server(engine, f"{folder}/run")
    found = {"adapter": [], "noise": [], "with": [], "without": []}
    try:
        server.ready()
        server.turn(2 * CLIENTS)
        server.in_force()
        for number in range(turns):
            kinds = ROUNDS[number % len(ROUNDS)]
            first, second = (server.turn(requests, hooked) for hooked in kinds)
            for hooked, rate in zip(kinds, (first, second), strict=True):
                found["with" if hooked else "without"].append(rate)
            found["adapter" if any(kinds) else "noise"].append(second / first if kinds[1] else first / second)
        return found
    finally:
        server.stop()
        shutil.rmtree(folder)


def ratio(runs):
    """The mean over the starts of the median of each, and its 95 % interval: bootstrap over starts and rounds."""
    rng = random.Random(1)
    drawn = sorted(mean(median(rng.choices(run, k=len(run))) for run in rng.choices(runs, k=len(runs))) for _ in range(4000))
    return {"ratio": mean(map(median, runs)), "low": drawn[100], "high": drawn[-101], "starts": list(map(median, runs))}


def compare(engine, starts, turns, requests):
    """Medians in tokens per second; the ratio of the hooks to none; the ratio of none to none."""
    runs = [rounds(engine, turns, requests) for _ in range(starts)]
    return {**{name: median(rate for run in runs for rate in run[name]) for name in ("with", "without")},
            **{name: ratio([run[name] for run in runs]) for name in ("adapter", "noise")}}
