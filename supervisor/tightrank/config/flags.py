"""How the engines spell the arguments that matter here, and how to find them on a command line. Pure.

Read from the argument parsers of vLLM 0.32.0, SGLang 0.5.23 and ATOM of 2026-08-22. All let the last of a repeated flag
win; vLLM and ATOM take _ for - (ATOM up to v0.1.6-rc0 knows each flag in one spelling: --kv_cache_dtype, --max-num-seqs).
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

FLAGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "model": ("--model",),
        "served_model": ("--served-model-name",),
        "host": ("--host",),
        "port": ("--port",),
        "tensor_parallel": ("--tensor-parallel-size", "-tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "-pp"),
        "data_parallel": ("--data-parallel-size", "-dp"),
        "api_key": ("--api-key",),
        "chunk": ("--max-num-batched-tokens",),
        "context": ("--max-model-len",),
        "page": ("--block-size",),
        "requests": ("--max-num-seqs",),
        "executor": ("--distributed-executor-backend",),
    },
    "sglang": {
        "model": ("--model-path", "--model"),
        "served_model": ("--served-model-name",),
        "host": ("--host",),
        "port": ("--port",),
        "tensor_parallel": ("--tensor-parallel-size", "--tp-size", "--tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "--pp-size", "--pp"),
        "data_parallel": ("--data-parallel-size", "--dp-size", "--dp"),
        "api_key": ("--api-key",),
        "chunk": ("--chunked-prefill-size",),
        "context": ("--context-length",),
        "page": ("--page-size",),
        "role": ("--disaggregation-mode",),
        "transfer_port": ("--disaggregation-bootstrap-port",),
    },
    "atom": {
        "model": ("--model",),
        "served_model": ("--served-model-name",),
        "host": ("--host",),
        "port": ("--server-port",),          # its --port is one between its own processes
        "tensor_parallel": ("--tensor-parallel-size", "-tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "-pp"),
        "data_parallel": ("--data-parallel-size", "-dp"),
        "api_key": (),                       # its server asks for none
        "context_parallel": ("--prefill-context-parallel-size", "-pcp"),
        "chunk": ("--max-num-batched-tokens",),
        "context": ("--max-model-len",),
        "page": ("--block-size",),
    },
}

# Flags that belong to a key of ours, so that one place says it.
OWN_KEYS = {"model": "model", "served_model": "served_model", "host": "workers[].host", "port": "workers[].port",
            "tensor_parallel": "workers[].tensor_parallel", "pipeline_parallel": "workers[].pipeline_parallel",
            "api_key": "workers[].api_key_file", "role": "workers[].role"}
# ... where the configuration names several hosts.
NODE_FLAGS = {"vllm": ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
              "sglang": ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr")}


MASK = "***"
USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")     # HTTPS_PROXY=http://user:password@proxy
_SECRETS = ("--api-key", "--admin-api-key", "--hf-token", "--ssl-keyfile-password")


def _name(argument: str) -> str:
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def without_secrets(args: Sequence[str]) -> tuple[str, ...]:
    """`args` to show."""
    shown = []
    hidden = False                  # vLLM takes several keys after one flag
    for argument in args:
        hidden = _name(argument) in _SECRETS if argument.startswith("-") else hidden
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            shown.append(f"{name}={MASK}" if hidden and equals else argument)
        else:
            shown.append(MASK if hidden else argument)
    return tuple(shown)


def secret_values(args: Sequence[str]) -> Iterator[str]:
    """The values that `without_secrets` hides, and the users with passwords of URLs."""
    for given, shown in zip(args, without_secrets(args), strict=True):
        if given != shown:
            yield given.removeprefix(shown.removesuffix(MASK))
        yield from passwords(given)


def passwords(text: str) -> Iterator[str]:
    """The users with their passwords of all URLs in `text`; a user alone is no secret."""
    yield from (found[0] for found in USER_OF_URL.finditer(text) if ":" in found[0])


def names(args: Sequence[str]) -> tuple[str, ...]:
    """The long flags in `args`, without their values."""
    return tuple(_name(argument) for argument in args if argument.startswith("--"))


def has(args: Sequence[str], *spellings: str) -> bool:
    """vLLM takes one value of a JSON argument too: --kv-transfer-config.kv_role kv_both."""
    return any(_name(argument).partition(".")[0] in spellings for argument in args)


def value(args: Sequence[str], *spellings: str) -> str | None:
    """The value of the last of these flags in `args`; "" for one that ends the line; None when it is not there."""
    found = None
    for index, argument in enumerate(args):
        if _name(argument) in spellings:
            _, equals, text = argument.partition("=")
            found = text if equals else "".join(args[index + 1:index + 2])
    return found
