"""The fake engine's processes: their titles, their telemetry through the adapter's wire format, their faults."""
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
import uuid
import zlib
from pathlib import Path

try:
    from tightrank_adapter import line, pages, stacks, wire
except ImportError:
    line = wire = None

LIBC = ctypes.CDLL(None, use_errno=True)


def say(text):
    print(text, file=sys.stderr, flush=True)


def title(text):
    """Sets what ps shows, the way setproctitle does: in place of the argument strings."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[45]), int(stat[46])
    value = text.encode()[:end - start - 1]
    ctypes.memmove(start, value.ljust(end - start, b"\0"), end - start)
    LIBC.prctl(15, value[:15], 0, 0, 0)  # PR_SET_NAME


def die_with(parent):
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def system_v_bytes(prefix):
    """Of the System V segments, which have no name: who looks for them knows them by their size."""
    return 4096 * (1 + zlib.crc32(prefix.encode()) % 4096)


def litter(prefix):
    """Makes and holds what real engines leave behind when they are killed."""
    segment = os.open(f"/dev/shm/{prefix}{os.urandom(4).hex()}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(segment, 1 << 20)
    held = mmap.mmap(segment, 1 << 20)
    held[:4096] = b"\1" * 4096
    os.close(segment)
    LIBC.shmat.restype = ctypes.c_void_p
    LIBC.shmat(LIBC.shmget(0, system_v_bytes(prefix), 0o1600), None, 0)  # IPC_PRIVATE, IPC_CREAT
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")
    return held, listening, tempfile.mkstemp()


class Telemetry:
    """The adapter's part, spoken through its own wire format. Nothing when the adapter is not there."""

    def __init__(self, options):
        self.options = options
        self.directory = os.environ.get("TIGHTRANK_ADAPTER", "")
        self.on = bool(self.directory and wire and not options.no_hello)
        self.settings = wire.read_settings(self.directory) if self.on else None
        self.control = None

    def hello(self, role, rank=None):
        if not self.on:
            return
        wanted = [hook for hook in self.settings.hooks
                  if role in wire.HOOK_ROLES[self.options.engine].get(hook, ())]
        last = rank is None or rank == self.options.children - 1
        hooks = {hook: self._hook(hook, last) for hook in wanted}
        facts = {"line_budget": self.settings.line.get("budget"), "granule_tokens": 64} if "line" in wanted else {}
        if self.options.kv_tokens_file and rank is not None:
            facts = {**facts, "kv_tokens": int(Path(self.options.kv_tokens_file).read_text())}
        self.said = wire.Hello(
            pid=os.getpid(), start_time=wire.start_time(os.getpid()), role=role, engine=self.options.engine,
            engine_version="0.0.0+fake", worker=self.settings.worker, generation=self.settings.generation, rank=rank,
            tp_rank=rank, pp_rank=None if rank is None else 0, dp_rank=None, device=None, hooks=hooks, facts=facts)
        wire.write_hello(self.directory, self.said)
        self.beat = pages.BeatWriter(self.directory)
        self.sender = wire.Sender(self.directory)
        stacks.arm(self.directory)

    def _hook(self, hook, last):
        if hook == self.options.hook_failed and last:
            return {"state": wire.FAILED, "wanted": "Scheduler.target of 0.0.0+fake", "found": "no such attribute"}
        state = wire.OBSERVING if self.settings.observes(hook) else wire.IN_FORCE
        return {"state": state, "wanted": "", "found": ""}

    def fact(self, name, value):
        self.said.facts[name] = value
        wire.write_hello(self.directory, self.said)

    def published_budget(self):
        """What the supervisor's control page says now; None when it says nothing yet."""
        try:
            self.control = self.control or pages.ControlReader(self.directory)
            return self.control.budget()
        except (OSError, wire.WireError):
            return None

    def turn(self, in_flight=0, new=0, prefix=0):
        if self.on:
            self.beat.in_flight = in_flight
            if new:
                self.beat.step_cost = wire.step_cost(new, prefix + new)
            self.beat.beat()
            self.sender.flush()

    def step(self, sequence, rank, prefix, new, budget, milliseconds):
        if not self.on:
            return
        self.beat.steps += 1
        self.beat.prefill_tokens += new
        width = prefix + new
        self.sender.send(wire.Step(
            self.settings.generation, os.getpid(), sequence, rank, time.monotonic_ns(), new, width, budget,
            bool(budget and new * width > budget), milliseconds, None, [[prefix, new]]))


class Rank:
    """One rank process: turns its loop, answers the steps that main sends, and holds what faults it was told to."""

    def __init__(self, options, telemetry, connection, number):
        self.options, self.telemetry, self.connection, self.number = options, telemetry, connection, number
        self.started, self.ready = time.monotonic(), None
        self.ballast = [b"\1" * (options.memory_mib << 20)] if number == 0 else []
        self.grown_mib = 0
        self.litter = litter(options.litter) if options.litter else ()

    def run(self):
        while True:
            readable = select.select([self.connection], [], [], 0.05)[0]
            message = json.loads(self.connection.recv(4096) or "null") if readable else {}
            if message is None:
                os._exit(0)
            if message:  # as the real ones: the loop turns with what it has, then comes the step
                self.telemetry.turn(message.get("in_flight", 0), message.get("new", 0), message.get("prefix", 0))
            self.work(message)
            if message:
                self.connection.send(b"done")
            if message or not self.options.silent_idle:
                self.telemetry.turn(0 if self.options.silent_idle else message.get("in_flight", 0))
            if self.number == 0:
                self.faults()

    def work(self, message):
        if "ready" in message:
            self.ready = time.monotonic()
        if "budget" in message and "new" not in message and self.telemetry.on:
            self.telemetry.fact("line_budget", message["budget"])
        if "new" in message:
            began = time.monotonic()
            time.sleep(self.options.step_seconds)
            if self.number == 0 and 0 < (self.options.stick_at_step or 0) <= message["sequence"]:
                self.stick()
            self.telemetry.step(message["sequence"], self.number, message["prefix"], message["new"], message["budget"],
                                (time.monotonic() - began) * 1000)

    def stick(self):
        """One step that takes `stick_seconds`; the loop does not turn."""
        end, child = time.monotonic() + self.options.stick_seconds, 0
        if self.options.stick_how == "compile":
            child = os.fork()
        while time.monotonic() < end:
            if self.options.stick_how == "sleep" or child:
                time.sleep(0.05)
        if self.options.stick_how == "compile":
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    def faults(self):
        grow = int(self.options.grow_mib_per_second * (time.monotonic() - self.started)) - self.grown_mib
        if grow > 0:
            self.ballast.append(b"\1" * (grow << 20))
            self.grown_mib += grow
        if self.due(self.options.serve_then_die):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due(self.options.block_in_futex):
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            LIBC.syscall(202, ctypes.byref(ctypes.c_int(0)), 128, 0, None, None, 0)  # futex(FUTEX_WAIT_PRIVATE)
        while self.due(self.options.freeze):
            pass

    def due(self, seconds):
        return seconds is not None and self.ready is not None and time.monotonic() - self.ready >= seconds
