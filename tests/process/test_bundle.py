"""Bundles of a whole deployment: after a failure, by hand, with a disk that takes nothing, and what a secret leaves behind."""
from __future__ import annotations

import json
import os
import signal
import tarfile
from pathlib import Path

from deployment import Deployment, Make, gone
from helpers import tightrank, wait_until
from unpack import unpack

SECRETS = {"file": "sk-file-aaaabbbb", "argument": "sk-argument-ccccdddd", "HF_TOKEN": "hf_eeeeffff0000",
           "TIGHTRANK_TOKEN": "token-99998888", "MY_API_KEY": "worker-env-77776666"}


def secretive(make: Make, directory: Path) -> Deployment:
    """A deployment with a secret in each place, whose engine prints them all and then fails."""
    key, lines = directory / "key", directory / "lines"
    key.write_text(SECRETS["file"] + "\n")
    lines.write_text("\n".join(f"argument is {text}, {json.dumps({'x': text})}" for text in SECRETS.values())
                     + "\nServerArgs(api_key='sk-unknown-1234', port=1)\n")
    deployment = make(args=("--print-lines", str(lines), "--hf-token", SECRETS["argument"], "--exit-after", "2.5"),
                      env={"MY_API_KEY": SECRETS["MY_API_KEY"]}, settings={"limits": {"restarts": 0}})
    body = json.loads(deployment.file.read_text())
    body["workers"][0]["api_key_file"] = str(key)
    deployment.file.write_text(json.dumps(body))
    deployment.env |= {"HF_TOKEN": SECRETS["HF_TOKEN"], "TIGHTRANK_TOKEN": SECRETS["TIGHTRANK_TOKEN"]}
    return deployment


def clean(found: dict[str, str]) -> None:
    for name, text in found.items():
        for place, secret in {**SECRETS, "unknown": "sk-unknown-1234"}.items():
            assert secret not in text, f"{place} in {name}"


def test_a_failure_leaves_a_bundle_without_any_secret_and_one_by_hand_has_none_either(make: Make, tmp_path: Path) -> None:
    deployment = secretive(make, tmp_path).up()
    deployment.wait_phase("failed")
    event = wait_until(lambda: deployment.events("bundle"), 20)[0]
    name = event["data"]["bundle"]
    wait_until(lambda: deployment.worker()["bundle"] == name, 10)
    found = unpack(deployment.state / "bundles" / name)
    clean(found)
    assert {"summary.json", "diagnosis.json", "versions.json", "journal.jsonl", "status.json", "config.json", "plan.json",
            "memory.jsonl", "lines/stderr.txt"} <= found.keys()
    assert "argument is ***" in found["lines/stderr.txt"]
    assert json.loads(found["summary.json"])["cause"] == deployment.worker()["diagnosis"]["cause"]
    assert json.loads(found["versions.json"])["engines"] == {"w0": "0.0.0+fake"}
    assert json.loads(found["memory.jsonl"].splitlines()[0])["available_bytes"] > 0
    assert (deployment.state / "bundles").stat().st_mode & 0o777 == 0o700
    assert name in deployment.run("bundle", "--list").stdout

    by_hand = [run_bundle(deployment), run_bundle(deployment, "--output", str(tmp_path / "mine.tar.gz"))]
    assert deployment.worker()["diagnosis"]["cause"] in by_hand[0]["status.json"]
    assert deployment.terminate() == 69
    by_hand.append(run_bundle(deployment))
    assert "no supervisor answers" in by_hand[2]["status.json"]
    for made in by_hand:
        clean(made)
        assert {"journal.jsonl", "logs/w0.log", "plan.json", "config.json"} <= made.keys()
    assert len(deployment.run("bundle", "--list").stdout.splitlines()) == 3


def run_bundle(deployment: Deployment, *words: str) -> dict[str, str]:
    done = tightrank("bundle", *words, "-c", str(deployment.file),
                     env={name: deployment.env[name] for name in ("HF_TOKEN", "TIGHTRANK_TOKEN")})
    assert done.returncode == 0, done.stderr
    return unpack(Path(done.stdout.strip()))


def test_what_was_asked_for_leaves_no_bundle(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("up")
    deployment.post("/workers/w0/restart")
    deployment.wait_phase("up", generation=2)
    assert deployment.terminate() == 0
    assert not (deployment.state / "bundles").exists()


def test_a_place_that_takes_nothing_is_said_and_the_worker_starts_again(make: Make) -> None:
    deployment = make().up()
    deployment.wait_phase("up")
    (deployment.state / "bundles").write_text("no directory")
    os.kill(deployment.pid("worker"), signal.SIGKILL)
    event = wait_until(lambda: deployment.events("bundle"), 20)[0]
    assert event["sentence"].startswith("no bundle ") and "bundles" in event["sentence"]
    assert deployment.wait_phase("up", generation=2)["bundle"] is None
    (deployment.state / "bundles").unlink()
    os.kill(deployment.pid("worker"), signal.SIGKILL)
    wait_until(lambda: deployment.wait_phase("up", generation=3)["bundle"], 20)


def test_a_daemon_that_dies_while_it_writes_leaves_no_torn_archive_and_the_last_name_outlives_it(make: Make) -> None:
    deployment = make().up()
    for generation in (1, 2):
        deployment.wait_phase("up", generation=generation)
        os.kill(deployment.pid("worker"), signal.SIGKILL)
        wait_until(lambda: deployment.events("cause"), 20)
    wait_until(lambda: list((deployment.state / "bundles").glob("*.tar.gz")), 20)
    tree, daemon = deployment.tree(), deployment.status()["guard"]["daemon_pid"]
    torn = deployment.state / "bundles" / f".x.tar.gz.{daemon}.1.tmp"
    torn.write_text("half of it")
    os.kill(daemon, signal.SIGKILL)
    wait_until(gone([daemon, *tree]), 10)
    worker = wait_until(lambda: (seen := deployment.worker()) and seen["bundle"] and seen, 20)
    for path in (deployment.state / "bundles").glob("*.tar.gz"):
        with tarfile.open(path) as archive:
            assert archive.getnames()
    worker = deployment.wait_phase("up", generation=worker["generation"] if worker["generation"] > 2 else 3)
    os.kill(deployment.pid("worker"), signal.SIGKILL)
    wait_until(lambda: not torn.exists(), 20, "what was half done is gone")


def test_a_state_directory_that_is_not_there_is_one_line(make: Make) -> None:
    deployment = make()
    done = deployment.run("bundle")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no supervisor has run here" in done.stderr
    assert "none in" in deployment.run("bundle", "--list").stdout
