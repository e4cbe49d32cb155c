"""Real engines on this machine's CPU under `tightrank up`, followed on the terminal. For scripts/demo; no packages needed."""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("TIGHTRANK_CACHE")
             or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightrank")
TIGHTRANK = ROOT / ".venv" / "bin" / "tightrank"
START, START_LIMIT_SECONDS = time.monotonic(), 180
COMMANDS = {"vllm": ["bin/vllm", "serve"], "sglang": ["bin/python", "-m", "sglang.launch_server"]}
ENVIRONMENTS = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
}
ARGUMENTS = {
    "vllm": ["--enforce-eager", "--max-num-seqs", "8"],
    "sglang": ["--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "16384",
               "--max-running-requests", "8", "--sleep-on-idle"],
}


def say(text=""):
    print(f"{time.monotonic() - START:6.1f} s  {text}" if text else "", flush=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def call(port, path, body=None, timeout=600):
    """The JSON answer of a local server; raises OSError when there is none, ValueError for a refusal."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{path}: HTTP {error.code}: {error.read()[:500].decode(errors='replace')}") from None


class Deployment:
    """One `tightrank up` in a directory of its own. `workers` and `more` are those parts of its tightrank.yaml."""

    def __init__(self, engine, model, workers, **more):
        self.directory = Path(tempfile.mkdtemp(prefix="tightrank-demo-"))
        self.file, self.log = self.directory / "tightrank.yaml", self.directory / "up.log"
        self.port = free_port()
        first, *rest = COMMANDS[engine]
        config = {  # JSON is YAML too
            "name": "demo", "engine": engine, "model": str((CACHE / "models" / model).resolve()), "served_model": "tiny",
            "command": [str(CACHE / "envs" / engine / first), *rest],
            "state_directory": str(self.directory / "state"), "http": {"port": self.port}, "workers": workers, **more}
        self.file.write_text(json.dumps(config, indent=1) + "\n")
        self.processes, self.shown = [], set()

    def command(self, *words):
        return subprocess.run([TIGHTRANK, *words, "-c", self.file], text=True, capture_output=True, check=False)

    def spawn(self, *words):
        say(f"tightrank {' '.join(words)} -c {self.file}")
        with open(self.log, "a") as log:
            self.processes.append(subprocess.Popen([TIGHTRANK, *words, "-c", self.file], stdout=log, stderr=log,
                                                   start_new_session=True))

    def start(self):
        """Starts it and follows it until all workers are ready."""
        self.spawn("up")
        self.until_ready()

    def until_ready(self):
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while not self.follow():
            if self.processes[0].poll() is not None:
                self.fail(f"tightrank up ended with {self.processes[0].returncode}")
            if "the daemon ended with" in self.log.read_text():
                self.fail("the daemon ended by itself")
            if time.monotonic() > deadline:
                self.fail(f"not ready after {START_LIMIT_SECONDS} s")
            time.sleep(0.2)

    def status(self):
        """Of the workers; [] while the supervisor does not answer."""
        try:
            return call(self.port, "/status", timeout=10)["workers"]
        except (OSError, ValueError, KeyError):
            return []

    def follow(self):
        """Prints what is new in the workers' status; True when all are ready."""
        workers = self.status()
        for worker in workers:
            before = f"{worker['name']}: " if len(workers) > 1 else ""
            for text in (before + line for line in news(worker)):
                if text not in self.shown:
                    say(text)
                self.shown.add(text)
            if worker["phase"] == "failed":
                self.fail(worker["reason"])
        return bool(workers) and all(worker["ready"] for worker in workers)

    def stop(self):
        """Ends all, the last one first."""
        say(f"tightrank stop -c {self.file}")
        for process in self.processes[:0:-1]:
            process.terminate()
        done = self.command("stop")
        codes = [process.wait(timeout=60) for process in self.processes]
        if done.returncode or any(codes):
            self.fail(f"the stop was not clean: tightrank stop {done.returncode}, exit codes {codes}\n{done.stderr}")
        shutil.rmtree(self.directory)

    def fail(self, why):
        tail = "".join(self.log.read_text().splitlines(keepends=True)[-25:])
        sys.exit(f"{tail}\ndemo: {why}\ndemo: all files are in {self.directory}")

    def end(self):
        """Whatever happened: nothing is left running."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    process.wait(timeout=30)


def news(worker):
    """Lines about a worker: its phase, and each process of it that said hello."""
    yield " ".join(filter(None, (worker["phase"], worker["step"], f"(generation {worker['generation']})")))
    for rank in worker["ranks"]:
        hooks = ", ".join(f"{name} {state['state']}" for name, state in rank["hooks"].items())
        number = "" if rank["rank"] is None else f" {rank['rank']}"
        yield f"hello from {rank['role']}{number}, pid {rank['id']['pid']}" + (f": {hooks}" if hooks else "")
