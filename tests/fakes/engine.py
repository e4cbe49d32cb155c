"""A fake engine: a program that looks like vLLM or SGLang to a supervisor, and misbehaves on request.

    engine.py --engine vllm|sglang [the real engine's own flags] [faults below]

It has the real processes (main, ranks, detokenizer or engine core, a resource tracker) with the real titles, prints
start lines of the real shape, serves /health, /v1/models, /v1/completions, /generate and /set_internal_state, answers
400 to prompts that are too long, and cuts prompts into chunks by the adapter's own line arithmetic. With
TIGHTRANK_ADAPTER set and the adapter on PYTHONPATH every process says hello, beats and sends step records. Unknown
flags are accepted, as the plan adds those of the real engines. There is no model: (t + 1) % 256 follows token t.

What happens when a rank dies: vLLM's health turns 503 and main exits 0 two seconds later; SGLang's main kills its tree.
"""
import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

from fake_http import Handler
from fake_nodes import Meeting, follow
from fake_ranks import Rank, Telemetry, die_with, line, say, title

START_LINES = {
    "vllm": ("INFO [cpu_model_runner.py:68] Starting to load model {model}...",
             "INFO [default_loader.py:502] Loading weights took 0.10 seconds",
             "INFO [kv_cache_utils.py:2328] GPU KV cache size: 65,536 tokens, 4.00 GiB"),
    "sglang": ("Load weight begin. avail mem=20.00 GB", "Load weight end. elapsed=0.10 s, type=Llama",
               "Memory pool end. avail mem=18.00 GB"),
}
READY_LINE = {"vllm": "INFO:     Application startup complete.", "sglang": "The server is fired up and ready to roll!"}


def parse(argv):
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--served-model-name", default="tiny")
    p.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"))
    p.add_argument("--max-model-len", "--context-length", dest="context", type=int, default=32768)
    p.add_argument("--tensor-parallel-size", "--tp-size", "--tp", "-tp", dest="children", type=int, default=1)
    p.add_argument("--children", type=int, dest="children", help="rank processes; the same as tensor parallel size")
    p.add_argument("--nnodes", type=int, default=1)
    p.add_argument("--node-rank", type=int, default=0)
    p.add_argument("--dist-init-addr", "--master-addr", dest="meeting", default="127.0.0.1:29500", help="ADDRESS[:PORT]")
    p.add_argument("--master-port", type=int, default=29500)
    p.add_argument("--load-seconds", type=float, default=0.2)
    p.add_argument("--step-seconds", type=float, default=0.001, help="what a prefill chunk or a decoded token takes")
    p.add_argument("--memory-mib", type=int, default=0, help="rank 0 holds this much")
    p.add_argument("--grow-mib-per-second", type=float, default=0, help="rank 0 grows, from its start on")
    p.add_argument("--print-lines", metavar="FILE", help="print these lines to stderr")
    p.add_argument("--at-second", type=float, default=0, help="when to print them, after the start")
    p.add_argument("--die-with-line", metavar="TEXT", help="fail the start: print TEXT after the load seconds and exit")
    p.add_argument("--exit-code", type=int, default=1)
    p.add_argument("--exit-after", type=float, metavar="S", help="main exits S seconds after its start")
    p.add_argument("--serve-then-die", type=float, metavar="S", help="rank 0 is killed S seconds after ready")
    p.add_argument("--ignore-sigterm", action="store_true")
    p.add_argument("--kv-tokens-file", metavar="FILE", help="the ranks' KV cache holds as many tokens as FILE says")
    p.add_argument("--no-hello", action="store_true", help="no telemetry, as if the adapter had not been loaded")
    p.add_argument("--hook-failed", metavar="NAME", help="this hook is not in force on the last rank")
    p.add_argument("--freeze", type=float, nargs="?", const=0.0, metavar="S", help="rank 0 spins S seconds after ready")
    p.add_argument("--block-in-futex", type=float, nargs="?", const=0.0, metavar="S", help="rank 0 blocks, signals off")
    p.add_argument("--stick-at-step", type=int, metavar="N", help="from its Nth prefill step on rank 0 does not end one")
    p.add_argument("--stick-how", choices=("sleep", "spin", "compile"), default="sleep", help="compile: a child computes")
    p.add_argument("--stick-seconds", type=float, metavar="S", default=86400.0, help="how long each of them takes")
    p.add_argument("--silent-idle", action="store_true", help="a rank without work does not beat, as vLLM's engine core")
    p.add_argument("--mute", type=float, nargs="?", const=0.0, metavar="S", help="HTTP accepts and never answers")
    p.add_argument("--orphan", action="store_true", help="leave a process that outlives its parent and ignores SIGTERM")
    p.add_argument("--litter", nargs="?", const="psm_", metavar="PREFIX", help="ranks hold what is left by a SIGKILL: shared "
                   "memory (PREFIX and 8 digits; System V), sockets and files in TMPDIR")
    p.add_argument("--hold-port", action="store_true", help="the orphan keeps the port")
    return p.parse_known_args(argv)[0]


class Engine:
    """Main: starts the processes, schedules chunks, knows whether all are alive."""

    def __init__(self, options):
        self.options, self.telemetry = options, Telemetry(options)
        self.local = options.children // options.nnodes
        self.meeting = None            # of the hosts, on node 0
        self.lock, self.ranks, self.essential = threading.Lock(), [], set()
        self.ready = self.dead = self.leaving = False
        self.sequence = self.in_flight = 0
        self.cached = []
        self.telemetry.hello("main")
        settings = self.telemetry.settings
        self.line = dict(settings.line) if settings and "line" in settings.hooks else {}
        self.budget = self.line.pop("budget", 0)
        self.keywords = {key: self.line[key] for key in ("minimum", "maximum", "granule", "rule", "step")
                         if key in self.line}

    def spawn(self, name, role, number=None, body=None, essential=True):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.child(parent, name, role, number, body)
        if essential:
            self.essential.add(pid)
        return pid

    def child(self, parent, name, role, number, body):
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.options.ignore_sigterm or not role else signal.SIG_DFL)
        title(name)
        telemetry = Telemetry(self.options)
        if telemetry.on and role:
            die_with(parent)
            telemetry.hello(role, number)
        if body is not None:
            self.rank(telemetry, role, body, number or 0).run()
        while role or os.getppid() == parent:  # the tracker ends with main, as the real one does
            time.sleep(0.05)
            if role:
                telemetry.turn()
        os._exit(0)

    def rank(self, telemetry, role, body, number):
        return Rank(self.options, telemetry, body, number)

    def start(self):
        vllm, many = self.options.engine == "vllm", self.options.children > 1
        self.spawn("resource_tracker", None, essential=False)
        if self.options.node_rank == 0:
            self.spawn("VLLM::EngineCore" if vllm else "sglang::detokenizer", "engine-core" if vllm else "detokenizer")
        for number in range(self.options.node_rank * self.local, (self.options.node_rank + 1) * self.local):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            suffix = f"_TP{number}" if many else ""
            name = ("VLLM::Worker" if vllm else "sglang::scheduler") + suffix
            self.ranks.append(ours)
            self.spawn(name, "worker" if vllm else "scheduler", number, theirs)
            theirs.close()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            pid, _ = os.waitpid(-1, 0)
            if pid in self.essential and not self.leaving:
                break
        self.dead = True
        say(f"ERROR: process {pid} died unexpectedly")
        if self.options.engine == "vllm":
            time.sleep(2)
        self.leave(0 if self.options.engine == "vllm" else None)

    def leave(self, code):
        """Ends all processes; `code` None is SGLang's way, SIGKILL for main too."""
        self.leaving = True
        for pid in self.essential:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)

    def tell(self, **message):
        """Gives every rank the message and waits until all have done it. Raises OSError when one is gone."""
        with self.lock:
            for connection in self.ranks:
                connection.send(json.dumps(message).encode())
            for connection in self.ranks:
                if not connection.recv(64):
                    raise OSError("a rank is gone")
            if self.meeting is not None:
                self.meeting.tell(message)

    def chunk(self, prefix, rest):
        if not self.keywords:
            return min(rest, 2048)
        if self.options.engine == "vllm":
            self.budget = self.telemetry.published_budget() or self.budget
        return min(rest, line.chunk_tokens(self.budget, prefix, **self.keywords) or self.keywords["minimum"])

    def generate(self, tokens, new_tokens):
        """The answer's tokens and how many of the prompt's were cached."""
        self.in_flight += 1
        try:
            cached = prefix = min(self.shared(tokens), len(tokens) - 1) // 64 * 64
            while prefix < len(tokens):
                new = self.chunk(prefix, len(tokens) - prefix)
                self.sequence += 1
                self.tell(sequence=self.sequence, prefix=prefix, new=new, budget=self.budget, in_flight=self.in_flight)
                prefix += new
            self.cached = tokens
            for _ in range(new_tokens - 1):
                self.tell(in_flight=self.in_flight)
            return [(tokens[-1] + 1 + i) % 256 for i in range(new_tokens)], cached
        finally:
            self.in_flight -= 1

    def shared(self, tokens):
        pairs = zip(tokens, self.cached, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(self.cached)))


def serve(engine):
    options = engine.options
    handler = type("BoundHandler", (Handler,), {"engine": engine})
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((options.host, options.port), handler)
    if options.orphan or options.hold_port:
        leave_orphan(server if options.hold_port else None)
    engine.tell(ready=True)
    engine.ready = time.monotonic()
    say(READY_LINE[options.engine])
    server.serve_forever(poll_interval=0.05)


def leave_orphan(server):
    if os.fork():
        return
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    title("orphan")
    if server is None:
        os.closerange(3, 256)
    while True:
        time.sleep(3600)


def end(engine):
    """SIGTERM: work in flight is finished, then all go."""
    engine.ready = False

    def drain():
        while engine.in_flight:
            time.sleep(0.02)
        engine.leave(0)
    threading.Thread(target=drain).start()


def main():
    options = parse(sys.argv[1:])
    engine = Engine(options)
    engine.start()
    handler = signal.SIG_IGN if options.ignore_sigterm else lambda *_: end(engine)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    if options.exit_after is not None:
        threading.Timer(options.exit_after, engine.leave, (options.exit_code,)).start()
    if options.print_lines:
        threading.Timer(options.at_second, lambda: say(Path(options.print_lines).read_text().rstrip("\n"))).start()
    for text in START_LINES[options.engine]:
        say(text.format(model="tiny"))
        time.sleep(options.load_seconds / 3)
    if options.die_with_line:
        say(options.die_with_line)
        engine.leave(options.exit_code)
    address, _, port = options.meeting.partition(":")
    if options.node_rank:
        follow(address, int(port or options.master_port), engine.tell)
    if options.nnodes > 1:
        engine.meeting = Meeting(address, int(port or options.master_port), options.nnodes)
    serve(engine)


if __name__ == "__main__":
    main()
