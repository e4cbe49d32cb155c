"""Three hosts on one machine: each has its own network, process and mount namespace, /dev/shm, memory cgroup and freezer; one
bridge joins them. Root and cgroup v1 (or its hybrid) are needed."""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment, fake_model
from helpers import wait_until

NODES, PORT, ENGINE_PORT, MEETING = 3, 9470, 8001, 29500
SWITCH, OURS, NETWORK = "tr-net", "tr-us", "10.77.0."    # the bridge has a namespace: Docker's firewall is not for it
MEMORY, FREEZER = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/freezer")
TOKEN = "spoken-between-hosts"
_MAIN = "import sys; from tightrank.cli import main; sys.exit(main())"
_RUN = b"TIGHTRANK_RUN="
_ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def prepare() -> str:
    """Makes the switch. Why no hosts can be made here; "": they can."""
    if os.geteuid() != 0:
        return "needs root: network namespaces"
    if lacking := [program for program in ("ip", "nsenter", "unshare", "iptables") if shutil.which(program) is None]:
        return f"needs {', '.join(lacking)} (Debian: iproute2, util-linux, iptables)"
    if not (MEMORY.is_dir() and FREEZER.is_dir()):
        return "needs the cgroup v1 controllers memory and freezer"
    _run("ip", "link", "del", OURS, check=False)
    _run("ip", "netns", "del", SWITCH, check=False)
    if _run("ip", "netns", "add", SWITCH, check=False) or \
            _run("ip", "-n", SWITCH, "link", "add", "bridge0", "type", "bridge", check=False):
        return "needs network namespaces and bridges (ip netns, ip link add ... type bridge)"
    return ""


def _run(*argv: str, check: bool = True) -> int:
    return subprocess.run(argv, check=check, capture_output=True).returncode


class Host:
    """One of them, with a supervisor that can be started again."""

    def __init__(self, node: int, deployment: Deployment) -> None:
        self.node, self.deployment = node, deployment
        self.address, self.name = f"{NETWORK}{node + 1}", f"tr-host{node}"
        self.groups = (MEMORY / self.name, FREEZER / self.name)
        self.process: subprocess.Popen[bytes] | None = None
        self.clean()
        for group in self.groups:
            group.mkdir()
        _run("ip", "netns", "add", self.name)
        _run("ip", "-n", SWITCH, "link", "add", f"port{node}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _run("ip", "-n", SWITCH, "link", "set", f"port{node}", "master", "bridge0", "up")
        for words in (("addr", "add", f"{self.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                      ("link", "set", "lo", "up")):
            _run("ip", "-n", self.name, *words)

    # --- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        # not `ip netns exec`, which mounts a /sys without cgroups
        argv = ["nsenter", f"--net=/run/netns/{self.name}", *_ISOLATED, "sh", "-c",
                'mount -t tmpfs tmpfs /dev/shm; exec "$@"', "sh",
                sys.executable, "-P", "-c", _MAIN, "up", "-c", str(self.deployment.file), "--node-rank", str(self.node)]
        with open(self.deployment.directory / "up.log", "a") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=self.deployment.env, start_new_session=True,
                                            preexec_fn=self._enter)

    def _enter(self) -> None:
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def clean(self) -> None:
        """Ends everything of it, and takes it away."""
        if (FREEZER / self.name).exists():
            self.thaw()
            wait_until(lambda: self.kill() == 0, 10, f"{self.name} ends")
        if self.process is not None:
            self.process.wait(10)
        for group in self.groups:
            if group.exists():
                wait_until(lambda group=group: _removed(group), 10, f"{group} is empty")
        _run("ip", "netns", "del", self.name, check=False)

    def pids(self) -> list[int]:
        return [int(pid) for pid in (FREEZER / self.name / "cgroup.procs").read_text().split()]

    def engine_pids(self, role: str = "") -> list[int]:
        """Of the engine's processes, as seen from here; `role` is in their title."""
        return [pid for pid in self.pids() if is_engine(pid) and role in title(pid)]

    def generations(self) -> set[int]:
        """Of the engine's processes that live."""
        found = set()
        for pid in self.engine_pids():
            with contextlib.suppress(OSError, ValueError):
                [run] = [word for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if word.startswith(_RUN)]
                found.add(int(run.rpartition(b":")[2]))
        return found

    def pid_here(self, inside: int) -> int:
        """Of a process that has the pid `inside` on its host."""
        return next(pid for pid in self.pids() if _numbers(pid)[-1] == inside)

    def supervisor_pid(self, module: str) -> int:
        return next(pid for pid in self.pids() if module in title(pid) and not is_engine(pid) and
                    not title(pid).startswith(("nsenter ", "unshare ")))

    def kill(self) -> int:
        """The whole host loses its power. How many processes it had."""
        found = self.pids()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    # --- what may happen to it ----------------------------------------------------------------------------------------

    def freeze(self) -> None:
        (FREEZER / self.name / "freezer.state").write_text("FROZEN")

    def thaw(self) -> None:
        (FREEZER / self.name / "freezer.state").write_text("THAWED")

    def cut(self, *chains: str, share: float = 1.0) -> None:
        """Drops what comes (INPUT) or goes (OUTPUT), or a share of it."""
        some = () if share == 1 else ("-m", "statistic", "--mode", "random", "--probability", str(share))
        for chain in chains:
            _run("ip", "netns", "exec", self.name, "iptables", "-A", chain, "-i" if chain == "INPUT" else "-o", "eth0", *some,
                 "-j", "DROP")

    def mend(self) -> None:
        _run("ip", "netns", "exec", self.name, "iptables", "-F")

    def limit(self, size: int) -> None:
        """The room of its memory cgroup, bytes."""
        (MEMORY / self.name / "memory.limit_in_bytes").write_text(str(size))

    # --- what it says -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        try:
            return dict(httpx2.get(f"http://{self.address}:{PORT}/status", timeout=1).json())
        except (httpx2.HTTPError, ValueError):
            return {}

    def worker(self) -> dict[str, Any]:
        found = self.status()
        return dict(found["workers"][0]) if "workers" in found else {"phase": "unknown", "generation": 0, "reason": ""}


class Hosts:
    """All three, under one configuration."""

    def __init__(self, directory: Path, engine: str = "vllm", settings: dict[str, Any] | None = None, nodes: int = NODES,
                 **options: Any) -> None:
        _run("ip", "-n", SWITCH, "link", "set", "bridge0", "up")
        _run("ip", "-n", SWITCH, "link", "add", "ours", "type", "veth", "peer", "name", OURS, "netns", "1")
        _run("ip", "-n", SWITCH, "link", "set", "ours", "master", "bridge0", "up")
        _run("ip", "addr", "add", f"{NETWORK}254/24", "dev", OURS)
        _run("ip", "link", "set", OURS, "up")
        (directory / "token").write_text(TOKEN)
        options = {"model": fake_model(directory), "tensor_parallel": nodes, **options}
        self.addresses = [f"{NETWORK}{node + 1}" for node in range(nodes)]
        self.all = [self._host(directory, node, engine, settings or {}, options) for node in range(nodes)]

    def _host(self, directory: Path, node: int, engine: str, settings: dict[str, Any], options: dict[str, Any]) -> Host:
        place = directory / f"host{node}"
        place.mkdir()
        made = Deployment(place, engine=engine, settings={
            "http": {"host": self.addresses[node], "port": PORT}, "line": {"budget": 8_000_000},
            "nodes": {"addresses": self.addresses, "port": MEETING, "token_file": str(directory / "token")}, **settings},
            **options)
        body = json.loads(made.file.read_text())
        body["workers"][0] |= {"host": self.addresses[node], "port": ENGINE_PORT}
        made.file.write_text(json.dumps(body))
        return Host(node, made)

    def start(self) -> None:
        for host in self.all:
            host.start()

    def close(self) -> None:
        for host in self.all:
            host.clean()
        _run("ip", "link", "del", OURS, check=False)       # the namespace alone would take it some time later
        _run("ip", "netns", "del", SWITCH, check=False)

    def wait_up(self, over: int = 0, timeout: float = 60) -> int:
        """Until all are up in one generation over `over`; its number."""
        def there() -> int | None:
            time.sleep(0.1)
            workers = [host.worker() for host in self.all]
            numbers = {worker["generation"] for worker in workers}
            whole = len(numbers) == 1 and min(numbers) > over and all(worker["phase"] == "up" for worker in workers)
            return numbers.pop() if whole else None
        try:
            return wait_until(there, timeout, "all hosts up in one generation")
        except pytest.fail.Exception as error:
            logs = "\n".join(host.deployment.output[-3000:] for host in self.all)
            raise AssertionError(f"{error}: {[host.worker() for host in self.all]}\n{logs}") from None

    def ranks_gone(self, pids: list[int]) -> Callable[[], bool]:
        """Of those that were there before."""
        return lambda: not set(pids) & {pid for host in self.all for pid in host.engine_pids()}

    def engine_pids(self, *nodes: int) -> list[int]:
        return [pid for node in nodes or range(len(self.all)) for pid in self.all[node].engine_pids()]

    def ask(self) -> int:
        """The status of a request; 0: the connection failed at once."""
        body = {"model": "tiny", "prompt": list(range(1, 40)), "max_tokens": 2, "temperature": 0}
        try:
            return httpx2.post(f"http://{self.all[0].address}:{ENGINE_PORT}/v1/completions", json=body, timeout=10).status_code
        except httpx2.ReadTimeout:
            raise AssertionError("a request hung for 10 s") from None
        except httpx2.HTTPError:
            return 0

    def causes(self, node: int) -> list[str]:
        return [event["data"]["cause"] for event in self.all[node].deployment.events("cause") if event["data"].get("cause")]


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def title(pid: int) -> str:
    """Its command line; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _numbers(pid: int) -> list[int]:
    """Its pids, from the outermost namespace to its own."""
    try:
        [found] = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("NSpid:")]
    except OSError:
        return [0]
    return [int(number) for number in found.split()[1:]]


def is_engine(pid: int) -> bool:
    """Whether it lives and descends from a generation."""
    try:
        return _RUN in Path(f"/proc/{pid}/environ").read_bytes() and \
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
