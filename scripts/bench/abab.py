"""Tokens per second of a real engine on the CPU with the adapter's hooks and without, by turns. Used by scripts/bench/adapter.

One server has all hooks that apply. They are there in some windows of time and not in the others (toggle/sitecustomize.py).
Two servers side by side tell nothing: two vLLMs without the adapter differed by up to 4 % (six starts: 0.96, 0.97, 1.04, 0.96,
0.99, 0.97). Nor do long turns: on two virtual cores one step differs from the next by 10 %, and a turn of 2 s from the next by
as much, so windows are short and many. All steps of a kind are alike: a prompt of one whole chunk, which is a step with a
record; and four streams that decode.

A pair of neighbours with and without gives a ratio of speeds, a pair of the same kind the noise. `mix`: a batch of BATCH
prompts of PROMPT tokens with answers of ANSWER, by the times of both kinds of steps.
"""
import bisect
import contextlib
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
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
INJECT, STUBS = ROOT / "adapter" / "inject", ROOT / "scripts" / "cpu" / "stubs"
TOGGLE = ROOT / "scripts" / "bench" / "toggle"
sys.path.insert(0, str(INJECT))
from tightrank_adapter import pages, wire  # noqa: E402

toggle = SourceFileLoader("toggle", str(TOGGLE / "sitecustomize.py")).load_module()
WINDOW_NS = toggle.WINDOW_NS

CACHE = Path(os.environ.get("TIGHTRANK_CACHE")
             or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightrank")
READY_SECONDS = 240
BATCH, PROMPT, ANSWER = 4, 1500, 48
STREAM_TOKENS = 400
CLIENTS = {"vllm": 2, "sglang": 1}
# SGLang's kernels here take 300 ms for 512 rows: a window would hold one step, and a share of 0.1 ms of it could not be seen.
CHUNK = {"vllm": 512, "sglang": 128}
# The tiny model's two layers take 4 ms for a step, less than any model that is served for money; with these a decode step
# takes as long as that of a large one on a fast device.
OVERRIDE = json.dumps({"num_hidden_layers": 24})
LINE = {"budget": 1 << 40, "minimum": 64, "maximum": 512, "granule": 64, "rule": "span", "step": "granule"}   # does not bind
HOOKS = {"ranks": {}, "line": LINE, "headroom": {"fraction": 0.01, "ranks": 1},
         "empty-cache": {"when": "pressure", "mark_bytes": 0}}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1"}}


def command(engine, port):
    programs, model = CACHE / "envs" / engine / "bin", str(CACHE / "models" / "dense")
    if engine == "vllm":
        return [str(programs / "vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(port),
                "--served-model-name", "tiny", "--max-model-len", "8192", "--max-num-batched-tokens", str(CHUNK[engine]),
                "--enable-chunked-prefill", "--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching",
                "--load-format", "dummy", "--hf-overrides", OVERRIDE]
    return [str(programs / "python"), "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1",
            "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "32768",
            "--max-running-requests", "8", "--chunked-prefill-size", str(CHUNK[engine]), "--sleep-on-idle",
            "--disable-radix-cache", "--load-format", "dummy", "--json-model-override-args", OVERRIDE]


class Server:
    """One engine with the adapter, whose hooks can be taken out and put back."""

    def __init__(self, engine, directory):
        self.engine, self.directory, self.records = engine, Path(directory), []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        path = [str(INJECT), str(TOGGLE), *([str(STUBS)] if engine == "sglang" else [])]
        self.listen()
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **ENVIRONMENTS[engine],
               "PYTHONPATH": os.pathsep.join(path), wire.ENV_ADAPTER: str(self.directory),
               "BENCH_TOGGLE": str(self.directory) + ".begun"}
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
            self.records.append(self.socket.recv(65536))

    def kept_to_its_windows(self):
        """Raises where records tell of a step in a window without hooks, or too few of steps in those with them."""
        steps = [record for record in map(wire.decode, self.records) if isinstance(record, wire.Step)]
        wrong = [step for step in steps if not toggle.hooked(step.monotonic_ns - int(step.milliseconds * 1e6))]
        if len(steps) < 20 or len(wrong) > len(steps) / 20:
            raise RuntimeError(f"{len(steps)} records, {len(wrong)} of them from windows without hooks")

    def ask(self, connection, prompts, tokens, stream=False):
        """One HTTP request: prompts of one batch arrive together."""
        if self.engine == "vllm":
            path, body = "/v1/completions", {"model": "tiny", "prompt": prompts, "max_tokens": tokens, "temperature": 0,
                                             "ignore_eos": True, "stream": stream}
        else:
            path, body = "/generate", {"input_ids": prompts, "stream": stream, "sampling_params": {
                "max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.read()[:300]!r}")
        return answer

    def connect(self):
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300))

    def prefills(self, seconds):
        """[(window, seconds of a step)]: prompts of one chunk, each a step of its own.

        With vLLM one always waits; of two that wait SGLang may take both in one step, so there they come one after the other.
        """
        times, end = [], time.monotonic() + seconds

        def client(number):
            with self.connect() as connection:
                while time.monotonic() < end:
                    self.ask(connection, [prompt(CHUNK[self.engine], number)], 1).read()
                    times.append(time.monotonic_ns())
        with ThreadPoolExecutor(CLIENTS[self.engine]) as pool:
            list(pool.map(client, range(CLIENTS[self.engine])))
        return windows([sorted(times)])

    def decodes(self, seconds):
        """[(window, seconds of a step)] while BATCH streams decode. A window that a new stream interrupts is left out."""
        streams = []
        self.stream(time.monotonic() + seconds, streams)
        return windows(streams)

    def stream(self, end, streams):
        """Adds a list of the times at which the first of BATCH answers got a token, for each request until `end`."""
        with self.connect() as connection:
            while time.monotonic() < end:
                streams.append([])
                answer = self.ask(connection, [prompt(64, each) for each in range(BATCH)], STREAM_TOKENS, stream=True)
                while line := answer.readline():
                    if b'"index":0' in line or b'"index": 0' in line:
                        streams[-1].append(time.monotonic_ns())

    def begin(self):
        """From here on the hooks come and go."""
        self.in_force()
        Path(f"{self.directory}.begun").touch()
        self.records.clear()

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


def prompt(tokens, number):
    return [(place * 7 + number * 13) % 250 + 3 for place in range(tokens)]


def step_seconds(times, begun, ended):
    """Of the steps between two times; None where there are too few."""
    first, last = bisect.bisect_left(times, begun), bisect.bisect_right(times, ended)
    return (times[last - 1] - times[first]) / (last - 1 - first) / 1e9 if last - first > 1 else None


def windows(streams):
    """[(window, seconds of a step)] of lists of times, for all windows that lie in one list."""
    return [(window, step) for times in streams if times for window in range(times[0] // WINDOW_NS + 1, times[-1] // WINDOW_NS)
            if (step := step_seconds(times, window * WINDOW_NS, (window + 1) * WINDOW_NS)) is not None]


def pairs(steps):
    """{"adapter": [(seconds with, without)], "noise": [(seconds of two alike)]} of neighbouring windows."""
    found = {"adapter": [], "noise": []}
    for (window, one), (following, two) in pairwise(steps):
        if following == window + 1:
            first, second = (toggle.hooked(each * WINDOW_NS) for each in (window, following))
            found["adapter" if first != second else "noise"].append((one, two) if first else (two, one))
    return found


def measured(engine, seconds):
    """{"prefill": [(window, seconds of a step)], "decode": ...} of one started server."""
    folder = tempfile.mkdtemp(prefix="tightrank-bench-")
    server = Server(engine, f"{folder}/run")
    try:
        server.ready()
        server.prefills(5)
        server.decodes(5)
        server.begin()
        found = {"prefill": server.prefills(seconds), "decode": server.decodes(seconds)}
        server.kept_to_its_windows()
        return found
    finally:
        server.stop()
        shutil.rmtree(folder)


def speed(rows):
    """With over without: the median over pairs, which a step that the host took away does not move."""
    return median(without / with_ for with_, without in rows)


def mix(chunks, prefill, decode):
    """Tokens per second with over those without, of the whole batch: its steps' times are weighed by how many it takes.

    A batch takes `chunks` steps of prompts, and ANSWER of decoding.
    """
    def seconds(column):
        return chunks * median(row[column] for row in prefill) + ANSWER * median(row[column] for row in decode)
    parts = chunks * median(row[1] for row in prefill), ANSWER * median(row[1] for row in decode)
    return sum(parts) / (parts[0] / speed(prefill) + parts[1] / speed(decode)), BATCH * (PROMPT + ANSWER) / seconds(1)


def interval(draw, *samples):
    """What `draw` makes of the samples, and its 95 % interval: bootstrap over pairs."""
    rng = random.Random(1)
    drawn = sorted(draw(*(rng.choices(rows, k=len(rows)) for rows in samples)) for _ in range(2000))
    return {"ratio": draw(*samples), "low": drawn[50], "high": drawn[-51]}


def compare(engine, seconds):
    """Ratios of the hooks to none, and of none to none, of each kind of step and of the mix; medians of a step in seconds."""
    found = measured(engine, seconds)
    rows = {kind: pairs(blocks) for kind, blocks in found.items()}
    chunks = BATCH * PROMPT / CHUNK[engine]
    figures = {"tokens_per_second": mix(chunks, *(rows[kind]["adapter"] for kind in ("prefill", "decode")))[1]}
    for which in ("noise", "adapter"):
        samples = [rows[kind][which] for kind in ("prefill", "decode")]
        figures[which] = {"pairs": sum(map(len, samples)), "prefill": interval(speed, samples[0]),
                          "decode": interval(speed, samples[1]),
                          "mix": interval(lambda *drawn: mix(chunks, *drawn)[0], *samples)}
    return figures
