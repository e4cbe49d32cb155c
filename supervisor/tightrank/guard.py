"""The root of the process tree: keeps the memory floor, starts the daemon, reaps. Run: python -I -S -B guard.py FILE

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

import ctypes
import json
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

MIB = 1 << 20
UNKNOWN = 2**64 - 1
FAR_SECONDS, NEAR_SECONDS = 0.1, 0.01
# MAP_POPULATE filled 2.1 GiB/s on each of two cores (4 KiB pages): what that fills in one far interval is near,
NEAR_BYTES = min(2048, 256 * (os.cpu_count() or 1)) * MIB
NEAR_SLOPE_SECONDS = 1.0  # and so is a floor that the present slope reaches within this time.
CENSUS_FAR_SECONDS, CENSUS_NEAR_SECONDS = 10.0, 1.0
CENSUS_SLICE = 64         # processes read in one turn of the loop, 10 us each: a census never delays a sample by 1 ms
KILL_ROUNDS = 10          # walks in one stop; what forks faster than that meets the next stop
END_SECONDS = 10.0        # second SIGTERM to SIGKILL, and how long the dying are waited for
BACKOFF_SECONDS, BACKOFF_MOST_SECONDS, STEADY_SECONDS = 0.5, 30.0, 60.0
FINAL_CODES, TEMPORARY, SOFTWARE, CONFIG = (0, 69, 75, 78), 75, 70, 78
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT, MLOCK_ONFAULT, CAP_IPC_LOCK = 1, 2, 4, 1, 14
PAGE, BEAT = struct.Struct("<QQ13Q"), struct.Struct("<QQQ")
libc = ctypes.CDLL(None, use_errno=True)


class Orders(NamedTuple):
    """guard.json."""
    daemon_argv: list[str]
    run_directory: str
    floor_bytes: int
    priority: int
    lock_descriptor: int | None


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # of guard.json: key -> (test, what is wanted)
    "schema": (lambda v: type(v) is int and v == 1, "1 (guard and configuration of one version)"),
    "daemon_argv": (lambda v: isinstance(v, list) and v != [] and all(isinstance(a, str) for a in v), "[str, ...]"),
    "run_directory": (lambda v: isinstance(v, str) and os.path.isdir(v), "a directory that is there"),
    "floor_bytes": (lambda v: type(v) is int and 0 <= v < 2**62, "whole bytes, 0 to 2**62-1"),
    "priority": (lambda v: type(v) is int and 0 <= v <= 63, "0 to 63"),
    "lock_descriptor": (lambda v: v is None or (type(v) is int and os.path.exists(f"/proc/self/fd/{v}")),
                        "null or a descriptor that is open"),
}


class Process(NamedTuple):
    """A process as /proc/<pid>/stat told it; pid and start_time (clock ticks after boot) name it for good."""
    pid: int
    start_time: int
    name: str
    parent: int
    alive: bool
    rss_bytes: int

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_time

    def record(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time, "name": self.name, "rss_bytes": self.rss_bytes}


def say(text: str) -> None:
    """One line on stderr. Dropped when stderr is full: a reader that hangs must not hang the guard."""
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"tightrank-guard: {text}\n".encode()[:4096])
    except OSError:
        pass


def refuse(text: str, code: int) -> SystemExit:
    say(text)
    return SystemExit(code)


def read_orders(path: str) -> Orders:
    """Raises SystemExit(78) after one line that names file, key, value and what is wanted."""
    try:
        with open(path, "rb") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        raise refuse(f"{path}: not readable as JSON: {error}", CONFIG) from None
    if not isinstance(values, dict) or values.keys() != RULES.keys():
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise refuse(f"{path}: wanted an object with the keys {sorted(RULES)}, found {found}", CONFIG)
    for key, (good, wanted) in RULES.items():
        if not good(values[key]):
            raise refuse(f"{path}: {key} = {json.dumps(values[key])}: wanted {wanted}", CONFIG)
    return Orders(**{key: values[key] for key in Orders._fields})


# --- processes -------------------------------------------------------------------------------------------------------

def parse_stat(raw: bytes) -> Process:
    """The name may hold anything, ") Z 1" too: it ends at the last parenthesis."""
    head, _, tail = raw.rpartition(b") ")
    pid, _, name = head.partition(b" (")
    fields = tail.split()
    alive = fields[0] not in b"ZX" or int(fields[17]) > 1  # a main thread may be gone and others still run
    return Process(int(pid), int(fields[19]), name.decode(errors="replace"), int(fields[1]), alive,
                   int(fields[21]) * mmap.PAGESIZE)


def process(pid: int) -> Process | None:
    """None when there is no such process (any more)."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return parse_stat(os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
    except OSError:
        return None


def walk() -> Iterator[Process]:
    """All processes that can be seen."""
    return filter(None, map(process, [int(name) for name in os.listdir("/proc") if name.isdigit()]))


def descendants(everyone: Iterable[Process], root: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for each in everyone:
        children.setdefault(each.parent, []).append(each)
    found = list(children.get(root, ()))
    for each in found:  # grows while it is read: breadth first
        found += children.get(each.pid, ())
    return found


def kill(target: Process) -> Process | None:
    """SIGKILL to exactly this process; as it was just before, or None when it is gone or its pid names another by now.

    The pidfd is opened first: if pid and start time still fit afterwards, it holds the process that was meant.
    """
    try:
        descriptor = os.pidfd_open(target.pid)
    except OSError:
        return None
    try:
        now = process(target.pid)
        if now is None or not now.alive or now.identity != target.identity:
            return None
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return now
    except OSError as error:
        say(f"cannot kill {target.name} ({target.pid}): {error}")
        return None
    finally:
        os.close(descriptor)


def fastest_growing(everyone: Iterable[Process], before: dict[tuple[int, int], int]) -> tuple[Process, int] | None:
    """What grew most since `before` (identity -> RSS in bytes; a new one grew by all it has), and by what."""
    growth = [(each.rss_bytes - before.get(each.identity, 0), each) for each in everyone]
    grown, hog = max(growth, default=(0, None))
    return (hog, grown) if hog and grown > 0 else None


# --- available memory ------------------------------------------------------------------------------------------------

def pick(text: bytes, key: bytes) -> int:
    """The number after `key` at a line's start. Raises ValueError."""
    _, found, rest = (b"\n" + text).partition(b"\n" + key)
    if not found:
        raise ValueError(f"no {key.decode()}")
    return int(rest.split(None, 1)[0])


def read_file(path: str) -> bytes:
    """b"" when there is none: a kernel without cgroups."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


class MemAvailable:
    """MemAvailable of the host in bytes."""

    def __init__(self, path: str = "/proc/meminfo") -> None:
        self.name, self._file = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, enough: int) -> int:
        return pick(os.pread(self._file, 4096, 0), b"MemAvailable:") * 1024


class Cgroup:
    """Room in one memory cgroup in bytes; `enough` when it has at least that, or no limit."""

    NO_LIMIT_BYTES = 2**62  # v2 says "max", v1 2**63 less a page
    V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file ")
    V2 = ("memory.max", "memory.current", b"inactive_file ")

    def __init__(self, directory: str, version: int) -> None:
        limit, usage, self._reclaimable = self.V1 if version == 1 else self.V2
        self.name, self._rest = directory, 0
        self._limit, self._usage, self._stat = (
            os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in (limit, usage, "memory.stat"))

    def read(self, enough: int) -> int:
        if self._rest:  # without a limit it is looked at again after 100 reads: each costs 10 us after a sleep
            self._rest -= 1
            return enough
        text = os.pread(self._limit, 64, 0)
        limit = UNKNOWN if text.startswith(b"max") else int(text)
        if limit >= self.NO_LIMIT_BYTES:
            self._rest = 100
            return enough
        room = limit - int(os.pread(self._usage, 64, 0))
        if room >= enough:  # memory.stat is the dear one, and can only add
            return enough
        return min(enough, room + pick(os.pread(self._stat, 16384, 0), self._reclaimable))


def memory_cgroups(membership: str, mounts: str) -> list[tuple[str, int]]:
    """(directory, version) of the memory cgroups that hold us, from /proc/self/cgroup and /proc/self/mountinfo.

    A cgroup outside of what is mounted here (a container without its own cgroup namespace) counts as the mount itself.
    """
    paths = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths[2 if not controllers else 1] = path
    found = []
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        root, mount = fields.split()[3:5]
        filesystem, *_, options = kind.split()
        version = 2 if filesystem == "cgroup2" else 1 if "memory" in options.split(",") else 0
        if version in paths:
            inside = (paths[version] + "/").startswith(root.rstrip("/") + "/")
            parts = paths[version][len(root.rstrip("/")):].split("/") if inside else []
            steps = [part for part in parts if part]
            found += [("/".join([mount, *steps[:depth]]), version) for depth in range(len(steps), -1, -1)]
    return found


class Available:
    """The least of all sources. One that cannot be read is said once and left out: unknown is not 0."""

    def __init__(self) -> None:
        try:
            self._sources: list[MemAvailable | Cgroup] = [MemAvailable()]
            self._sources[0].read(0)
        except (OSError, ValueError) as error:
            raise refuse(f"/proc/meminfo: cannot be read ({error}): no floor can be kept here", SOFTWARE) from None
        texts = [os.fsdecode(read_file(f"/proc/self/{name}")) for name in ("cgroup", "mountinfo")]
        for directory, version in memory_cgroups(*texts):
            try:
                self._sources.append(Cgroup(directory, version))
            except FileNotFoundError:
                continue  # a root cgroup, or a hierarchy without the memory controller: no limit there
            except OSError as error:
                say(f"{directory}: left out: {error}")

    def names(self) -> str:
        return ", ".join(source.name for source in self._sources)

    def read(self) -> int | None:
        least = UNKNOWN
        for source in tuple(self._sources):
            try:
                least = min(least, source.read(least))
            except (OSError, ValueError) as error:
                say(f"{source.name}: cannot be read any more, left out: {error}")
                self._sources.remove(source)
        return None if least == UNKNOWN else max(0, least)


# --- this process ----------------------------------------------------------------------------------------------------

def lock_memory() -> bool:
    """Locks all of this process's memory; with a small RLIMIT_MEMLOCK what fits, code and writable memory first.

    Under a limit MCL_FUTURE is never used: it makes later allocations fail.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        hard = resource.RLIM_INFINITY
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with open("/proc/self/status", "rb") as file:
        capable = int(file.read().partition(b"CapEff:")[2].split()[0], 16) >> CAP_IPC_LOCK & 1
    if (capable or hard == resource.RLIM_INFINITY) and libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0:
        say("locked all memory, present and future")
        return True
    say(f"locked {lock_parts() // 1024} KiB of memory; RLIMIT_MEMLOCK is {hard // 1024} KiB (raise it to lock all)")
    return False


def lock_parts() -> int:
    """Bytes locked, mapping by mapping, until the limit refuses them."""
    with open("/proc/self/maps") as file:
        mappings = [line.split()[:2] for line in file if "[v" not in line]
    locked = 0
    for span, _ in sorted((each for each in mappings if set("wx") & set(each[1])), key=lambda each: "x" not in each[1]):
        start, end = (int(part, 16) for part in span.split("-"))
        if libc.mlock2(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MLOCK_ONFAULT) == 0:
            locked += end - start
    return locked


def raise_priority() -> str:
    """Real-time, or nice -20, or as it was; children start without it (SCHED_RESET_ON_FORK)."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        return "SCHED_FIFO 1"
    except OSError:
        pass
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        return "nice -20"
    except OSError:
        return "normal scheduling (CAP_SYS_NICE is missing)"


def set_oom_score_adj(value: int) -> str:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(value))
        return f"oom_score_adj {value}"
    except OSError:
        return "oom_score_adj unchanged (CAP_SYS_RESOURCE is missing)"


def page(path: str) -> mmap.mmap:
    """A page of zeros that others may map. Its block is allocated now: a full disk later must not become a SIGBUS."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        shared = mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)
    shared[:] = bytes(mmap.PAGESIZE)
    return shared


class Wake:
    """Signals as bytes in a pipe, so that they end the loop's sleep."""

    CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def __init__(self) -> None:
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self.CAUGHT:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def wait(self, seconds: float) -> bytes:
        """The numbers of the signals that came, as bytes."""
        if not select.select([self._read], [], [], seconds)[0]:
            return b""
        return os.read(self._read, 4096)


class Daemon:
    """The daemon's process: started, told, and started again after a pause that grows."""

    def __init__(self, argv: list[str]) -> None:
        self._argv, self._guard = argv, os.getpid()
        self._memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        with open("/proc/self/oom_score_adj") as file:
            self._oom_score_adj = int(file.read())
        self.pid = self.starts = self._failures = 0
        self._started = self._due = 0.0

    def start_when_due(self) -> None:
        if self.pid or time.monotonic() < self._due:
            return
        # Blocked until the child has its own handlers: a byte of it in our pipe would look like a signal to us.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork() or self._become(mask)
            self.starts, self._started = self.starts + 1, time.monotonic()
        except OSError as error:
            self._due = time.monotonic() + BACKOFF_MOST_SECONDS
            say(f"fork: {error}; starting the daemon in {BACKOFF_MOST_SECONDS:g} s")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become(self, mask: Iterable[int]) -> NoReturn:
        """In the child: nothing of the guard's privileges, signals or terminal goes on to the daemon."""
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
            os.setsid()  # else Ctrl-C reaches it twice: from the terminal and from us
            signal.set_wakeup_fd(-1)
            for number in (*Wake.CAUGHT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            set_oom_score_adj(self._oom_score_adj)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, self._memlock)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if os.getppid() == self._guard:
                os.execvp(self._argv[0], self._argv)
        except (OSError, ValueError) as error:
            say(f"cannot start {self._argv[0]}: {error}")
        finally:
            os._exit(CONFIG)  # never back into the guard's own code

    def ended(self, status: int) -> int | None:
        """What the guard has to exit with, or None: start it again (after the pause)."""
        self.pid, code = 0, os.waitstatus_to_exitcode(status)
        if code in FINAL_CODES:
            return code
        lived = time.monotonic() - self._started
        self._failures = 0 if lived >= STEADY_SECONDS else self._failures
        pause = min(BACKOFF_MOST_SECONDS, BACKOFF_SECONDS * 2**self._failures)
        self._failures += 1
        self._due = time.monotonic() + pause
        say(f"the daemon ended with {code} after {lived:.1f} s; engines are killed, starting it again in {pause:g} s")
        return None


def ended_children() -> list[tuple[int, int]] | None:
    """(pid, wait status) of the children that have ended, now reaped; None when there is no child at all."""
    ended: list[tuple[int, int]] = []
    try:
        while seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            ended.append(os.waitpid(seen.si_pid, 0))
    except ChildProcessError:
        return ended or None
    return ended


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
