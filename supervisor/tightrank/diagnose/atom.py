"""ATOM: what it prints when a start, or the engine, fails. Its GB and MB are powers of two."""
from __future__ import annotations

from collections.abc import Mapping
from math import floor

from tightrank.diagnose.signature import Numbers, Rank, Signature

_SOURCE = "ATOM v0.1.5 - 2026-08-22 model_engine/model_runner.py"
_REQUEST_CACHE = (r"Per-request cache tensor \((?P<state_gib>[\d.]+)GB for (?P<slots>\d+) slots\) exceeds available KV "
                  r"budget \((?P<kv_cache_gib>-?[\d.]+)GB\)")
_SUMMARY = "The caches of {slots} requests need {state_gib} GiB; {kv_cache_gib} GiB are there."


def _fewer_requests(numbers: Numbers) -> Mapping[str, str]:
    """What --max-num-seqs fits, by proportion, with 5 % left for the paged pool, which needs a block at least."""
    now = numbers.get("requests", numbers["slots"])
    fits = floor(now * numbers["kv_cache_bytes"] / numbers["state_bytes"] * 0.95)
    return {"fewer": f"--max-num-seqs {fits} at most (now {now:.0f})" if fits > 0 else
            f"a much lower --max-num-seqs (now {now:.0f}) and a lower --max-num-batched-tokens"}


def _share_too(numbers: Numbers) -> Mapping[str, str]:
    """ATOM computes the utilization to set as if nothing but it bound: where it is set already, the headroom binds."""
    share = numbers["least_utilization"]
    more = (f"--gpu-memory-utilization over {share:.2f} (now {numbers['utilization']:.2f}) only where every rank has the "
            "memory free" if share > numbers["utilization"] else
            "--gpu-memory-utilization does not help: the headroom of the tightest rank binds")
    return {"change": f"{_fewer_requests(numbers)['fewer']}; {more}"}


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "state-cache-too-small",
        _REQUEST_CACHE + r" at --gpu-memory-utilization (?P<utilization>[\d.]+)\. Only (?P<free_gib>[\d.]+)GB is physically "
        r"free .{0,300}?reduce --max-num-seqs \(currently (?P<requests>\d+)\)",
        _SUMMARY + " Only {free_gib} GiB of device memory are free.",
        "{fewer}, or free the memory that others hold; --gpu-memory-utilization (now {utilization}) does not help",
        _SOURCE, derive=_fewer_requests),
    Signature(
        "state-cache-too-small",
        _REQUEST_CACHE + r" at --gpu-memory-utilization (?P<utilization>[\d.]+)\. Set --gpu-memory-utilization >= "
        r"(?P<least_utilization>[\d.]+) .{0,300}?reduce --max-num-seqs \(currently (?P<requests>\d+)\)",
        _SUMMARY, "{change}", _SOURCE, derive=_share_too),
    Signature(
        "state-cache-too-small",
        _REQUEST_CACHE + r" at --gpu-memory-utilization (?P<utilization>[\d.]+)\. Even --gpu-memory-utilization 1\.0 is "
        r"insufficient .{0,200}?reduce --max-num-seqs \(currently (?P<requests>\d+)\)",
        _SUMMARY,
        "{fewer}; no --gpu-memory-utilization is enough",
        _SOURCE, derive=_fewer_requests),
    Signature(
        "state-cache-too-small", _REQUEST_CACHE, _SUMMARY, "{fewer}",
        "ATOM v0.1.3, v0.1.4 model_engine/model_runner.py", derive=_fewer_requests),
    Signature(
        "kv-pool-too-small",
        r"Not enough memory for KV cache with block size\((?P<block_tokens>\d+)\)\. At least 1 block "
        r"\((?P<block_mib>[\d.]+)MB\) is required, but available_for_kv=(?P<kv_cache_mib>-?[\d.]+)MB"
        r"(?: \(budget=(?P<budget_gib>[\d.]+)GB, peak_torch=(?P<peak_gib>[\d.]+)GB)?",
        "{kv_cache_mib} MiB are left for the KV cache; one block takes {block_mib} MiB.",
        "lower --max-num-batched-tokens (the peak of the warm-up) or --max-num-seqs; raise --gpu-memory-utilization only where "
        "every rank has the memory free",
        "ATOM v0.1.2 - 2026-08-22 model_engine/model_runner.py"),
    Signature(
        "rank-died",
        r"AsyncIOProcManager\(\w+\): \[(?P<process>[\w/]+)\] proc died unexpectedly"
        r"(?: \(exitcode=(?P<exit_code>-?\d+|None)\))?, shutting down\.",
        "{process} ended (exit code {exit_code}; a negative one is a signal).",
        "see its last lines in the log",
        "ATOM v0.1.2 - 2026-08-22 model_engine/async_proc.py", shape="logged", start_only=False, decisive=False,
        rank=Rank.VAGUE),
    Signature(
        "tensor-parallel-invalid",
        r"Calculated local_device_rank=(?P<wanted_device>\d+) exceeds available GPUs \((?P<devices>\d+)\)",
        "Rank {wanted_device} has no device: {devices} are there.",
        "tensor_parallel x pipeline_parallel of at most {devices}, or more devices",
        "ATOM v0.1.5 - 2026-08-22 model_engine/model_runner.py"),
    Signature(
        "engine-binary-missing",
        r"(?P<program>/\S{1,300}): Error while finding module specification for 'atom\.entrypoints\.[\w.]+' "
        r"\(ModuleNotFoundError: No module named '(?P<module>atom[\w.]*)'\)",
        "{program} has no ATOM: no module {module}.",
        "`command`: the Python of ATOM's own environment; the package `atom` of PyPI is another project, AMD's is at "
        "github.com/ROCm/ATOM",
        "CPython runpy", shape="logged"),
    Signature(
        "engine-error",
        r"(?:run_engine: exception: |Engine Core Mgr: (?:Received unexpected SHUTDOWN signal|Expected READY signal|"
        r"Some processes failed to start|Failed to initialize all EngineCores)|Failed to start all EngineCore processes)",
        "The engine reported a fatal error.",
        "see the engine's log above this line",
        "ATOM v0.1.2 - 2026-08-22 model_engine/engine_core.py, engine_core_mgr.py", shape="any", start_only=False,
        decisive=False, rank=Rank.CONSEQUENCE, confidence="likely"),
    Signature(
        "out-of-memory",
        r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<asked>[\d.]+ [KMG]iB)\.",
        "The device ran out of memory: {asked} were asked for.",
        "leave more memory free: the hook headroom, fewer requests (--max-num-seqs), or smaller prefills "
        "(--max-num-batched-tokens)",
        "torch", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "out-of-memory",
        r"(?:(?:CUDA|HIP) (?:error: )?out of memory|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory$|"
        r"\[Errno 12\] Cannot allocate memory|std::bad_alloc)",
        "The device or the host ran out of memory.",
        "leave more memory free: the hook headroom, fewer requests (--max-num-seqs), or smaller prefills "
        "(--max-num-batched-tokens)",
        "torch, C++", start_only=False, decisive=False, rank=Rank.RAISED),
)
