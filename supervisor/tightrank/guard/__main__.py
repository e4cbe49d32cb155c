"""The root of the process tree: keeps the memory floor, starts the daemon, reaps. Run: python -I -S -B guard FILE

Standard library and this directory only (it is sys.path[0], so no file may have a standard module's name), one thread,
one loop. FILE is guard.json, with these keys and no others:
    schema 1, daemon_argv [str], run_directory str, floor_bytes int, priority int, lock_descriptor int|null, dry_run bool
`priority` staggers guards that share a host: the floor is floor_bytes + priority * 64 MiB, so the highest acts first.

Available = min(MemAvailable, limit - (current - inactive_file) of our cgroup and its ancestors, v1 or v2). When it is
under the floor on two reads in a row, every descendant but the daemon gets SIGKILL. Then guard.jsonl gets one line:
    unix, monotonic_ns, available_bytes, lowest_available_bytes, floor_bytes, reaction_us (first read under the floor to
    last SIGKILL sent), killed [{pid, start_time, name, rss_bytes}], hog {pid, start_time, name, rss_bytes,
    growth_bytes, inside} or null: what grew most on this host since the last census that is a second old (at most 11).
    With nothing to kill there is one line for each crossing, with killed [] and reaction_us null. So there is in a dry run, at
    most one a minute: nothing is killed, so memory may stay about the floor (the daemon's own end still ends its engines).

guard.page, 4096 bytes, "<QQ14Q": sequence (odd while written), schema 1, pid, start_time, monotonic_ns of the last
sample, samples, available_bytes, lowest_available_bytes, floor_bytes (with priority), stops, last_stop_monotonic_ns,
daemon_pid, daemon_starts, locked (1: all memory, 0: a part or none), daemon_beat_age_ns, dry_stops. 2**64-1 = unknown.
daemon.beat, 4096 bytes, "<QQQ": sequence, schema 1, monotonic_ns: written by the daemon; only its age is told.

The daemon gets SIGUSR2 when the guard dies. Its exit codes 0, 69, 75 and 78 end the guard with the same code; after
any other end the engines are killed and it is started again. Exit 78: bad guard.json; 70: no floor can be kept
here, or a fault of the guard itself.
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
CORES = os.cpu_count() or 1
# MAP_POPULATE filled 2.1 GiB/s on each of two cores (4 KiB pages): what that fills in one far interval is near,
NEAR_BYTES = min(2048, 256 * CORES) * MIB
# and a floor that is 2 s of such filling away can be looked at less often: a turn costs 0.3 to 0.7 ms when caches are cold.
CALM_SECONDS, CALM_BYTES = 0.5, 2 * 2150 * CORES * MIB
NEAR_SLOPE_SECONDS = 1.0  # and so is a floor that the present slope reaches within this time.
DRY_NS = 60 * 10**9       # between two lines of a dry run
END_SECONDS = 10.0        # second SIGTERM to SIGKILL, and how long the dying are waited for


class Guard:
    """The loop: signals, the daemon, the floor, the page. A turn waits for the next signal or sample only."""

    def __init__(self, orders: Orders) -> None:
        self.floor = orders.floor_bytes + orders.priority * 64 * MIB
        self.directory, self.dry_run = orders.run_directory, orders.dry_run
        self.pid, self.daemon, self.available = os.getpid(), Daemon(orders.daemon_argv), Available()
        try:
            self.page, self.beat = Page(f"{self.directory}/guard.page", 14), Page(f"{self.directory}/daemon.beat", 1)
        except OSError as error:
            raise refuse(f"{self.directory}: cannot hold guard.page and daemon.beat: {error}", CONFIG) from None
        self.wake, self.tree = Wake(), Tree(self.pid)
        self.start_time = next(each.start_time for each in self.tree.everyone if each.pid == self.pid)
        self.locked = False
        self.signals = self.samples = self.stops = self.dry_stops = self.last_stop_ns = self.last_dry_ns = 0
        self.deadline, self.beat_ns = float("inf"), UNKNOWN
        self.now_ns, self.bytes, self.lowest, self.near, self.under = 0, self.available.read(), UNKNOWN, False, False

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
        does = "would be killed, if this was no dry run" if self.dry_run else "is killed"
        say(f"floor {self.floor // MIB} MiB: under it every process that the daemon started {does}; available "
            f"{(self.bytes or 0) // MIB} MiB, the least of {self.available.names()}")

    def run(self) -> int:
        """Until the tree is to end; the exit code. `end` has to follow."""
        seconds = 0.0
        while True:
            code = self.obey(self.wake.wait(seconds))
            if code is not None:
                return code
            seconds = self.keep_floor()
            self.publish()
            self.tree.count(self.near)

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
                self.tree.kill(spared=0)
        if (self.signals and not self.daemon.pid) or time.monotonic() > self.deadline:
            return TEMPORARY
        if not self.daemon.pid:
            self.beat.clear()
            self.beat_ns = UNKNOWN
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
        deadline = time.monotonic() + END_SECONDS
        while ended_children() is not None:
            self.tree.kill(spared=0)
            if time.monotonic() > deadline:
                return say("left behind, SIGKILL does not end them: "
                           + ", ".join(f"{each.name} ({each.pid})" for each in self.tree.living()))
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
        if self.near:
            return NEAR_SECONDS
        return CALM_SECONDS if margin > CALM_BYTES and self.daemon.pid else FAR_SECONDS

    def stop(self) -> float:
        """Under the floor: look again, then kill. While it stays there, only what is new is killed (and told)."""
        first_ns = self.now_ns
        self.sample()
        if self.bytes is None or self.bytes >= self.floor:
            return NEAR_SECONDS
        available, killed = self.bytes, [] if self.dry_run else self.tree.kill(spared=self.daemon.pid)
        if killed:
            self.stops, self.last_stop_ns = self.stops + 1, time.monotonic_ns()
        quiet = self.under or (self.last_dry_ns and first_ns - self.last_dry_ns < DRY_NS)
        if killed or not quiet:
            if self.dry_run:
                self.dry_stops, self.last_dry_ns = self.dry_stops + 1, first_ns
            self.sample()
            self.tell(killed, available, (self.tree.last_kill_ns - first_ns) // 1000 if killed else None)
        self.under = self.near = True
        return NEAR_SECONDS if killed else FAR_SECONDS

    def tell(self, killed: list[Process], available: int, reaction_us: int | None) -> None:
        """The stop on stderr and in guard.jsonl, which may fail: the killing is done."""
        hog = self.tree.hog(killed)
        did = "a dry run: killed nothing" if self.dry_run else f"killed {len(killed)} processes in {reaction_us} us"
        say(f"available {available // MIB} MiB is under the floor of {self.floor // MIB} MiB: {did}; grew most: "
            + (f"{hog['name']} ({hog['pid']}), +{hog['growth_bytes'] // MIB} MiB" if hog else "nothing"))
        record = {"unix": time.time(), "monotonic_ns": time.monotonic_ns(), "available_bytes": available,
                  "lowest_available_bytes": self.lowest, "floor_bytes": self.floor, "reaction_us": reaction_us,
                  "killed": [each.record() for each in killed], "hog": hog, "dry_run": self.dry_run}
        try:
            append(f"{self.directory}/guard.jsonl", json.dumps(record).encode() + b"\n")
        except OSError as error:
            say(f"{self.directory}/guard.jsonl: not written: {error}")

    def publish(self) -> None:
        beat = self.beat.read()
        if beat:  # else the last one counts: a daemon that hangs in the middle of a beat grows old too
            self.beat_ns = beat[0]
        beat_age_ns = UNKNOWN if self.beat_ns == UNKNOWN else max(0, self.now_ns - self.beat_ns)
        self.page.write(
            self.pid, self.start_time, self.now_ns, self.samples, UNKNOWN if self.bytes is None else self.bytes,
            self.lowest, self.floor, self.stops, self.last_stop_ns or UNKNOWN, self.daemon.pid or UNKNOWN,
            self.daemon.starts, self.locked, beat_age_ns, self.dry_stops)


def append(path: str, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError("written in part, the disk is full")
    finally:
        os.close(descriptor)


def keep(path: str) -> int:
    """The guard's whole life, under the orders at `path`; the exit code. Whatever happens, it ends the tree."""
    orders = read_orders(path)
    if orders.lock_descriptor is not None:
        os.set_inheritable(orders.lock_descriptor, False)  # held by the guard alone, for its whole life
    guard = Guard(orders)
    guard.prepare()
    try:
        return guard.run()
    finally:
        guard.end()


def main() -> int:
    if len(sys.argv) != 2:
        raise refuse("usage: python -I -S -B guard <path of guard.json>", CONFIG)
    try:
        return keep(sys.argv[1])
    except Exception as error:  # noqa: BLE001 - whatever it is, the tree has been ended and the reason is said
        import traceback  # 0.4 MiB that only a fault needs
        say(f"ends by a fault of its own, {type(error).__name__}: {error}\n{traceback.format_exc(limit=-20).rstrip()}")
        return SOFTWARE


if __name__ == "__main__":
    sys.exit(main())
