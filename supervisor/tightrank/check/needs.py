"""What a start needs from this host, tested before anything is started. Binds and locks for a moment, leaves nothing."""
from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath

from tightrank import engines
from tightrank.config import Config, read_secret
from tightrank.engines import installed
from tightrank.errors import ConfigError
from tightrank.records import WorkerSpec


def refuse(config: Config, specs: Sequence[WorkerSpec], environment: Mapping[str, str]) -> None:
    """Raises the first problem, a ConfigError: one line with key, value, place and what to do."""
    for problem in problems(config, specs, environment):
        raise problem


def problems(config: Config, specs: Sequence[WorkerSpec], environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """All of them, in the order of the configuration."""
    yield from _state(config)
    if config.http.token_file is not None:
        try:
            read_secret(config.http.token_file, partial(config.error, "http.token_file"))
        except ConfigError as error:
            yield error
    yield from _programs(config, specs, environment)
    yield from _ports(config, specs)


def _state(config: Config) -> Iterator[ConfigError]:
    key, state = "state_directory", Path(config.state_directory)
    existing = next((path for path in (state, *state.parents) if os.path.exists(path)), Path("/"))
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        yield config.error(key, f"{state} cannot be made or written ({existing} is "
                           f"{'not writable' if os.path.isdir(existing) else 'no directory'}); give a directory of your own",
                           "state-directory-unusable")
    elif existing == state and state.stat().st_mode & 0o022:
        yield config.error(key, f"{state} may be written by other users (mode {state.stat().st_mode & 0o777:04o}), who could "
                           f"have any program started; chmod 700 {state}, or give a directory below it",
                           "state-directory-unusable")
    elif _locked(state / "lock"):
        yield config.error(key, f"{state} is held by another supervisor; stop it (tightrank stop) or give this "
                           "deployment a state_directory of its own", "state-directory-in-use")


def _locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _programs(config: Config, specs: Sequence[WorkerSpec], environment: Mapping[str, str]) -> Iterator[ConfigError]:
    paths = {{**environment, **spec.env}.get("PATH", os.defpath): spec for spec in specs}    # one program for all of them
    for path, spec in paths.items():
        yield from _program(config, spec, path)


def _program(config: Config, spec: WorkerSpec, path: str) -> Iterator[ConfigError]:
    program = shutil.which(spec.argv[0], path=path)
    if program is None:
        where = f"at {spec.argv[0]}" if "/" in spec.argv[0] else f"as {spec.argv[0]} on PATH ({path})"
        yield config.error("command", f"no program that can be run {where}; install {config.engine}, or set command to "
                           "the program of its environment", "engine-binary-missing")
        return
    engine = engines.get(spec.engine)
    stranger = namesake(spec.argv, *engine.namesake, path)
    if stranger is not None:
        yield config.error("command", f"{stranger}; then set command to the program of that environment",
                           "engine-binary-missing")
        return
    found = installed.release(spec.argv, engine.distribution, path)
    for hook in spec.hooks:
        if found is not None and _numbers(found) < engine.releases[hook]:
            wanted = ".".join(map(str, engine.releases[hook]))
            yield config.error("hooks", f"{hook} needs {config.engine} {wanted} or later, found {found}; upgrade it, or "
                               f"take {hook} out of hooks", "hook-unavailable")


def namesake(argv: Sequence[str], file: str, what: str, path: str) -> str | None:
    """A sentence when the environment of the program has another project's package of the engine's name: one without
    `file`, which the engine's has. None: it has not, or it cannot be told from here (a package that is built in place)."""
    environment = installed.environment(argv, path)
    if not file or environment is None:
        return None
    packages = environment.glob(f"lib/python3*/site-packages/{PurePath(file).parts[0]}")
    found = next((package for package in packages if not (package.parent / file).exists()), None)
    return None if found is None else f"{found} is {what}"


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release.partition("+")[0])[:3])


def _ports(config: Config, specs: Sequence[WorkerSpec]) -> Iterator[ConfigError]:
    # The gateway's, where there is one here, may be in use already: by the gateway.
    has_gateway = any(key.startswith("gateway.") and origin != "default" for key, origin in config.places.items())
    taken = {config.gateway.port: "gateway.port"} if has_gateway else {}
    wanted = [("http.port", config.http.host, config.http.port)]
    wanted += [(key if "." in key else f"workers[{index}].{key}", host, port) for index, spec in enumerate(specs)
               for key, host, port in spec.sockets()]
    for key, host, port in wanted:
        if port in taken:
            yield config.error(key, f"{port} is {taken[port]} too; give each its own port", "port-taken")
            continue
        taken[port] = key
        why = _bind(host, port)
        if why is not None:
            yield config.error(key, f"{host}:{port} {why}", "port-taken")


def _bind(host: str, port: int) -> str | None:
    """Why nobody can listen there now, with what to do; None: one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        return f"cannot be resolved ({error.strerror}); give an address of this host"
    except UnicodeError:                             # of the name's form: an empty label, or one of more than 63 letters
        return "is no host name; give an address of this host"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            reasons = {errno.EADDRINUSE: "is in use; end what listens there (ss -ltnp) or give another port",
                       errno.EADDRNOTAVAIL: "is no address of this host; give one that is",
                       errno.EACCES: "may not be used without privilege; give a port from 1024 on"}
            return reasons.get(error.errno or 0, f"cannot be listened on ({error.strerror}); give another")
    return None
