"""`tightrank run -- <engine command line>`: a configuration read off a command line, which stays as it was written."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath

from tightrank.config.flags import FLAGS, value
from tightrank.config.load import Loaded, resolve
from tightrank.config.source import Entry, from_arguments, from_environment
from tightrank.errors import ConfigError

_PLACE = "command line"
_MODULES = {"vllm.entrypoints.openai.api_server": "vllm", "vllm.entrypoints.cli.main": "vllm",
            "sglang.launch_server": "sglang",
            "atom.entrypoints.openai_server": "atom", "atom.entrypoints.openai.api_server": "atom"}
# What the engines listen on when the command line does not say (vLLM 0.32.0: all addresses).
_LISTEN = {"vllm": ("0.0.0.0", "8000"), "sglang": ("127.0.0.1", "30000"), "atom": ("0.0.0.0", "8000")}
_EXAMPLE = "for example: tightrank run -- vllm serve MODEL_DIRECTORY --port 8000"


def from_command(argv: Sequence[str], environment: Mapping[str, str], settings: Sequence[str] = ()) -> Loaded:
    """The configuration of one worker started as `argv`, with TIGHTRANK_* and `--set` laid over it.

    Raises ConfigError when no engine can be made out in `argv`, or a value on it cannot be used.
    """
    here = Path.cwd()
    engine, args = _engine(argv)
    found = {name: text for name, flags in FLAGS[engine].items() if (text := value(args, *flags)) is not None}
    model = found.get("model") or _positional(engine, args)
    host, port = _LISTEN[engine]
    port = found.get("port", port)
    values: dict[str, str | tuple[str, ...]] = {
        "name": f"run-{port}" if port.isdigit() else "run", "engine": engine, "model": model,
        "command": tuple(argv), "workers[0]": "",
        "workers[0].name": "worker", "workers[0].host": found.get("host", host), "workers[0].port": port,
        "workers[0].args": tuple(args)}
    if found.get("role") != "prefill":
        found.pop("transfer_port", None)         # on a decode worker it is what requests may leave out, not a port of its own
    values |= {f"workers[0].{name}": found[name] for name in ("tensor_parallel", "pipeline_parallel", "role", "transfer_port")
               if found.get(name, "null") != "null"}
    values |= {"served_model": found["served_model"]} if "served_model" in found else {}
    entries = {key: Entry(text, _PLACE, here) for key, text in values.items()}
    entries |= {**from_environment(environment, here), **from_arguments(settings, here)}
    return resolve(entries, environment, _PLACE, as_written=True)


def _engine(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The engine and the arguments that are its own; what stands before (python, env, numactl) is the user's."""
    for index, (word, following) in enumerate(pairwise(argv)):
        if following == "serve" and PurePath(word).name in FLAGS:
            return PurePath(word).name, argv[index + 2:]
        if word == "-m" and following in _MODULES:
            args = argv[index + 2:]
            return _MODULES[following], args[1:] if args[:1] == ["serve"] else args
    shown = " ".join(argv[:4]) or "nothing"
    raise ConfigError(f"{_PLACE}: no engine found in '{shown}'; give `vllm serve ...`, `sglang serve ...` or "
                      f"`python -m {' | '.join(_MODULES)} ...`, not a shell string; {_EXAMPLE}")


def _positional(engine: str, args: Sequence[str]) -> str:
    if engine == "vllm" and args and not args[0].startswith("-"):
        return args[0]
    flag = "as the first word after `serve` or with --model" if engine == "vllm" else f"with {FLAGS[engine]['model'][0]}"
    raise ConfigError(f"{_PLACE}: model: name the model's directory {flag}; {_EXAMPLE}")
