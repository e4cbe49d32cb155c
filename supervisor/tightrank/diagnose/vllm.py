"""vLLM: what it prints when a start, or the engine, fails."""
from __future__ import annotations

from tightrank.diagnose import derive
from tightrank.diagnose.signature import Rank, Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "context-exceeds-kv-pool",
        r"To serve at least one request with the models?'s? max seq len \((?P<context_tokens>\d+)\), "
        r"\((?P<needed_gib>[\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory "
        r"\((?P<kv_cache_gib>[\d.]+) GiB\)\. Based on the available memory, the estimated maximum model length is "
        r"(?P<largest_context_tokens>\d+)",
        "One request of {context_tokens} tokens needs {needed_gib} GiB of KV cache; {kv_cache_gib} GiB are there, enough for "
        "{largest_context_tokens} tokens.",
        "--max-model-len {largest_context_tokens}, or more memory for the KV cache (--gpu-memory-utilization; on the CPU "
        "VLLM_CPU_KVCACHE_SPACE)",
        "vLLM 0.20.2 - 0.32.0 v1/core/kv_cache_utils.py"),
    Signature(
        "context-exceeds-kv-pool",
        r"To serve at least one request with the models?'s? max seq len \((?P<context_tokens>\d+)\), "
        r"\((?P<needed_gib>[\d.]+) GiB KV cache is needed, which is larger than the available KV cache memory "
        r"\((?P<kv_cache_gib>[\d.]+) GiB\)",
        "One request of {context_tokens} tokens needs {needed_gib} GiB of KV cache; {kv_cache_gib} GiB are there.",
        "lower --max-model-len (now {context_tokens}), or more memory for the KV cache (--gpu-memory-utilization; on the CPU "
        "VLLM_CPU_KVCACHE_SPACE)",
        "vLLM 0.20.2 - 0.32.0 v1/core/kv_cache_utils.py"),
    Signature(
        "context-exceeds-kv-pool",
        r"The model's max seq len \((?P<context_tokens>\d+)\) is larger than the maximum number of tokens that can be stored "
        r"in KV cache \((?P<largest_context_tokens>\d+)\)",
        "The KV cache holds {largest_context_tokens} tokens, one request may have {context_tokens}.",
        "--max-model-len {largest_context_tokens}",
        "vLLM before 0.10"),
    Signature(
        "kv-pool-too-small",
        r"No available memory for the cache blocks\.",
        "Weights and activations leave no memory for the KV cache.",
        "raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs; a smaller or quantized model "
        "also helps",
        "vLLM 0.20.2 - 0.32.0 v1/core/kv_cache_utils.py"),
    Signature(
        "kv-pool-too-small",
        r"Cannot auto-fit max_model_len: not enough GPU memory available",
        "No memory is left for the KV cache of even one token.",
        "raise --gpu-memory-utilization",
        "vLLM 0.32.0 v1/core/kv_cache_utils.py"),
    Signature(
        "device-memory-taken",
        r"Free memory on device \S+ \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on startup is less than desired GPU "
        r"memory utilization \((?P<utilization>[\d.]+), (?P<wanted_gib>[\d.]+) GiB\)",
        "{free_gib} of {total_gib} GiB of device memory are free; --gpu-memory-utilization {utilization} asks for "
        "{wanted_gib} GiB.",
        "{change}",
        "vLLM 0.20.2 - 0.32.0 v1/worker/utils.py", derive=derive.lower_utilization),
    Signature(
        "device-memory-taken",
        r"Free memory on device \S+ \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on startup is less than the engine's "
        r"budget after excluding external process's weights \((?P<utilization>[\d.]+), (?P<wanted_gib>[\d.]+) GiB\)",
        "{free_gib} of {total_gib} GiB of device memory are free; the engine's own budget is {wanted_gib} GiB.",
        "lower --gpu-memory-utilization (now {utilization}), or free the memory that others hold",
        "vLLM 0.32.0 v1/worker/utils.py"),
    Signature(
        "device-memory-taken",
        r"Externally held weights on device \S+ \((?P<held_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) exceed the desired GPU "
        r"memory utilization \((?P<utilization>[\d.]+), (?P<wanted_gib>[\d.]+) GiB\)",
        "Weights held by another process take {held_gib} of {total_gib} GiB, more than the {wanted_gib} GiB asked for.",
        "raise --gpu-memory-utilization (now {utilization})",
        "vLLM 0.32.0 v1/worker/utils.py"),
    Signature(
        "host-memory-too-small",
        r"Available memory on node \S+ \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on startup is less than desired "
        r"CPU memory utilization \((?P<utilization>[\d.]+), (?P<wanted_gib>[\d.]+) GiB\)",
        "{free_gib} of {total_gib} GiB of this memory node are available; --gpu-memory-utilization {utilization} (it counts "
        "for the CPU too) asks for {wanted_gib} GiB.",
        "{change}",
        "vLLM 0.32.0 v1/worker/cpu_worker.py", derive=derive.lower_utilization),
    Signature(
        "host-memory-too-small",
        r"Available memory on node \S+ \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) on kv cache allocation is less "
        r"than requested memory for kv \((?P<wanted_gib>[\d.]+)(?:/[\d.]+)? GiB\)",
        "{free_gib} of {total_gib} GiB of this memory node are available; the KV cache asks for {wanted_gib} GiB.",
        "{change}",
        "vLLM 0.32.0 v1/worker/cpu_worker.py", derive=derive.kv_gib),
    Signature(
        "memory-profiling-disturbed",
        r"Error in memory profiling\. Initial free memory (?P<before_gib>[\d.]+) GiB, current free memory "
        r"(?P<after_gib>[\d.]+) GiB",
        "Free memory rose from {before_gib} to {after_gib} GiB while the engine was measuring: something else gave memory "
        "back.",
        "nothing: the next start measures again; keep other users of the device quiet while it starts",
        "vLLM 0.20.2 - 0.32.0 v1/worker/gpu_worker.py", decisive=False),
    Signature(
        "graph-capture-out-of-memory",
        r"(?:CUDA|HIP) out of memory occurred when warming up sampler with (?P<requests>\d+) dummy requests",
        "Warming up with {requests} requests ran out of device memory.",
        "{fewer}, or a lower --gpu-memory-utilization",
        "vLLM 0.20.2 - 0.33.0 v1/worker/gpu_model_runner.py", derive=derive.half_the_requests),
    Signature(
        "weights-too-large",
        r"Failed to load model - not enough GPU memory\.",
        "The model's weights do not fit into the device's memory.",
        "a larger tensor_parallel (more devices), a quantized model, or free the memory that others hold",
        "vLLM 0.10 - 0.33.0 v1/worker/gpu_model_runner.py", shape="logged", decisive=False),
    Signature(
        "arguments-invalid",
        r"Not enough allowed NUMA nodes to bind threads of (?P<ranks>\d+) local CPUWorkers",
        "{ranks} ranks on a CPU with fewer NUMA nodes need to be told which cores each of them has.",
        "env VLLM_CPU_OMP_THREADS_BIND of the worker: nobind, or the cores of each rank, as 0-31|32-63",
        "vLLM 0.8 - 0.33.0 v1/worker/cpu_worker.py", decisive=False, error="AssertionError"),
    Signature(
        "arguments-invalid",
        r"User-specified max_model_len \((?P<context_tokens>\d+)\) is greater than the derived max_model_len "
        r"\(\w+=(?P<largest_context_tokens>\d+)",
        "--max-model-len {context_tokens} is longer than the model can ({largest_context_tokens}).",
        "--max-model-len {largest_context_tokens} at most (line.context), or rope scaling where the model's author says how",
        "vLLM 0.2 - 0.33.0 config/model.py"),
    Signature(
        "tensor-parallel-invalid",
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<tensor_parallel>\d+)\)",
        "{heads} attention heads cannot be divided by tensor parallel size {tensor_parallel}.",
        "tensor_parallel: {sizes}",
        "vLLM 0.2 - 0.33.0 config/model.py", derive=derive.tensor_parallel),
    Signature(
        "tensor-parallel-invalid",
        r"(?P<heads>\d+) is not divisible by (?P<tensor_parallel>\d+)$",
        "A dimension of the model ({heads}) cannot be divided by {tensor_parallel}.",
        "tensor_parallel: {sizes}",
        "vLLM 0.2 - 0.33.0 distributed/utils.py", decisive=False, confidence="likely", derive=derive.tensor_parallel),
    Signature(
        "dtype-unsupported",
        r"Bfloat16 is only supported on GPUs with compute capability",
        "The device has no bfloat16.",
        "--dtype half",
        "vLLM 0.32.0 platforms/cuda.py"),
    Signature(
        "dtype-unsupported",
        r"The quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: "
        r"(?P<minimum_capability>\d+)\. Current capability: (?P<capability>\d+)",
        "Quantization {method} needs device capability {minimum_capability}; this one has {capability}.",
        "a model with another quantization, or another device",
        "vLLM 0.2 - 0.33.0 config/vllm.py"),
    Signature(
        "dtype-unsupported",
        r"torch\.(?P<dtype>\w+) is not supported for quantization method (?P<method>\S+)\. Supported dtypes: "
        r"(?P<dtypes>.{1,100})",
        "Quantization {method} does not work with {dtype}.",
        "--dtype: one of {dtypes}, or auto",
        "vLLM 0.2 - 0.33.0 config/vllm.py"),
    Signature(
        "rank-died",
        r"Worker proc (?P<process>\S+) died unexpectedly(?: \(exit code: (?P<exit_code>-?\d+|None)\))?",
        "{process} ended (exit code {exit_code}; a negative one is a signal).",
        "see its last lines in the log",
        "vLLM 0.20.2 - 0.32.0 v1/executor/multiproc_executor.py", shape="logged", start_only=False, decisive=False,
        rank=Rank.VAGUE),
    Signature(
        "rank-died",
        r"Engine core initialization failed\. See root cause above\. Failed core proc\(s\): "
        r"\{(?:'[^'{}]{1,60}': (?P<exit_code>-\d{1,3})(?:, )?){0,64}\}",     # by a signal, or seen by its closed pipe alone
        "The engine core ended while starting and left no Python error: it was killed.",
        "see what ended it (the guard's record, the kernel's log)",
        "vLLM 0.20.2 - 0.32.0 v1/engine/utils.py", decisive=False, rank=Rank.CONSEQUENCE, confidence="likely"),
    Signature(
        "start-stalled",
        r"Timed out waiting for engine core processes to start\..{0,200} Waited (?P<waited_seconds>[\d.]+)s",
        "vLLM gave up waiting for its engine core after {waited_seconds} s.",
        "env VLLM_ENGINE_READY_TIMEOUT_S over {waited_seconds}, where loading takes that long",
        "vLLM 0.32.0 v1/engine/core_client.py", decisive=False),
    Signature(
        "arguments-invalid",
        r"Failed to load the model config\. If the model is a custom model .{0,200}trust_remote_code=True",
        "The model needs code of its own.",
        "--trust-remote-code, if you trust the model's author: it runs their code",
        "vLLM 0.32.0 transformers_utils/config.py", decisive=False),
    Signature(
        "engine-watchdog",
        r"RPC call to (?P<method>\w+) timed out",
        "A worker did not answer {method} in time.",
        "find what hung; watch free memory at that time",
        "vLLM 0.32.0 v1/executor/multiproc_executor.py", start_only=False, decisive=False, rank=Rank.VAGUE),
    Signature(
        "engine-error",
        r"(?:EngineCore failed to start|EngineCore encountered a fatal error|EngineCore encountered an issue|Engine core "
        r"initialization failed|WorkerProc failed to start|WorkerProc initialization failed|WorkerProc hit an exception|"
        r"\[shutdown\] MPClient: engine core exited|Frontend process failed|(?:Async)?EngineDeadError|Background loop has "
        r"errored already|MQLLMEngine is already dead)",
        "The engine reported a fatal error.",
        "see the engine's log above this line",
        "vLLM 0.20.2 - 0.32.0", shape="any", start_only=False, decisive=False, rank=Rank.CONSEQUENCE,
        confidence="likely"),
    Signature(
        "out-of-memory",
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<asked>[\d.]+ [KMG]iB)\.(?: GPU (?P<device>\d+) has a total "
        r"capacity of (?P<total_gib>[\d.]+) GiB of which (?P<free>[\d.]+ [KMG]iB|[\d.]+ bytes) is free)?",
        "The device ran out of memory: {asked} were asked for.",
        "leave more memory free: a lower --gpu-memory-utilization, or smaller prefill chunks (line.budget, line.maximum)",
        "torch", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "out-of-memory",
        r"(?:(?:CUDA|HIP) (?:error: )?out of memory|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory$|"
        r"\[Errno 12\] Cannot allocate memory|std::bad_alloc)",
        "The device or the host ran out of memory.",
        "leave more memory free: a lower --gpu-memory-utilization, or smaller prefill chunks (line.budget, line.maximum)",
        "torch, C++", start_only=False, decisive=False, rank=Rank.RAISED),
)
