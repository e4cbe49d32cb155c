"""SGLang: what it prints when a start, or the engine, fails."""
from __future__ import annotations

from tightrank.diagnose import derive
from tightrank.diagnose.signature import Rank, Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "kv-pool-too-small",
        r"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=(?P<fraction>[\d.]+)\. Raise "
        r"--mem-fraction-static above (?P<least_fraction>\d*\.\d+)",
        "The weights leave no memory for the KV cache at --mem-fraction-static {fraction}; it takes more than "
        "{least_fraction}.",
        "--mem-fraction-static above {least_fraction} (now {fraction})",
        "SGLang 0.5.14 - 0.5.23 mem_cache/kv_cache_configurator.py"),
    Signature(
        "kv-pool-too-small",
        r"Not enough memory\. Please try to increase --mem-fraction-static\.(?: Current value: "
        r"(?:self\.server_args\.)?mem_fraction_static=(?P<fraction>[\d.]+))",
        "--mem-fraction-static {fraction} leaves no memory for the KV cache.",
        "raise --mem-fraction-static (now {fraction}); lowering it is for running out of memory later, not for this",
        "SGLang 0.5.8 - 0.5.23 model_executor/pool_configurator.py"),
    Signature(
        "kv-pool-too-small",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "No memory is left for the KV cache.",
        "raise --mem-fraction-static; lowering it is for running out of memory later, not for this",
        "SGLang 0.5.8 - 0.5.23 model_executor/pool_configurator.py"),
    Signature(
        "kv-pool-too-small",
        r"(?:The DSV4 )?SWA pool cap \((?P<swa_tokens>\d+) tokens, (?P<swa_gib>[\d.]+) Gi?B\) leaves no room for the full KV "
        r"pool within the available (?P<free_gib>[\d.]+) Gi?B",
        "The sliding-window pool takes {swa_gib} of the {free_gib} GiB for KV caches and leaves none for full attention.",
        "lower --max-running-requests, or raise --mem-fraction-static",
        "SGLang 0.5.23 model_executor/pool_configurator.py"),
    Signature(
        "kv-pool-too-small",
        r"SWA pool \((?P<swa_tokens>\d+) tokens\) cannot hold even one request: the prefill admission floor is "
        r"sliding_window_size \((?P<window_tokens>\d+)\)",
        "The sliding-window pool of {swa_tokens} tokens cannot hold one window of {window_tokens} tokens.",
        "raise --swa-full-tokens-ratio, or --mem-fraction-static",
        "SGLang 0.5.23 model_executor/pool_configurator.py"),
    Signature(
        "kv-pool-too-small",
        r"\[unified-memory-pool\] .{0,200}byte budget (?P<budget_bytes>\d+) cannot fit ONE",
        "A memory budget of {budget_bytes} bytes cannot hold one request.",
        "raise --mem-fraction-static",
        "SGLang 0.5.23 mem_cache/unified_memory_pool.py"),
    Signature(
        "kv-pool-too-small",
        r"Memory pool size is too small",
        "The KV cache cannot hold one request.",
        "raise --mem-fraction-static (or --max-total-tokens where it is set)",
        "SGLang 0.5.8 - 0.5.23 managers/tp_worker.py"),
    Signature(
        "kv-pool-too-small",
        r'\{"error":\{"message":"Input length \((?P<warmup_tokens>\d+) tokens\) exceeds the maximum allowed length '
        r"\((?P<allowed_tokens>-?\d+) tokens\)",
        "The KV cache leaves room for requests of {allowed_tokens} tokens, and SGLang's own first request has {warmup_tokens}.",
        "raise --max-total-tokens, or leave it out; else raise --mem-fraction-static, or --context-length where that is small",
        "SGLang 0.5.16 - 0.5.23 entrypoints/warmup.py, managers/tokenizer_manager.py", decisive=False,
        error="AssertionError"),
    Signature(
        "arguments-invalid",
        r"SGLANG_CPU_OMP_THREADS_BIND is not set, in this case, the total number of ranks \(.{1,60} = (?P<ranks>\d+)\) should "
        r"be smaller than or equal to number of numa node on the machine (?P<nodes>\d+)",
        "{ranks} ranks on a CPU with {nodes} NUMA nodes need to be told which cores each of them has.",
        "env SGLANG_CPU_OMP_THREADS_BIND of the worker: the cores of each rank, as 0-31|32-63",
        "SGLang 0.5.3 - 0.5.23 model_executor/model_runner.py", decisive=False, error="AssertionError"),
    Signature(
        "state-cache-too-small",
        r"Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache\. Computed "
        r"max_mamba_cache_size=(?P<slots>-?\d+) \(total_rest_memory=(?P<rest_gb>-?[\d.]+) GB, "
        r"mamba_cache_per_req=(?P<per_request_mib>[\d.]+) MB\)",
        "{rest_gb} GB are left for the state cache and one request takes {per_request_mib} MiB: room for {slots} requests.",
        "{fewer}, or raise --mem-fraction-static",
        "SGLang 0.5.23 mem_cache/kv_cache_configurator.py", derive=derive.state_slots),
    Signature(
        "state-cache-too-small",
        r"(?:Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache|Hybrid \(mamba/linear-attention\) state "
        r"cache is too small to serve any requests|int8 mamba checkpoint pool needs ~)",
        "The state cache of a hybrid model does not fit.",
        "lower --max-running-requests, or raise --mem-fraction-static",
        "SGLang 0.5.23 mem_cache/kv_cache_configurator.py, mamba_checkpoint_pool.py"),
    Signature(
        "device-memory-taken",
        r"The memory capacity is unbalanced\. Some GPUs may be occupied by other processes",
        "One device has over 10 % less free memory than another: something else uses it.",
        "free the devices of this worker, or choose others",
        "SGLang 0.5.8 - 0.5.23 distributed/bootstrap.py (raised only where it is switched on)"),
    Signature(
        "host-memory-too-small",
        r"Not enough host memory available\. Requesting (?P<wanted_gb>[\d.]+) GB but only have (?P<free_gb>[\d.]+) GB free",
        "The hierarchical cache asks for {wanted_gb} GB of host memory for each rank; {free_gb} GB are there after its "
        "reserve.",
        "{change}",
        "SGLang 0.4.9 - 0.5.23 mem_cache/pool_host/base.py", derive=derive.host_cache),
    Signature(
        "graph-capture-out-of-memory",
        r"Capture cuda graph failed: .{0,40}(?:out of memory|OutOfMemory)",
        "CUDA graph capture ran out of device memory after the KV cache took its share.",
        "lower --mem-fraction-static (0.8 or 0.7) or the largest captured batch (--cuda-graph-max-bs-decode; before 0.5.18 "
        "--cuda-graph-max-bs)",
        "SGLang 0.5.8 - 0.5.23 decode_cuda_graph_runner.py"),
    Signature(
        "rank-died",
        r"Capture cuda graph failed: (?P<why>.{0,200}Connection (?:closed|reset) by peer)",
        "A rank lost its connection to another one in CUDA graph capture ({why}): the other one ended first.",
        "see the last lines of the other ranks in the log",
        "SGLang 0.4 - 0.5.23 decode_cuda_graph_runner.py", decisive=False, rank=Rank.VAGUE, confidence="likely"),
    Signature(
        "custom-all-reduce-failed",
        r"Capture cuda graph failed: (?P<why>.{0,200}custom_all_reduce.{0,200}|invalid argument$)",
        "The engine's own all-reduce failed in CUDA graph capture: {why}",
        "--disable-custom-all-reduce",
        "SGLang 0.4 - 0.5.23 decode_cuda_graph_runner.py", decisive=False, confidence="likely"),
    Signature(
        "graph-capture-failed",
        r"Capture cuda graph failed: (?P<why>.{1,200})",
        "CUDA graph capture failed, and not for lack of memory: {why}",
        "see the line, then start without graphs to compare (--disable-cuda-graph): slower, and it shows what capture hides",
        "SGLang 0.4 - 0.5.23 decode_cuda_graph_runner.py", decisive=False, rank=Rank.RAISED),
    Signature(
        "arguments-invalid",
        r"Warning: (?:User-specified|Target model's) context_length \((?P<context_tokens>\d+)\) is greater than the derived "
        r"context_length \((?P<largest_context_tokens>\d+)\)",
        "--context-length {context_tokens} is longer than the model can ({largest_context_tokens}).",
        "--context-length {largest_context_tokens} at most (line.context)",
        "SGLang 0.4 - 0.5.23 configs/model_config.py"),
    Signature(
        "dtype-unsupported",
        r"The quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: "
        r"(?P<minimum_capability>\d+)\. Current capability: (?P<capability>\d+)",
        "Quantization {method} needs device capability {minimum_capability}; this one has {capability}.",
        "a model with another quantization, or another device",
        "SGLang 0.4 - 0.5.23 model_loader/loader.py"),
    Signature(
        "dtype-unsupported",
        r"torch\.(?P<dtype>\w+) is not supported for quantization method (?P<method>\S+)\. Supported dtypes: "
        r"(?P<dtypes>.{1,100})",
        "Quantization {method} does not work with {dtype}.",
        "--dtype: one of {dtypes}, or auto",
        "SGLang 0.4 - 0.5.23 model_loader/loader.py"),
    Signature(
        "kv-accounting-failed",
        r".{0,60}memory leak detected!",
        "SGLang's check of its KV book-keeping failed and ended the engine; no memory is lost.",
        "env SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0 makes it a warning; report it with the features in use",
        "SGLang 0.4.6 - 0.5.23 invariant_checker.py", start_only=False, decisive=False),
    Signature(
        "tensor-parallel-invalid",
        r"(?P<heads>\d+) is not divisible by (?P<tensor_parallel>\d+)$",
        "A dimension of the model ({heads}) cannot be divided by {tensor_parallel}.",
        "tensor_parallel: {sizes}",
        "SGLang 0.3 - 0.5.23 distributed/utils.py", decisive=False, confidence="likely", derive=derive.tensor_parallel),
    Signature(
        "kv-pool-exhausted",
        r"(?:Prefill|Decode) out of memory\. Try to lower your batch size|alloc_req_slots runs out of memory",
        "The KV cache ran out of slots in a step.",
        "lower --max-running-requests or --max-prefill-tokens; report it: the scheduler should have held the request back",
        "SGLang 0.5.8 - 0.5.23 mem_cache/allocation.py", shape="any", start_only=False, decisive=False),
    Signature(
        "rank-died",
        r"Rank (?P<rank>\d+) scheduler died during initialization \(exit code: (?P<exit_code>-?\d+)\)",
        "Scheduler rank {rank} ended while starting (exit code {exit_code}).",
        "see its last lines in the log",
        "SGLang 0.5.10 - 0.5.23 entrypoints/engine.py (its hint at the OOM killer is printed for every code)",
        decisive=False, rank=Rank.VAGUE),
    Signature(
        "rank-died",
        r"Rank (?P<rank>\d+) scheduler is dead\. Please check if there are relevant logs",
        "Scheduler rank {rank} ended while starting.",
        "see its last lines in the log",
        "SGLang 0.4 - 0.5.9 entrypoints/engine.py", shape="any", decisive=False, rank=Rank.VAGUE),
    Signature(
        "rank-died",
        r"Subprocess (?P<process>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<exit_code>-?\d+)",
        "{process} (pid {pid}) ended with exit code {exit_code}.",
        "see its last lines in the log",
        "SGLang 0.5.10 - 0.5.23 utils/watchdog.py", shape="logged", start_only=False, decisive=False, rank=Rank.VAGUE),
    Signature(
        "engine-watchdog",
        r"(?P<process>(?:\w+ )?)[Ww]atchdog timeout \((?:self\.)?watchdog_timeout=(?P<watchdog_seconds>[\d.]+)(?:, "
        r"(?:self\.)?soft=False)?\)",
        "{process}made no step for {watchdog_seconds} s; its own watchdog ends the engine.",
        "find what hung (the stacks are in the log); a longer --watchdog-timeout where one step may take that long",
        "SGLang 0.4 - 0.5.23 utils/watchdog.py", shape="logged", start_only=False, decisive=False),
    Signature(
        "engine-error",
        r"(?:Scheduler hit an exception|Received sigquit from a child process|SIGQUIT received\. signum|Initialization "
        r"failed\. Please see the error messages above|DetokenizerManager hit an exception|TokenizerManager hit an exception|"
        r"TP rank \d+ could finish the model loading, but)",
        "The engine reported a fatal error.",
        "see the engine's log above this line",
        "SGLang 0.5.8 - 0.5.23", shape="any", start_only=False, decisive=False, rank=Rank.CONSEQUENCE,
        confidence="likely"),
    Signature(
        "out-of-memory",
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<asked>[\d.]+ [KMG]iB)\.(?: GPU (?P<device>\d+) has a total "
        r"capacity of (?P<total_gib>[\d.]+) GiB of which (?P<free>[\d.]+ [KMG]iB|[\d.]+ bytes) is free)?",
        "The device ran out of memory: {asked} were asked for.",
        "leave more memory free: a lower --mem-fraction-static, or smaller prefill chunks (line.budget, line.maximum)",
        "torch", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "out-of-memory",
        r"(?:(?:CUDA|HIP) (?:error: )?out of memory|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory$|"
        r"\[Errno 12\] Cannot allocate memory|std::bad_alloc)",
        "The device or the host ran out of memory.",
        "leave more memory free: a lower --mem-fraction-static, or smaller prefill chunks (line.budget, line.maximum)",
        "torch, C++", start_only=False, decisive=False, rank=Rank.RAISED),
)
