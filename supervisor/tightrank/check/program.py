"""The installed engine: its Python, its package, its release. Its own Python is asked, and imports nothing of it."""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath

from tightrank import engines
from tightrank.check.item import Item, failed, passed, unknown
from tightrank.records import WorkerSpec

PROBE_SECONDS = 15.0                   # 0.3 s, measured; a cold network file system takes longer
_PYTHON = re.compile(r"python[0-9.]*")
_GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
# Folders in which the package is looked for are those of the interpreter as the engine would get it.
_PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys
name, distribution, group = sys.argv[1:]
found = importlib.util.find_spec(name)
try:
    release = metadata.version(distribution)
except metadata.PackageNotFoundError:
    release = ""
plugins = [entry.name + " (" + entry.dist.name + ")" for entry in metadata.entry_points(group=group) if group
           and entry.dist.name.partition("-")[0] != distribution]
folders = list(found.submodule_search_locations or ()) if found else []
transformers = importlib.util.find_spec("transformers")
json.dump({"folders": folders, "release": release, "plugins": plugins, "python": sys.version.split()[0],
           "transformers": list(transformers.submodule_search_locations or ()) if transformers else []}, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """`package`: the folder of the engine's package; None: not known, and `why`. `absent`: the interpreter has no such package.
    `plugins`: other people's, which may add architectures. `environment`: what the engine would get, without the adapter."""
    package: Path | None = None
    release: str = ""
    interpreter: str = ""
    transformers: Path | None = None
    plugins: tuple[str, ...] = ()
    why: str = ""
    absent: bool = False


def interpreter(argv: Sequence[str], path: str) -> str | None:
    """The Python that runs the engine of this command line; None: it cannot be told (a script of the user's own)."""
    for index, (word, following) in enumerate(pairwise(argv)):
        if word == "-m":
            python = next((each for each in reversed(argv[:index]) if _PYTHON.fullmatch(PurePath(each).name)), None)
            return shutil.which(python, path=path) if python else None
        if following == "serve" and PurePath(word).name in engines.ENGINES:
            program = shutil.which(word, path=path)
            return _shebang(Path(program)) if program else None
    return None


def _shebang(program: Path) -> str | None:
    """pip writes the interpreter into the first line, or into the second (`'''exec' "/long/python" "$0" "$@"`) where it is
    too long for a kernel. What a shell script of the user's own runs is not looked for."""
    try:
        with open(program, "rb") as file:
            head = file.read(4096).decode(errors="replace").splitlines()
    except OSError:
        return None
    told = [line for line in head[:2] if line.startswith(("#!", "'''exec' "))]
    words = [word.strip("'\"") for line in told for word in line.removeprefix("#!").split()]
    found = next((word for word in words if _PYTHON.fullmatch(PurePath(word).name)), None)
    return found if found is not None and os.access(found, os.X_OK) else None


def read(spec: WorkerSpec, environment: Mapping[str, str]) -> ProgramFacts:
    """`environment`: the supervisor's own. Never raises for what is missing, slow or broken."""
    theirs = engine_environment(spec, environment)
    python = interpreter(spec.argv, theirs.get("PATH", os.defpath))
    if python is None:
        return ProgramFacts(why="command is a program of its own: which Python it runs cannot be told")
    arguments = (spec.engine, engines.get(spec.engine).distribution, _GROUPS.get(spec.engine, ""))
    code, out, error = ask(python, _PROBE, arguments, theirs, PROBE_SECONDS)
    try:
        found = json.loads(out)
        folders = [Path(folder) for folder in found["folders"]]
        transformers = next((Path(folder) for folder in found["transformers"]), None)
        plugins = tuple(found["plugins"])
        release = str(found["release"])
    except (ValueError, TypeError, KeyError):
        return ProgramFacts(interpreter=python, why=f"{python} did not say what it has ({error or f'exit code {code}'})")
    if not folders:
        return ProgramFacts(interpreter=python, absent=True, why=f"{python} has no package {spec.engine}")
    return ProgramFacts(folders[0], release, python, transformers, plugins)


def engine_environment(spec: WorkerSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """What the engine would get, without the adapter."""
    return {name: text for name, text in {**environment, **spec.env}.items() if not name.startswith("TIGHTRANK_")}


def ask(python: str, script: str, arguments: Sequence[str], environment: Mapping[str, str], seconds: float,
        stdin: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, why not: the last line of stderr). Out of time it is ended with all that it has started."""
    try:
        process = subprocess.Popen([python, "-c", script, *arguments], env=dict(environment), text=True, errors="replace",
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True)
    except (OSError, ValueError) as error:
        return -1, "", str(error)
    with process:
        try:
            out, err = process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            return -1, "", f"no answer within {seconds:g} s"
        finally:
            if process.returncode is None:             # not waited for: its number is still its own
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, next(reversed(err.strip().splitlines()), "")


def items(facts: ProgramFacts, spec: WorkerSpec) -> Iterator[Item]:
    item = "engine package"
    if facts.absent:
        yield failed(item, "engine-binary-missing", f"{facts.interpreter} has no package {spec.engine}",
                     f"install {spec.engine} there, or set command to the program of its environment")
    elif facts.package is None:
        yield unknown(item, facts.why)
    else:
        yield passed(item, f"{spec.engine} {facts.release or 'of an unknown release'} in {facts.package}")
