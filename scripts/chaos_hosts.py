"""scripts/chaos --hosts: random faults of one worker over three hosts (tests/hosts_net.py), one to three at once.

A round: ranks, daemons and whole hosts are killed, hosts are frozen, links cut in one or both directions or made to lose a
third; some seconds later all of it is healed at once, and hosts that are off are switched on. Then the worker must be up in
one generation on all hosts, by itself, and serve. At no time may ranks of two generations run on hosts that are not frozen.
"""
from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "supervisor"), str(ROOT / "adapter" / "inject")]
import hosts_net  # noqa: E402

HEALED_SECONDS, OVERLAP_SECONDS = 90.0, 1.0    # generous: a busy machine is slow, and no breach
FAULTS = ("rank", "daemon", "host", "freeze", "cut in", "cut out", "cut", "lossy")
ROUNDS_OF_A_LIFE = 5


class Watcher(threading.Thread):
    """Looks several times a second which generations have ranks."""

    def __init__(self, three: hosts_net.Hosts) -> None:
        super().__init__(daemon=True)
        self.three, self.breach, self.over = three, "", False
        self.frozen: set[int] = set()

    def run(self) -> None:
        since = None
        while not self.over and not self.breach:
            found = {generation for host in self.three.all if host.node not in self.frozen for generation in host.generations()}
            since = (since or time.monotonic()) if len(found) > 1 else None
            if since is not None and time.monotonic() - since > OVERLAP_SECONDS:
                self.breach = f"ranks of generations {sorted(found)} at once"
            time.sleep(0.2)


def strike(dice: random.Random, three: hosts_net.Hosts, watcher: Watcher) -> str:
    """One fault; what it was, "no ..." where there was nobody for it."""
    host, fault = dice.choice(three.all), dice.choice(FAULTS)
    if fault == "host":
        host.thaw()
        if not host.kill():
            return f"no {fault} {host.node}"
    elif fault == "freeze":
        watcher.frozen.add(host.node)
        host.freeze()
    elif fault == "lossy":
        host.cut("INPUT", "OUTPUT", share=0.3)
    elif fault.startswith("cut"):
        host.cut(*{"cut in": ["INPUT"], "cut out": ["OUTPUT"], "cut": ["INPUT", "OUTPUT"]}[fault])
    else:
        pids = host.engine_pids("Worker") if fault == "rank" else [pid for pid in host.pids() if "tightrank.daemon" in
                                                                  hosts_net.title(pid) and not hosts_net.is_engine(pid)]
        if not pids:
            return f"no {fault} {host.node}"
        os.kill(dice.choice(pids), signal.SIGKILL)
    return f"{fault} {host.node}"


def heal(three: hosts_net.Hosts, watcher: Watcher) -> None:
    for host in three.all:
        host.thaw()
        host.mend()
    time.sleep(1.0)                    # what was frozen sees that its lease is over
    watcher.frozen.clear()
    for host in three.all:
        if not host.pids():
            host.start()


def live(dice: random.Random, rounds: int, directory: Path) -> str:
    """Some rounds of three hosts; the breach, or ""."""
    three = hosts_net.Hosts(directory)
    watcher = Watcher(three)
    try:
        three.start()
        last = three.wait_up()
        watcher.start()
        for _ in range(rounds):
            faults = []
            for _ in range(dice.choice((1, 1, 2, 3))):
                faults.append(strike(dice, three, watcher))
                time.sleep(dice.uniform(0, 1.5))
            time.sleep(dice.uniform(0, 6))
            heal(three, watcher)
            began, ended = time.monotonic(), any(each.startswith(("rank", "daemon", "host")) for each in faults)
            last = three.wait_up(over=last if ended else 0, timeout=HEALED_SECONDS)
            served, seconds = three.ask(), time.monotonic() - began
            print(f"{', '.join(faults):40} -> up in generation {last} {seconds:.1f} s after it was healed", flush=True)
            if watcher.breach or served != 200:
                return watcher.breach or f"it is up and answers {served}"
        return ""
    except AssertionError as error:
        return str(error)[:3000]
    finally:
        watcher.over = True
        three.close()


def main(rounds: int, seed: int) -> int:
    """Exit code: 1 after a breach."""
    dice, breaches, left = random.Random(seed), 0, rounds
    print(f"seed {seed}, {rounds} rounds over three hosts", flush=True)
    while left > 0:
        if why := hosts_net.prepare():
            print(f"chaos: {why}", file=sys.stderr)
            return 1
        directory = Path(tempfile.mkdtemp(prefix="chaos-"))
        breach = live(dice, min(ROUNDS_OF_A_LIFE, left), directory)
        if breach:
            breaches += 1
            print(f"BREACH: {breach}\n        files: {directory}", flush=True)
        left -= ROUNDS_OF_A_LIFE
    print(f"{rounds} rounds, {breaches} breaches (seed {seed})")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
