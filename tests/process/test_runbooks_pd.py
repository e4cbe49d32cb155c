"""Every command of docs/runbooks/pd, run: a pair of fake engines under the real supervisor and gateway.

The word after `sh` says how a block ends: nothing - with 0; `wait` - with 0 at last; `any` - with 0 or 1 (it shows a state);
`background` - not by itself; `stops` - with 0, and it ends what was started in the background.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deployment import fake_model
from helpers import ROOT, SUPERVISOR, free_ports, kill, session_pids, wait_until

RUNBOOKS = ROOT / "docs" / "runbooks" / "pd"
PEER = ROOT / "tests" / "fakes" / "peer.py"
_BLOCK = re.compile(r"^```(sh|yaml)( \w+)?\n(.*?)^```$", re.M | re.S)


def blocks(name: str, kind: str) -> list[tuple[str, str]]:
    """(word, text) of the blocks of a runbook."""
    return [(word.strip(), text) for found, word, text in _BLOCK.findall((RUNBOOKS / name).read_text()) if found == kind]


class Site:
    """A directory with tightrank.yaml, and a shell in it. Ports of the runbooks become free ones."""

    def __init__(self, directory: Path, document: str) -> None:
        self.directory = directory
        self.http, self.gateway = free_ports(2)
        self.started: list[subprocess.Popen[bytes]] = []
        body = yaml.safe_load(document)
        ports = free_ports(2 * len(body["workers"]))
        workers = [{**worker, "port": ports.pop()} for worker in body["workers"]]
        for worker in workers:
            worker.pop("devices", None)
            if worker["role"] == "prefill":
                worker["transfer_port"] = ports.pop()
        body |= {"model": str(fake_model(directory)), "engine": body.get("engine", "sglang"), "workers": workers,
                 "command": [sys.executable, str(PEER), "--engine", body.get("engine", "sglang")], "state_directory": "state",
                 "http": {"port": self.http}, "gateway": {"port": self.gateway, **body.get("gateway", {})},
                 "guard": {"floor": "64MiB", "margin": "64MiB"}, "limits": {"backoff_first": "200ms", "drain": "5s"}}
        (directory / "tightrank.yaml").write_text(json.dumps(body))
        command = directory / "tightrank"
        command.write_text(f"#!/bin/sh\nexec {sys.executable} -P -c "
                           "'import sys; from tightrank.cli import main; sys.exit(main())' \"$@\"\n")
        command.chmod(0o755)
        clean = {name: text for name, text in os.environ.items() if not name.startswith("TIGHTRANK_")}
        self.env = {**clean, "PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(SUPERVISOR), "no_proxy": "*"}

    def shell(self, text: str) -> tuple[list[str], dict[str, str]]:
        text = text.replace("127.0.0.1:9470", f"127.0.0.1:{self.http}").replace("127.0.0.1:8000", f"127.0.0.1:{self.gateway}")
        return ["bash", "-euo", "pipefail", "-c", text], self.env

    def run(self, word: str, text: str) -> None:
        argv, env = self.shell(text)
        if word == "background":
            log = (self.directory / f"background-{len(self.started)}.log").open("wb")
            self.started.append(subprocess.Popen(argv, env=env, cwd=self.directory, stdout=log, stderr=log,
                                                 start_new_session=True))
            return
        wanted = {"": (0,), "wait": (0,), "any": (0, 1), "stops": (0,)}[word]
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run(argv, env=env, cwd=self.directory, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode in wanted:
                return
            assert word == "wait", f"{text}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert time.monotonic() < deadline, f"{text}\nnever became true\n{done.stdout}\n{done.stderr}\n{self.logs()}"
            time.sleep(0.2)

    def run_all(self, name: str) -> None:
        for word, text in blocks(name, "sh"):
            self.run(word, text)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.directory.glob("background-*.log"))

    def close(self) -> None:
        for process in self.started:
            for pid in session_pids(process.pid):
                kill(pid)
            process.wait(30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    (_, document), = blocks("bring-up.md", "yaml")
    made = Site(tmp_path_factory.mktemp("site"), document)
    yield made
    made.close()


def test_every_runbook_is_run_here() -> None:
    tested = {"bring-up.md", "role-lost.md", "restart-order.md", "transport-check.md", "sizing.md", "several-on-a-host.md",
              "draining.md"}
    assert {path.name for path in RUNBOOKS.glob("*.md")} == tested
    assert all(blocks(name, "sh") for name in tested)


def test_a_pair_is_brought_up_looked_at_restarted_and_stopped(site: Site) -> None:
    for name in ("bring-up.md", "transport-check.md", "sizing.md", "restart-order.md"):
        site.run_all(name)
    status = json.loads(subprocess.run(*site.shell("tightrank status --json")[:1], env=site.env, cwd=site.directory,
                                       capture_output=True, text=True, check=False).stdout)
    assert [worker["generation"] for worker in status["workers"]] == [2, 2]     # restart-order.md restarted both
    kill(next(rank["id"]["pid"] for rank in status["workers"][0]["ranks"] if rank["role"] == "scheduler"))
    site.run_all("role-lost.md")
    site.run("wait", "curl -sf http://127.0.0.1:8000/readyz")
    site.run_all("draining.md")
    wait_until(lambda: site.started[0].poll() is not None, 30, "tightrank stop has ended the supervisor")


def test_several_workers_of_a_role_on_one_host(tmp_path: Path) -> None:
    (_, document), = blocks("several-on-a-host.md", "yaml")
    made = Site(tmp_path, document)
    made.run("", "tightrank check")
    body = json.loads((tmp_path / "tightrank.yaml").read_text())
    body["workers"][1]["port"] = body["workers"][0]["port"]
    (tmp_path / "tightrank.yaml").write_text(json.dumps(body))
    with pytest.raises(AssertionError, match="exit 78"):
        made.run("", "tightrank check")


def test_the_policy_that_restarts_pairs_is_one_that_there_is(tmp_path: Path) -> None:
    (_, document), = blocks("restart-order.md", "yaml")
    (_, base), = blocks("bring-up.md", "yaml")
    Site(tmp_path, base + document).run("", "tightrank check")
