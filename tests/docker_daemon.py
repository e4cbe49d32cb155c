"""A Docker daemon for the tests: its own data, socket and pid file in the cache, so that images are there again next time.

Installs what it needs from Debian (docker.io, docker-compose, debootstrap). Images that one would pull are made: the base
by debootstrap, the wheels that PyPI does not have by the pip of this machine.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, wait_until
from raw_engine import CACHE

HOME = CACHE / "docker"
SOCKET = HOME / "run" / "docker.sock"
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap", "iptables": "iptables"}
# Debian's command first: another docker on PATH may be one without builder and daemon.
ENVIRONMENT = {**{name: text for name, text in os.environ.items() if not name.startswith(("COMPOSE_", "DOCKER_"))},
               "PATH": f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ['PATH']}", "DOCKER_HOST": f"unix://{SOCKET}",
               "DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}     # Docker before 23 builds without BuildKit else
COMPOSE = os.environ.get("DOCKER_COMPOSE", "docker-compose")      # the program of another release, to try the files with
SUITE, INCLUDED = "bookworm", "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*argv: str | Path, timeout: float = 600, env: dict[str, str] | None = None,
        ok: bool = True) -> subprocess.CompletedProcess[str]:
    """A command to its end, with its output as text; with `ok` a failure is one of the test, output shown."""
    done = subprocess.run([str(word) for word in argv], env={**ENVIRONMENT, **(env or {})}, cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False)
    if ok and done.returncode:
        pytest.fail(f"{' '.join(map(str, argv))}: exit code {done.returncode}\n{done.stdout[-6000:]}")
    return done


def install() -> None:
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program, path=ENVIRONMENT["PATH"])]
    if missing:
        quiet = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}       # 1: no service is started by its installation
        run("apt-get", "update", "-qq", env=quiet)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, env=quiet)


@contextlib.contextmanager
def daemon() -> Iterator[None]:
    """Runs while it is used, alone: a second user of the cache waits. No container of an earlier run is left."""
    (HOME / "run").mkdir(parents=True, exist_ok=True)
    with open(HOME / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install()
        end_earlier()
        with open(HOME / "dockerd.log", "w") as log:
            process = subprocess.Popen(
                ["dockerd", "--data-root", HOME / "data", "--exec-root", HOME / "run" / "exec", "--pidfile", pid_file(),
                 "--host", ENVIRONMENT["DOCKER_HOST"], "--storage-driver", "overlay2"],
                env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: answers(process), 60, f"dockerd answers; see {HOME / 'dockerd.log'}")
            remove_containers()
            yield
            remove_containers()
        finally:
            process.terminate()
            process.wait(60)


def pid_file() -> Path:
    return HOME / "run" / "dockerd.pid"


def answers(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        pytest.fail(f"dockerd ended with {process.returncode}:\n{(HOME / 'dockerd.log').read_text()[-3000:]}")
    time.sleep(0.2)
    return run("docker", "info", ok=False).returncode == 0


def end_earlier() -> None:
    """A daemon whose tests were killed."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file().read_text())
        if "dockerd" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60, "an earlier dockerd ends")


def remove_containers() -> None:
    """All of them, with their volumes and networks: the data is the tests' own."""
    if found := run("docker", "ps", "-aq").stdout.split():
        run("docker", "rm", "-fv", *found)
    run("docker", "volume", "prune", "-f")
    run("docker", "network", "prune", "-f")


# --- images that one would pull -------------------------------------------------------------------------------------------

def imported(name: str, key: str, archive: Path) -> str:
    """The image NAME:KEY from a tar of its root."""
    image = f"{name}:{key}"
    if run("docker", "image", "inspect", image, ok=False).returncode:
        run("docker", "import", archive, image)
    return image


def base_image() -> str:
    """Debian with Python, and the certificates of this machine for its pip."""
    key = hashlib.sha256(f"{SUITE} {INCLUDED}".encode() + CERTIFICATES.read_bytes()).hexdigest()[:12]
    archive = HOME / f"base-{key}.tar"
    if not archive.exists():
        root = HOME / "base"
        shutil.rmtree(root, ignore_errors=True)
        run("debootstrap", "--variant=minbase", f"--include={INCLUDED}", SUITE, root)
        shutil.copy(CERTIFICATES, root / "etc/ssl/certs")
        (root / "etc/pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")
        packed(root, archive)
        shutil.rmtree(root)
    return imported("tightrank-base", key, archive)


def wheels_image() -> str:
    """PyTorch's CPU build, from wherever the pip of this machine has it."""
    pins = (ROOT / "scripts/requirements/sglang.txt").read_text().splitlines()
    pin = next(line for line in pins if line.startswith("torch=="))
    key = hashlib.sha256(pin.encode()).hexdigest()[:12]
    archive = HOME / f"wheels-{key}.tar"
    if not archive.exists():
        root = HOME / "wheels"
        shutil.rmtree(root, ignore_errors=True)
        run(CACHE / "envs/supervisor/bin/python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", root, pin)
        packed(root, archive)
        shutil.rmtree(root)
    return imported("tightrank-wheels", key, archive)


def packed(root: Path, archive: Path) -> None:
    """In one step: half an archive is none."""
    half = archive.with_suffix(".half")
    run("tar", "-C", root, "--exclude=./var/cache/apt/archives/*.deb", "-cf", half, ".")
    half.rename(archive)
