"""The root of the process tree: keeps the memory floor, starts the daemon, reaps. Run: python -I -S -B guard FILE

Standard library only, nothing of ours, one thread, one loop. FILE is guard.json, with these keys and no others:
    schema 1, daemon_argv [str], run_directory str, floor_bytes int, priority int, lock_descriptor int|null
`priority` staggers guards that share a host: the floor is floor_bytes + priority * 64 MiB, so the highest acts first.

Available = min(MemAvailable, limit - (current - inactive_file) of our cgroup and its ancestors, v1 or v2). When it is
under the floor on two reads in a row, every descendant but the daemon gets SIGKILL. Then guard.jsonl gets one line:
    unix, monotonic_ns, available_bytes, lowest_available_bytes, floor_bytes, reaction_us (first read under the floor to
    last SIGKILL sent), killed [{pid, start_time, name, rss_bytes}], hog {pid, start_time, name, rss_bytes,
    growth_bytes, inside} or null: what grew most on this host since the last census that is a second old (at most 11).
    With nothing to kill there is one line for each crossing, with killed [] and reaction_us null.

guard.page, 4096 bytes, "<QQ13Q": sequence (odd while written), schema 1, pid, start_time, monotonic_ns of the last
sample, samples, available_bytes, lowest_available_bytes, floor_bytes (with priority), stops, last_stop_monotonic_ns,
daemon_pid, daemon_starts, locked (1: all memory, 0: a part or none), daemon_beat_age_ns. 2**64-1 = unknown.
daemon.beat, 4096 bytes, "<QQQ": sequence, schema 1, monotonic_ns: written by the daemon; only its age is told.

The daemon gets SIGUSR2 when the guard dies. Its exit codes 0, 69, 75 and 78 end the guard with the same code; after
any other end the engines are killed and it is started again. Exit 78: bad guard.json; 70: no floor can be kept here.
"""
from __future__ import annotations

import json
import os
import signal
import sys
import time

from common import CONFIG, MIB, SOFTWARE, TEMPORARY, UNKNOWN, refuse, say
from daemon import Daemon, Wake, ended_children
from memory import Available
from orders import Orders, read_orders
from page import Page
from processes import Process, Tree
from protect import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, libc, lock_memory, raise_priority, set_oom_score_adj

FAR_SECONDS, NEAR_SECONDS = 0.1, 0.01
# MAP_POPULATE filled 2.1 GiB/s on each of two cores (4 KiB pages): what that fills in one far interval is near,
NEAR_BYTES = min(2048, 256 * (os.cpu_count() or 1)) * MIB
NEAR_SLOPE_SECONDS = 1.0  # and so is a floor that the present slope reaches within this time.
END_SECONDS = 10.0        # second SIGTERM to SIGKILL, and how long the dying are waited for


class Guard:
    """The loop: signals, the daemon, the floor, the page. A turn waits for the next signal or sample only."""

    def __init__(self, orders: Orders) -> None:
        self.floor = orders.floor_bytes + orders.priority * 64 * MIB
        self.directory = orders.run_directory
        self.pid, self.daemon, self.available = os.getpid(), Daemon(orders.daemon_argv), Available()
        try:
            self.page, self.beat = page(f"{self.directory}/guard.page"), page(f"{self.directory}/daemon.beat")
        except OSError as error:
            raise refuse(f"{self.directory}: cannot hold guard.page and daemon.beat: {error}", CONFIG) from None
        self.wake = Wake()
        self.locked = False
        self.signals = self.sequence = self.samples = self.stops = self.last_stop_ns = self.last_kill_ns = 0
        self.deadline = float("inf")
        self.now_ns, self.bytes, self.lowest, self.near, self.under = 0, self.available.read(), UNKNOWN, False, False
        self.killed: set[tuple[int, int]] = set()
        self.everyone = list(walk())
        self.start_time = next(each.start_time for each in self.everyone if each.pid == self.pid)
        self.known: list[Process] = []
        self.older = self.latest = {each.identity: each.rss_bytes for each in self.everyone}
        self.counted, self.census = time.monotonic(), self.take_census()

    def run(self) -> int:
        """Until the tree is to end; the exit code. `end` has to follow."""
        seconds = 0.0
        while True:
            code = self.obey(self.wake.wait(seconds))
            if code is not None:
                return code
            seconds = self.keep_floor()
            self.publish()
            next(self.census)

    def obey(self, signals: bytes) -> int | None:
        """Signals to the daemon; its end, and its start when it is due. The exit code when the guard has to end."""
        for number in signals:
            if number != signal.SIGCHLD:
                self.forward(number)
        for pid, status in (ended_children() or ()) if signals else ():
            if pid == self.daemon.pid:
                code = self.daemon.ended(status)
                if code is not None:
                    return code
                self.kill_tree()
        if (self.signals and not self.daemon.pid) or time.monotonic() > self.deadline:
            return TEMPORARY
        if not self.daemon.pid:
            self.beat[:24] = bytes(24)
            self.daemon.start_when_due()
        return None

    def forward(self, number: int) -> None:
        self.signals += 1
        say(f"{signal.Signals(number).name}: " + ("the daemon drains" if self.signals == 1 else "ending now"))
        if self.signals == 2:
            self.deadline = time.monotonic() + END_SECONDS
        if self.daemon.pid:  # not reaped yet, so this pid is still its own
            os.kill(self.daemon.pid, number)

    def end(self) -> None:
        """SIGKILL to all, the daemon too. We are the subreaper: when no child is left, no descendant is."""
        self.daemon.pid = 0
        deadline = time.monotonic() + END_SECONDS
        while ended_children() is not None:
            self.kill_tree()
            if time.monotonic() > deadline:
                return say("left behind, SIGKILL does not end them: " + ", ".join(
                    f"{each.name} ({each.pid})" for each in descendants(self.everyone, self.pid) if each.alive))
            self.wake.wait(0.02)

    def sample(self) -> None:
        self.now_ns, self.bytes = time.monotonic_ns(), self.available.read()
        self.samples += 1
        self.lowest = self.lowest if self.bytes is None else min(self.lowest, self.bytes)

    def keep_floor(self) -> float:
        """One sample, and what follows from it. Seconds until the next."""
        before_ns, before = self.now_ns, self.bytes
        self.sample()
        if self.bytes is None:
            return FAR_SECONDS
        margin = self.bytes - self.floor
        if margin < 0:
            return self.stop()
        self.under = False
        fall = ((before or 0) - self.bytes) * 1e9 / max(1, self.now_ns - before_ns)  # bytes per second
        self.near = margin < NEAR_BYTES or margin < fall * NEAR_SLOPE_SECONDS
        return NEAR_SECONDS if self.near else FAR_SECONDS

    def stop(self) -> float:
        """Under the floor: look again, then kill. While it stays there, only what is new is killed (and told)."""
        first_ns = self.now_ns
        self.sample()
        if self.bytes is None or self.bytes >= self.floor:
            return NEAR_SECONDS
        available, killed = self.bytes, self.kill_tree()
        if killed:
            self.stops, self.last_stop_ns = self.stops + 1, time.monotonic_ns()
        if killed or not self.under:
            self.sample()
            self.tell(killed, available, (self.last_kill_ns - first_ns) // 1000 if killed else None)
        self.under = self.near = True
        return NEAR_SECONDS if killed else FAR_SECONDS

    def kill_tree(self) -> list[Process]:
        """SIGKILL to every descendant but the daemon; those that had not had it yet, as they were just before."""
        killed = self.kill(self.known)  # of the last census: no walk of a big /proc before the first signal
        for _ in range(KILL_ROUNDS):
            self.everyone = list(walk())
            more = self.kill(descendants(self.everyone, self.pid))
            killed += more
            if not more:
                break
        return killed

    def kill(self, targets: list[Process]) -> list[Process]:
        killed = []
        for target in sorted(targets, key=lambda each: -each.rss_bytes):
            if target.alive and target.pid != self.daemon.pid and target.identity not in self.killed:
                victim = kill(target)
                if victim:
                    self.last_kill_ns = time.monotonic_ns()
                    self.killed.add(victim.identity)
                    killed.append(victim)
        return killed

    def tell(self, killed: list[Process], available: int, reaction_us: int | None) -> None:
        """The stop on stderr and in guard.jsonl, which may fail: the killing is done."""
        inside = {each.identity for each in (*killed, *descendants(self.everyone, self.pid))}
        everyone = {each.identity: each for each in (*self.everyone, *killed)}  # killed: with what they held before
        young = time.monotonic() - self.counted < CENSUS_NEAR_SECONDS  # it may have counted the hog half grown
        found = fastest_growing(everyone.values(), self.older if young else self.latest)
        hog = found and {**found[0].record(), "growth_bytes": found[1], "inside": found[0].identity in inside}
        say(f"available {available // MIB} MiB is under the floor of {self.floor // MIB} MiB: killed {len(killed)} "
            f"processes in {reaction_us} us; grew most: "
            + (f"{hog['name']} ({hog['pid']}), +{hog['growth_bytes'] // MIB} MiB" if hog else "nothing"))
        record = {"unix": time.time(), "monotonic_ns": time.monotonic_ns(), "available_bytes": available,
                  "lowest_available_bytes": self.lowest, "floor_bytes": self.floor, "reaction_us": reaction_us,
                  "killed": [each.record() for each in killed], "hog": hog}
        try:
            append(f"{self.directory}/guard.jsonl", json.dumps(record).encode() + b"\n")
        except OSError as error:
            say(f"{self.directory}/guard.jsonl: not written: {error}")

    def take_census(self) -> Iterator[None]:
        """Who is there and what they hold, a slice at each turn: who to kill first, and who has grown since."""
        while True:
            while time.monotonic() - self.counted < (CENSUS_NEAR_SECONDS if self.near else CENSUS_FAR_SECONDS):
                yield
            everyone = []
            for each in walk():
                everyone.append(each)
                if len(everyone) % CENSUS_SLICE == 0:
                    yield
            self.known = descendants(everyone, self.pid)
            self.older, self.latest = self.latest, {each.identity: each.rss_bytes for each in everyone}
            self.killed &= self.latest.keys()
            self.counted = time.monotonic()

    def publish(self) -> None:
        sequence, schema, beat_ns = BEAT.unpack_from(self.beat)
        beat_age_ns = max(0, self.now_ns - beat_ns) if sequence and schema == 1 else UNKNOWN
        values = (self.pid, self.start_time, self.now_ns, self.samples, UNKNOWN if self.bytes is None else self.bytes,
                  self.lowest, self.floor, self.stops, self.last_stop_ns or UNKNOWN, self.daemon.pid or UNKNOWN,
                  self.daemon.starts, self.locked, beat_age_ns)
        self.sequence += 2
        PAGE.pack_into(self.page, 0, self.sequence - 1, 1, *values)
        PAGE.pack_into(self.page, 0, self.sequence, 1, *values)

    def prepare(self) -> None:
        """Protects this process and says its limits. Raises SystemExit(70) where descendants could not be killed."""
        try:
            os.close(os.pidfd_open(self.pid))
        except OSError as error:
            raise refuse(f"pidfd_open: {error} (wanted: Linux 5.3, a seccomp profile with it)", SOFTWARE) from None
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_NAME, b"tightrank-guard", 0, 0, 0)
        self.locked = lock_memory()
        say(f"{raise_priority()}, {set_oom_score_adj(-900)}")
        say(f"floor {self.floor // MIB} MiB: under it every process that the daemon started is killed; available "
            f"{(self.bytes or 0) // MIB} MiB, the least of {self.available.names()}")


def append(path: str, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError("written in part, the disk is full")
    finally:
        os.close(descriptor)


def main() -> int:
    if len(sys.argv) != 2:
        raise refuse("usage: python -I -S -B guard.py <path of guard.json>", CONFIG)
    orders = read_orders(sys.argv[1])
    if orders.lock_descriptor is not None:
        os.set_inheritable(orders.lock_descriptor, False)  # held by the guard alone, for its whole life
    guard = Guard(orders)
    guard.prepare()
    try:
        return guard.run()
    finally:
        guard.end()


if __name__ == "__main__":
    sys.exit(main())
