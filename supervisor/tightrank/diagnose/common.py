"""Texts of what the engines are built on: argparse, sockets, the model hub, the kernel; and of our own adapter."""
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
        r"[\w./ -]{1,60}: error: (?P<why>unrecognized arguments: .*|argument .*|ambiguous option: .*|the following "
        r"arguments are required: .*)",
        "The engine refused its command line: {why}",
        "correct the worker's args; `tightrank plan` shows the whole command",
        "argparse", shape="logged"),
    Signature(
        "port-taken",
        r"\[Errno 98\] (?:Address already in use|error while attempting to bind on address \('(?P<host>[^']*)', "
        r"(?P<port>\d+))",
        "A port that the engine needs is in use.",
        "end what listens there (ss -ltnp), or give the worker another port",
        "asyncio, uvicorn", shape="any", decisive=False),
    Signature(
        "engine-error",
        r"The server socket has failed to listen on any local network address\. port: (?P<port>\d+)",
        "A port that the engine chose for itself ({port}) was in use.",
        "nothing: the next start chooses another",
        "torch TCPStore", decisive=False),
    Signature(
        "model-unreadable",
        r"Invalid repository ID or local directory specified: (?P<model>.{1,200})",
        "There is no model at {model}.",
        "model: a directory with config.json and the weights",
        "vLLM 0.32.0 transformers_utils/config.py", shape="any"),
    Signature(
        "model-unreadable",
        r"Cannot find any model weights with `(?P<model>.{1,200}?)`",
        "There are no weights in {model}.",
        "copy the weights (*.safetensors) there",
        "both model_loader"),
    Signature(
        "model-unreadable",
        r"(?:Error while deserializing header|Repo id must be in the form|Can't load the configuration of |.{1,200} "
        r"does not appear to have a file named |Model architectures? .{1,200} (?:are|is) not supported|Unable to "
        r"load weights from)",
        "The engine could not read the model: see the line.",
        "check the model's files (sizes, config.json) and that this release of the engine knows its architecture",
        "safetensors, huggingface_hub, transformers, vLLM registry", decisive=False),
    Signature(
        "arguments-invalid",
        r"(?:The repository (?:for )?)?.{1,200} (?:contains custom code which must be executed|requires you to execute "
        r"the configuration file)",
        "The model needs code of its own.",
        "--trust-remote-code, if you trust the model's author: it runs their code",
        "transformers dynamic_module_utils", decisive=False),
    Signature(
        "model-unreadable",
        r"(?P<status>40[134]) Client Error.{0,300}",
        "The model hub refused the model ({status}).",
        "check the model's name and revision, and the hub's token; or give a local directory",
        "huggingface_hub", decisive=False, confidence="likely"),
    Signature(
        "killed-by-oom",
        r"(?:oom-kill:constraint=(?P<constraint>\w+),.*\btask=(?P<task>[^,]+),pid=(?P<pid>\d+)|Out of memory: "
        r"Killed process (?P<pid2>\d+) \((?P<task2>[^)]*)\))",
        "The kernel's OOM killer ended a process of the worker.",
        "give the host or container more memory, or the engine less; raise guard.floor so that the guard acts first",
        "Linux mm/oom_kill.c", shape="kernel", start_only=False, decisive=False),
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
        "torch gloo", start_only=False, decisive=False, rank=Rank.RAISED, confidence="likely"),
    Signature(
        "engine-error",
        r"what\(\): {1,2}(?P<why>.+)",
        "C++ code of the engine ended its process: {why}",
        "see the lines around this one in the log",
        "libstdc++ std::terminate", shape="logged", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "engine-error",
        r"Fatal Python error: (?P<why>.+)",
        "A process of the engine crashed: {why}",
        "see the stacks that follow this line in the log",
        "CPython faulthandler", shape="logged", start_only=False, decisive=False, rank=Rank.RAISED),
)
