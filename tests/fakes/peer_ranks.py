"""The fake P/D engine's processes: their beat pages move only when the engine's own loop turns.

SGLang's scheduler turns all the time. vLLM's core turns while it has requests and is silent when idle; its worker beats
with each step that the core gives it, and the core waits for the worker, so that a worker that is stuck stops both.
"""
import ctypes
import json
import os
import select
import signal

from fake_ranks import LIBC, Rank

TURN_SECONDS, IDLE_SECONDS = 0.01, 0.05


class LoopRank(Rank):
    """A scheduler, a core (`followers`: its workers' sockets) or a worker (`led`: turns only when told)."""

    def __init__(self, options, telemetry, connection, number, followers=(), led=False):
        super().__init__(options, telemetry, connection, number)
        self.followers, self.led, self.in_flight = followers, led, 0
        self.silent_when_idle = options.engine == "vllm"

    def run(self):
        while True:
            pause = None if self.led else TURN_SECONDS if self.in_flight else IDLE_SECONDS
            if message := self.receive(pause):
                self.handle(message)
            elif self.silent_when_idle and not self.in_flight:
                continue
            self.lead(message)
            self.telemetry.turn(self.in_flight)
            if message:
                self.connection.send(b"done")

    def receive(self, seconds):
        if not select.select([self.connection], [], [], seconds)[0]:
            return {}
        data = self.connection.recv(4096)
        if not data:
            os._exit(0)
        return json.loads(data)

    def lead(self, message):
        for follower in self.followers:
            follower.send(json.dumps(message or {"turn": True}).encode())
        for follower in self.followers:
            if not follower.recv(64):
                os._exit(1)

    def handle(self, message):
        self.in_flight = message.get("in_flight", self.in_flight)
        if self.followers:
            return
        if message.get("block"):
            block()
        self.options.step_seconds = message.get("seconds", 0)
        self.work(message)


def block():
    """As a rank in a collective whose peer is gone: no signal but SIGKILL wakes it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    LIBC.syscall(202, ctypes.byref(ctypes.c_int(0)), 128, 0, None, None, 0)  # futex(FUTEX_WAIT_PRIVATE)
