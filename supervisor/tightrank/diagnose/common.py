"""Texts of what the engines are built on: argparse, pydantic, sockets, model files, Python; and of our own adapter."""
from __future__ import annotations

from tightrank.diagnose.signature import Rank, Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "kv-pool-too-small",
        r"tightrank: headroom leaves no memory for the KV cache: rank (?P<rank>\d+) has (?P<free_gib>[\d.]+) GiB free and "
        r"keeps (?P<headroom_gib>[\d.]+) GiB",
        "The headroom leaves no memory for the KV cache: rank {rank} has {free_gib} GiB free and keeps {headroom_gib} GiB.",
        "lower headroom.reserve to less than {free_gib}GiB, or free memory on rank {rank}",
        "the hook headroom"),
    Signature(
        "adapter-fault",
        r"tightrank: hook headroom failed on rank (?P<rank>\d+)",
        "The hook headroom failed on rank {rank}, so no rank could size its KV cache.",
        "report this fault; leave headroom out of `hooks` to run without it",
        "the hook headroom"),
    Signature(
        "engine-error",
        r"tightrank: the engine failed on rank (?P<rank>\d+) before it could size its KV cache",
        "The engine failed on rank {rank} before it could size its KV cache.",
        "see that rank's own error in the log",
        "the hook headroom", decisive=False, rank=Rank.CONSEQUENCE),
    Signature(
        "arguments-invalid",
        r"[\w./ -]{1,60}: error: (?P<why>unrecognized arguments: .*|argument .*|ambiguous option: .*|the following arguments "
        r"are required: .*)",
        "The engine refused its command line: {why}",
        "correct the worker's args; `tightrank plan` shows the whole command",
        "argparse", shape="logged"),
    # SGLang's server has its model by then, says this, and hangs: nobody would hear of it before limits.start_stall.
    Signature(
        "port-taken",
        r"\[Errno 98\] error while attempting to bind on address \('(?P<host>[^']*)', (?P<port>\d+)",
        "The engine's port {port} is in use.",
        "end what listens there (ss -ltnp), or give the worker another port",
        "asyncio, uvicorn", shape="any"),
    Signature(
        "port-taken",
        r"\[Errno 98\] Address already in use",
        "A port that the engine needs is in use.",
        "end what listens there (ss -ltnp), or give the worker another port",
        "asyncio, uvicorn", shape="any", decisive=False),
    Signature(
        "port-taken",
        r"Port is already in use\. |(?:port|The port) (?P<port>\d+) is (?:already )?in use",
        "A port that the engine needs is in use.",
        "end what listens there (ss -ltnp), or give the worker another port",
        "SGLang 0.5.23 server_args.py, utils/network.py", decisive=False),
    Signature(
        "engine-error",
        r"The server socket has failed to listen on any local network address\. port: (?P<port>\d+)",
        "A port that the engine chose for itself ({port}) was in use.",
        "nothing: the next start chooses another",
        "torch TCPStore", decisive=False),
    Signature(
        "model-unreadable",
        r"Cannot find any model weights with `(?P<model>.{1,200}?)`",
        "There are no weights in {model}.",
        "copy the weights (*.safetensors) there",
        "both model_loader"),
    Signature(
        "model-unreadable",
        r"(?:Error while deserializing(?: header)?: (?P<why>.{1,120})|invalid load key, .{1,40}|Unable to load weights from|"
        r"PytorchStreamReader failed .{1,120})",
        "A file of weights cannot be read: it is cut, damaged, or a pointer in place of the file.",
        "compare the sizes of the weight files with the origin and fetch them again",
        "safetensors 0.8, torch", decisive=False, rank=Rank.RAISED),
    Signature(
        "model-unreadable",
        r"(?:\[Errno 2\] )?No such file or directory: ['\"]?(?P<file>[^'\"]{1,300}\.(?:safetensors|bin|gguf|pt))['\"]?",
        "A file of weights is missing: {file}.",
        "fetch the model again, whole: the index names files that are not there",
        "CPython, safetensors 0.8", decisive=False, error="FileNotFoundError"),
    Signature(
        "model-unreadable",
        r"It looks like the config file at '(?P<file>[^']{1,300})' is not a valid JSON file",
        "The model's config.json is not JSON.",
        "fetch config.json again",
        "transformers 4.30 - 5.19 configuration_utils.py", decisive=False),
    Signature(
        "engine-binary-missing",
        r"tightrank: cannot start the engine: (?P<program>.+): (?P<why>[^:]+)$",
        "The engine's program cannot be started: {program}: {why}.",
        "look at `command`: the path, its permissions, the interpreter that its first line names",
        "supervisor/tightrank/exec_engine.py", shape="logged"),
    Signature(
        "rank-died",
        r"\[[^\]]{0,200}/gloo/transport/[^\]]{0,100}\] .{0,100}Connection (?:reset|closed) by peer",
        "A rank lost its connection to another one: the other one ended first.",
        "see the last lines of the other ranks in the log",
        "torch gloo", start_only=False, decisive=False, rank=Rank.VAGUE, confidence="likely"),
    Signature(
        "engine-error",
        r"Fatal Python error: (?P<why>.+)",
        "A process of the engine crashed: {why}",
        "see the stacks that follow this line in the log",
        "CPython faulthandler", shape="logged", start_only=False, decisive=False, rank=Rank.VAGUE),
)

# After all others: what an engine's own checks of its configuration say.
LAST: tuple[Signature, ...] = (
    Signature(
        "arguments-invalid",
        r"(?P<why>.{1,300})",
        "The engine refused its configuration: {why}",
        "correct the worker's args as the line says; `tightrank plan` shows the whole command",
        "pydantic: vLLM 0.20.2 - 0.33.0 config/, SGLang 0.5.23", decisive=False, error="Value error", confidence="likely"),
)
