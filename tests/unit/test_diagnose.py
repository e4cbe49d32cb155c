"""The engines' own words -> cause, numbers and the flag to change. The lines are written from the formats in their sources."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank.diagnose import ExitInfo, atom, common, deciding_line, diagnose, sglang, vllm
from tightrank.errors import CAUSES
from tightrank.records import Line

CORE = "\x1b[0;36m(EngineCore pid=4242)\x1b[0;0m ERROR 11-29 22:10:11 [core.py:1510] "
WORKER = "(Worker_TP0 pid=77) ERROR 11-29 22:10:11 [multiproc_executor.py:790] "
SG = "[2026-11-29 22:10:11 TP0] "
GIB = 2**30


def lines(*texts: str, stream: str = "stderr", apart: float = 0.01) -> list[Line]:
    return [Line(100 + n * apart, 1000 + n * apart, stream, text) for n, text in enumerate(texts)]


def ended(code: int | None = 1, *, starting: bool = True, role: str = "main", oom_killed: bool = False) -> ExitInfo:
    return ExitInfo(code, starting, role, oom_killed)


AT = "[atom 22:10:11] "
REQUESTS = ("RuntimeError: Per-request cache tensor (12.50GB for 512 slots) exceeds available KV budget ({}GB) at "
            "--gpu-memory-utilization 0.85.")
CONTEXT = ("To serve at least one request with the {}'s max seq len (8192), (2.5 GiB KV cache is needed, which is larger "
           "than the available KV cache memory (1.0 GiB). {}Try increasing `gpu_memory_utilization`")
ESTIMATE = "Based on the available memory, the estimated maximum model length is 3264. "

SIZING = [
    ("vllm", CORE + "ValueError: " + CONTEXT.format("model", ESTIMATE), "context-exceeds-kv-pool", "--max-model-len 3264",
     {"context_tokens": 8192, "largest_context_tokens": 3264, "needed_bytes": 2.5 * GIB, "kv_cache_bytes": GIB}),
    ("vllm", "ValueError: " + CONTEXT.format("models", ""), "context-exceeds-kv-pool", "lower --max-model-len (now 8192)",
     {"context_tokens": 8192}),
    ("vllm", CORE + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
     "kv-pool-too-small", "raise --gpu-memory-utilization", {}),
    ("vllm", WORKER + "ValueError: Free memory on device cuda:0 (20.5/80.0 GiB) on startup is less than desired GPU memory "
     "utilization (0.92, 73.6 GiB). Decrease GPU memory utilization", "device-memory-taken",
     "--gpu-memory-utilization 0.24", {"free_bytes": 20.5 * GIB, "total_bytes": 80 * GIB, "utilization": 0.92}),
    ("vllm", WORKER + "ValueError: Free memory on device cuda:0 (0.2/80.0 GiB) on startup is less than desired GPU memory "
     "utilization (0.92, 73.6 GiB).", "device-memory-taken", "free the memory that others hold", {}),
    ("vllm", "ValueError: Available memory on node 0 (10.34/14.09 GiB) on kv cache allocation is less than requested memory "
     "for kv (60.0 GiB). Decrease --kv-cache-memory-bytes", "host-memory-too-small", "VLLM_CPU_KVCACHE_SPACE=9",
     {"wanted_bytes": 60 * GIB}),
    ("vllm", "ValueError: Available memory on node 0 (7.0/14.0 GiB) on startup is less than desired CPU memory utilization "
     "(0.92, 12.9 GiB). On the CPU backend", "host-memory-too-small", "--gpu-memory-utilization 0.49", {}),
    ("vllm", "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try",
     "graph-capture-out-of-memory", "--max-num-seqs 512 (now 1024)", {"requests": 1024}),
    ("vllm", "  Value error, Total number of attention heads (12) must be divisible by tensor parallel size (8). [type=value",
     "tensor-parallel-invalid", "tensor_parallel: 1, 2, 3, 4, 6 or 12 (a divisor of 12)", {"heads": 12, "tensor_parallel": 8}),
    ("vllm", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has",
     "dtype-unsupported", "--dtype half", {}),
    ("sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
     "mem_fraction_static=0.01", "kv-pool-too-small", "raise --mem-fraction-static (now 0.01)", {"fraction": 0.01}),
    ("sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "kv-pool-too-small",
     "raise --mem-fraction-static", {}),
    ("sglang", "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.01. Raise "
     "--mem-fraction-static above 0.153 (minimum viable = 1 - available/pre = 0.1022).", "kv-pool-too-small",
     "--mem-fraction-static above 0.153 (now 0.01)", {"fraction": 0.01, "least_fraction": 0.153}),
    ("sglang", "RuntimeError: SWA pool cap (4096 tokens, 1.50 GiB) leaves no room for the full KV pool within the available "
     "1.20 GiB. Reduce --max-running-requests", "kv-pool-too-small", "--max-running-requests", {"swa_bytes": 1.5 * GIB}),
    ("sglang", "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
     "max_mamba_cache_size=0 (total_rest_memory=-1.25 GB, mamba_cache_per_req=12.00 MB). Try: (1)", "state-cache-too-small",
     "--max-running-requests", {"slots": 0}),
    ("sglang", "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba",
     "state-cache-too-small", "--max-running-requests", {}),
    ("sglang", "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 34.87 GB free. Please",
     "host-memory-too-small", "--hicache-size 34 at most (GB, for each rank)", {"wanted_bytes": 40e9}),
    ("sglang", "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB.",
     "graph-capture-out-of-memory", "lower --mem-fraction-static", {}),
    ("sglang", "AssertionError: Memory pool size is too small", "kv-pool-too-small", "--mem-fraction-static", {}),
    ("sglang", "launch_server.py: error: unrecognized arguments: --mem-fracton", "arguments-invalid", "args", {}),
    ("vllm", "vllm serve: error: argument --port: invalid int value: 'x'", "arguments-invalid", "args", {}),
    ("vllm", "  Value error, Invalid repository ID or local directory specified: 'models/none'", "model-not-found",
     "config.json", {}),
    ("sglang", "RuntimeError: Cannot find any model weights with `models/tiny`", "model-unreadable", "safetensors", {}),
    ("vllm", "  Value error, User-specified max_model_len (262144) is greater than the derived max_model_len "
     "(max_position_embeddings=32768 or model_max_length=None in model's config.json). To allow", "arguments-invalid",
     "--max-model-len 32768 at most", {"context_tokens": 262144, "largest_context_tokens": 32768}),
    ("sglang", "ValueError: Warning: User-specified context_length (262144) is greater than the derived context_length (32768)."
     " This may lead", "arguments-invalid", "--context-length 32768 at most", {"largest_context_tokens": 32768}),
    ("vllm", CORE + "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 161 MiB required, 63 MiB free. "
     "Increase", "shared-memory-full", "--shm-size", {"needed_bytes": 161 << 20, "free_bytes": 63 << 20}),
    ("sglang", "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
     "max_mamba_cache_size=12 (total_rest_memory=1.25 GB, mamba_cache_per_req=102.40 MB). Try: (1)", "state-cache-too-small",
     "--max-running-requests 12 at most", {"slots": 12}),
    ("sglang", "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 0.87 GB free. Please",
     "host-memory-too-small", "leave --enable-hierarchical-cache out", {}),
    ("vllm", "  Value error, Total number of attention heads (7) must be divisible by tensor parallel size (2). [type=value",
     "tensor-parallel-invalid", "tensor_parallel: 1 or 7 (a divisor of 7)", {"heads": 7}),
    ("vllm", "ValueError: torch.float32 is not supported for quantization method awq. Supported dtypes: [torch.float16]",
     "dtype-unsupported", "--dtype: one of [torch.float16]", {}),
    ("atom", REQUESTS.format("5.00") + " Only 9.10GB is physically free on the GPU (other processes may be holding memory); "
     "raising --gpu-memory-utilization will NOT help. Free GPU memory or reduce --max-num-seqs (currently 512).",
     "state-cache-too-small", "--max-num-seqs 194 at most (now 512), or free the memory that others hold",
     {"requests": 512, "state_bytes": 12.5 * GIB, "kv_cache_bytes": 5 * GIB, "free_bytes": int(9.1 * GIB)}),
    ("atom", REQUESTS.format("5.00") + " Set --gpu-memory-utilization >= 0.93 (this only zeroes out the deficit; use a higher "
     "value for actual KV capacity) or reduce --max-num-seqs (currently 512).", "state-cache-too-small",
     "--max-num-seqs 194 at most (now 512); --gpu-memory-utilization over 0.93 (now 0.85) only where every rank has",
     {"least_utilization": 0.93}),
    ("atom", REQUESTS.format("5.00") + " Set --gpu-memory-utilization >= 0.71 (this only zeroes out the deficit; use a higher "
     "value for actual KV capacity) or reduce --max-num-seqs (currently 512).", "state-cache-too-small",
     "--max-num-seqs 194 at most (now 512); --gpu-memory-utilization does not help: the headroom of the tightest rank", {}),
    ("atom", REQUESTS.format("-3.20") + " Even --gpu-memory-utilization 1.0 is insufficient (would need 1.12); reduce "
     "--max-num-seqs (currently 512) or free GPU memory.", "state-cache-too-small", "a much lower --max-num-seqs (now 512)",
     {"kv_cache_bytes": int(-3.2 * GIB)}),
    ("atom", "RuntimeError: Per-request cache tensor (12.50GB for 512 slots) exceeds available KV budget (5.00GB). Reduce "
     "--max-num-seqs or increase gpu_memory_utilization.", "state-cache-too-small", "--max-num-seqs 194 at most (now 512)", {}),
    ("atom", "AssertionError: Not enough memory for KV cache with block size(16). At least 1 block (1.13MB) is required, but "
     "available_for_kv=-120.50MB (budget=240.00GB, peak_torch=238.10GB, cudagraph_est=0.50GB, safety=5.76GB, free=10.00GB)",
     "kv-pool-too-small", "lower --max-num-batched-tokens",
     {"kv_cache_bytes": -120.5 * (1 << 20), "peak_bytes": int(238.1 * GIB)}),
    ("atom", "ValueError: Calculated local_device_rank=8 exceeds available GPUs (8). ", "tensor-parallel-invalid", "at most 8",
     {"devices": 8}),
    ("atom", "openai_server.py: error: unrecognized arguments: --served-model-name", "arguments-invalid", "args", {}),
    ("atom", "/usr/bin/python3: Error while finding module specification for 'atom.entrypoints.openai_server' "
     "(ModuleNotFoundError: No module named 'atom.entrypoints')", "engine-binary-missing", "PyPI is another project", {}),
]


@pytest.mark.parametrize(("engine", "text", "cause", "change", "numbers"), SIZING)
def test_one_line_of_a_starting_engine_decides(engine: str, text: str, cause: str, change: str, numbers: dict[str, float]
                                               ) -> None:
    found = deciding_line(engine, lines(text)[0])
    assert found is not None
    assert found.cause == cause
    assert change in found.change
    assert numbers.items() <= found.numbers.items()
    assert not found.restart_helps
    assert "\x1b" not in found.evidence[0] and found.evidence[0] in text.replace("\x1b[0;36m", "").replace("\x1b[0;0m", "")
    assert "?" not in found.summary and "{" not in found.summary + found.change


BENIGN = [
    ("vllm", "(Worker pid=7) INFO 11-29 22:10:11 [gpu_worker.py:1013] Free memory on device (70.1/80.0 GiB) on startup. "
     "Desired GPU memory utilization is (0.92, 73.6 GiB). Actual usage is 1.2 GiB"),
    ("vllm", "(EngineCore pid=7) INFO 11-29 22:10:11 [shm_broadcast.py:109] No available shared memory broadcast block found "
     "in 60 seconds. This typically happens when some processes are hanging"),
    ("vllm", "(APIServer pid=7) INFO 11-29 22:10:11 [logger.py:42] Received request cmpl-1: prompt: 'ValueError: No available "
     "memory for the cache blocks.', params: SamplingParams()"),
    ("vllm", "(APIServer pid=7) WARNING 11-29 22:10:11 [x.py:1] ValueError: No available memory for the cache blocks."),
    ("vllm", '            "No available memory for the cache blocks. "'),
    ("vllm", "    raise ValueError("),
    ("sglang", SG + "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 32"),
    ("sglang", SG + "token_to_kv_pool_allocator memory leak detected! available_size=1, evictable_size=0"),
    ("sglang", SG + "Receive: obj=GenerateReqInput(rid='1', text='RuntimeError: Not enough memory. Please try to increase "
     "--mem-fraction-static.')"),
    ("sglang", SG + "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load="),
    ("sglang", SG + "KV pool holds 1000 tokens, fewer than --context-length 4096"),
    ("sglang", "Set --mem-fraction-static lower if you see: Not enough memory. Please try to increase"),
    ("sglang", SG + "py-spy: not found"),
    ("atom", AT + "Memory budget: total_gpu=287.98GB, free=120.00GB, utilization=0.9, available_for_kv=100.00GB"),
    ("atom", AT + "Request 7 arrived: RuntimeError: Per-request cache tensor (1.00GB for 8 slots) exceeds available KV budget"),
]


@pytest.mark.parametrize(("engine", "text"), BENIGN)
def test_look_alikes_give_no_verdict(engine: str, text: str) -> None:
    assert deciding_line(engine, lines(text)[0]) is None
    found = diagnose(engine, lines(text), ended(-9))
    assert found.cause == "unknown"


@pytest.mark.parametrize("text", [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",      # may be caught and said better
    "RuntimeError: Exception: odd",
    WORKER + "AssertionError: Error in memory profiling. Initial free memory 10.0 GiB, current free memory 12.0 GiB.",
    SG + "Scheduler hit an exception: Traceback (most recent call last):",
])
def test_what_may_be_survived_or_said_better_waits_for_the_exit(text: str) -> None:
    assert all(deciding_line(engine, lines(text)[0]) is None for engine in ("vllm", "sglang"))


def test_atoms_root_cause_is_behind_its_process_manager() -> None:
    """What a runner printed, then its engine core, then the server, each seeing only that the one below it ended."""
    texts = (
        "Process ModelRunner1/2:", "Traceback (most recent call last):",
        REQUESTS.format("5.00") + " Set --gpu-memory-utilization >= 0.93 (this only zeroes out the deficit; use a higher value "
        "for actual KV capacity) or reduce --max-num-seqs (currently 512).",
        AT + "AsyncIOProcManager(ModelRunner): [ModelRunner1/2] proc died unexpectedly (exitcode=1), shutting down.",
        AT + "Engine Core Mgr: Failed to initialize all EngineCores, cleaning up: x",
        "RuntimeError: Failed to start all EngineCore processes")
    assert diagnose("atom", lines(*texts), ended(1)).cause == "state-cache-too-small"
    assert diagnose("atom", lines(*texts[3:]), ended(1)).cause == "rank-died"
    text = "AsyncIOProcManager(ModelRunner): [ModelRunner0/2] proc died unexpectedly, shutting down."
    died = diagnose("atom", lines(AT + text), ended(None, starting=False, role="runner"))
    assert died.cause == "rank-died" and "ModelRunner0/2" in died.summary


VLLM_SIZING_FAILURE = lines(
    "(EngineCore pid=2) INFO 11-29 22:10:10 [core.py:120] Initializing a V1 LLM engine",
    CORE + "EngineCore failed to start.",
    CORE + "Traceback (most recent call last):",
    CORE + '  File "kv_cache_utils.py", line 1029, in _check_enough_kv_cache_memory',
    CORE + "    raise ValueError(",
    CORE + "ValueError: " + CONTEXT.format("model", ESTIMATE),
    "(EngineCore pid=2) Process EngineCore:",
    "(EngineCore pid=2) ValueError: " + CONTEXT.format("model", ESTIMATE),
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{'EngineCore': 1}")


@pytest.mark.parametrize(("failed", "cause"), [
    ("{}", "rank-died"), ("{'EngineCore': -9}", "rank-died"), ("{'EngineCore_DP0': -9, 'EngineCore_DP1': -9}", "rank-died"),
    ("{'EngineCore': 1}", "engine-error"), ("{'EngineCore_DP0': 1, 'EngineCore_DP1': -9}", "engine-error")])
def test_an_engine_core_that_a_signal_ended_has_died_and_not_failed(failed: str, cause: str) -> None:
    """Within a quarter of a second of its hello vLLM sees the exit code, later the closed pipe alone."""
    text = f"RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {failed}"
    assert diagnose("vllm", lines(f"(APIServer pid=1) {text}"), ended(1)).cause == cause


def test_the_root_wins_over_its_consequences() -> None:
    found = diagnose("vllm", VLLM_SIZING_FAILURE, ended(1))
    assert (found.cause, found.confidence, found.restart_helps) == ("context-exceeds-kv-pool", "certain", False)
    assert found.evidence == (VLLM_SIZING_FAILURE[5].text.replace("\x1b[0;36m", "").replace("\x1b[0;0m", ""),)


def test_a_graph_capture_is_named_although_the_raw_exception_comes_first() -> None:
    found = diagnose("sglang", lines(
        SG + "Scheduler hit an exception: Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of "
        "which 12.00 MiB is free.",
        "During handling of the above exception, another exception occurred:",
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 20.00 MiB.",
        SG + "Received sigquit from a child process. It usually means the child failed."), ended(-9))
    assert found.cause == "graph-capture-out-of-memory"


def test_graph_capture_without_memory_in_it_is_another_cause() -> None:
    found = diagnose("sglang", lines("Exception: Capture cuda graph failed: [gloo] Connection closed by peer"), ended(-9))
    assert found.cause == "rank-died" and "Connection closed by peer" in found.summary
    other = diagnose("sglang", lines("Exception: Capture cuda graph failed: operation not permitted when stream is capturing"),
                     ended(-9))
    assert other.cause == "graph-capture-failed" and "stream is capturing" in other.summary


def test_weights_that_do_not_fit() -> None:
    found = diagnose("sglang", lines(
        SG + "Scheduler hit an exception: Traceback (most recent call last):",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 79.15 GiB of "
        "which 12.00 MiB is free.",
        SG + "Received sigquit from a child process. It usually means the child failed."), ended(-9))
    assert found.cause == "out-of-memory" and found.restart_helps
    assert "--mem-fraction-static" in found.change and "20.00 MiB" in found.summary


def test_an_unknown_exception_is_quoted_not_its_messenger() -> None:
    found = diagnose("sglang", lines(
        "ImportError: an optional package is missing",
        *[SG + "Load weight begin."] * 30,
        SG + "Scheduler hit an exception: Traceback (most recent call last):",
        '  File "scheduler.py", line 1, in run', "KeyError: 'model.layers.0'", "",
        SG + "Received sigquit from a child process. It usually means the child failed."), ended(-9))
    assert (found.cause, found.confidence) == ("engine-error", "likely")
    assert found.summary == "KeyError: 'model.layers.0'"


def test_a_main_process_that_raises_before_any_child() -> None:
    found = diagnose("vllm", lines("Traceback (most recent call last):", "  File x", "ImportError: libfoo.so.1: cannot open"),
                     ended(1))
    assert found.cause == "engine-error" and "libfoo.so.1" in found.summary


def test_a_killed_worker_of_a_serving_vllm() -> None:
    found = diagnose("vllm", lines(
        "(EngineCore pid=2) ERROR 11-29 22:10:11 [multiproc_executor.py:316] Worker proc VllmWorker-0 died unexpectedly (exit "
        "code: -9), shutting down executor.",
        CORE + "EngineCore encountered a fatal error.",
        CORE + "RuntimeError: cancelled",
        "(APIServer pid=1) ERROR 11-29 22:10:12 [async_llm.py:1] EngineDeadError: EngineCore encountered an issue. See stack "
        "trace (above) for the root cause."), ended(0, starting=False))
    assert found.cause == "rank-died" and found.numbers == {"exit_code": -9} and "VllmWorker-0" in found.summary


def test_a_worker_that_raised_before_it_died() -> None:
    found = diagnose("vllm", lines(
        WORKER + "WorkerProc hit an exception.", WORKER + "Traceback (most recent call last):",
        WORKER + "IndexError: index 3 is out of bounds",
        CORE + "Worker proc VllmWorker-0 died unexpectedly (exit code: 1), shutting down executor."),
        ended(0, starting=False))
    assert found.cause == "engine-error" and "IndexError" in found.summary


def test_a_killed_scheduler_of_a_starting_sglang() -> None:
    found = diagnose("sglang", lines(
        "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common "
        "cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."), ended(1))
    assert found.cause == "rank-died" and found.numbers == {"rank": 1, "exit_code": -9}


def test_the_kernel_s_word_beats_the_engine_s_consequences_but_not_its_own_cause() -> None:
    text = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit"
    assert diagnose("sglang", lines(text), ended(-9, oom_killed=True)).cause == "killed-by-oom"
    assert diagnose("vllm", VLLM_SIZING_FAILURE, ended(1, oom_killed=True)).cause == "context-exceeds-kv-pool"


@pytest.mark.parametrize("text", [
    "[12345.678901] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python3,pid=42,uid=0",
    "Out of memory: Killed process 42 (sglang::schedul) total-vm:1kB",
])
def test_kernel_lines_count_from_the_kernel_only(text: str) -> None:
    assert diagnose("sglang", lines(text, stream="kernel"), ended(-9, starting=False)).cause == "killed-by-oom"
    assert diagnose("sglang", lines(text), ended(-9, starting=False)).cause == "engine-exited"


def test_a_serving_engine_is_not_judged_by_start_texts_nor_by_old_lines() -> None:
    sizing = "ValueError: No available memory for the cache blocks. Try"
    assert diagnose("vllm", lines(sizing), ended(-9, starting=False)).cause == "engine-exited"
    old = lines("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "last words", apart=500)
    assert diagnose("vllm", old, ended(-9, starting=False)).cause == "engine-exited"
    assert diagnose("vllm", old[:1], ended(-9, starting=False)).cause == "out-of-memory"


def test_the_exception_of_a_request_is_not_the_cause_of_a_kill() -> None:
    texts = ("(APIServer pid=1) ERROR 11-29 22:10:12 [serving.py:1] ValueError: unknown voice",)
    assert diagnose("vllm", lines(*texts), ended(-9, starting=False)).cause == "engine-exited"


def test_a_rank_that_lost_its_peer_is_not_the_one_that_failed() -> None:
    lost = ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3299: Connection "
            "reset by peer. This is typically caused by the remote")
    first = SG + "Scheduler hit an exception: Traceback (most recent call last):"
    assert diagnose("sglang", lines(first, lost), ended(-9, starting=False)).cause == "rank-died"
    raised = diagnose("sglang", lines(first, "KeyError: 'x'", first, lost), ended(-9, starting=False))
    assert raised.cause == "engine-error" and raised.summary == "KeyError: 'x'"


def test_a_loss_of_memory_hidden_in_a_collective_s_error() -> None:
    texts = ("host7:881:901 [1] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'",
             WORKER + "WorkerProc failed to start.",
             WORKER + "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)")
    assert diagnose("vllm", lines(*texts), ended(1)).cause == "out-of-memory"
    assert diagnose("vllm", lines(*reversed(texts)), ended(1)).cause == "out-of-memory"
    assert diagnose("vllm", lines(*texts[1:]), ended(1)).cause == "collective-init-failed"
    assert diagnose("vllm", lines(*texts[1:]), ended(1, starting=False)).cause == "engine-error"


def test_a_rank_that_could_not_join_because_another_one_failed() -> None:
    late = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
    first = SG + "Scheduler hit an exception: Traceback (most recent call last):"
    assert diagnose("sglang", lines(first, late), ended(-9)).cause == "rendezvous-timeout"
    found = diagnose("sglang", lines(first, "KeyError: 'x'", first, late), ended(-9))
    assert (found.cause, found.summary) == ("engine-error", "KeyError: 'x'")


def test_what_was_survived_is_no_cause() -> None:
    library = "ImportError: libfoo.so.1: cannot open shared object file: No such file or directory"
    hub = "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/x"
    work = "(EngineCore pid=2) INFO 11-30 10:00:00 [core.py:1] at work"
    for text, cause in ((library, "libraries-mismatched"), (hub, "hub-unreachable")):
        assert diagnose("vllm", lines("Traceback (most recent call last):", text), ended(1)).cause == cause
        assert diagnose("vllm", lines(text, *[work] * 30), ended(-9)).cause == "unknown"
        assert diagnose("vllm", lines(text, *[work] * 30, CORE + "ValueError: No available memory for the cache blocks."),
                        ended(1)).cause == "kv-pool-too-small"


def test_a_lost_peer_explains_only_the_end_that_follows_it() -> None:
    lost = SG + "Lost connection with prefill instance (bootstrap_addr: 10.0.0.7:8998), 4 requests affected"
    served = SG + "Decode batch, #running-req: 4, #token: 18000, token usage: 0.05"
    assert diagnose("sglang", lines(served, lost), ended(-9, starting=False)).cause == "pd-transfer-lost"
    assert diagnose("sglang", lines(lost, served), ended(-9, starting=False)).cause == "engine-exited"
    still = ExitInfo(None, False, ended=False)
    assert diagnose("sglang", lines(lost, served), still).cause == "pd-transfer-lost"


@pytest.mark.parametrize(("code", "words"), [(-4, "CPU lacks an instruction"), (-7, "df -h /dev/shm"), (-11, "native code"),
                                             (-15, "from outside"), (-64, "end of the log"), (3, "end of the log")])
def test_a_signal_says_where_to_look(code: int, words: str) -> None:
    assert words in diagnose("vllm", [], ended(code, starting=False)).change


@pytest.mark.parametrize("text", [
    "(RayWorkerWrapper pid=4009, ip=10.0.0.1) ERROR 04-30 10:11:12 worker.py:5] {}", "ERROR 04-30 10:11:12 engine.py:366] {}",
    "ERROR 04-30 10:11:12 [core.py:396] {}", "(vllm-test, pid=2150) (EngineCore_0 pid=3966) {}", "[rank0]: {}",
    "(Worker pid=1) (Worker_TP3 pid=1) ERROR 03-05 09:56:09 [multiproc_executor.py:880] {}", "  | {}"])
def test_prefixes_of_all_releases(text: str) -> None:
    found = diagnose("vllm", lines(text.format("ValueError: No available memory for the cache blocks. Try")), ended(1))
    assert found.cause == "kv-pool-too-small"


def test_a_crash_in_native_code_is_quoted() -> None:
    found = diagnose("sglang", lines(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 196608 vs 16384.",
        "Fatal Python error: Aborted",
        SG + "Scheduler hit an exception: Traceback (most recent call last):",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3299: Connection "
        "reset by peer."), ended(-9, starting=False))
    assert found.cause == "engine-error" and "196608 vs 16384" in found.summary


def test_vllm_gives_up_waiting() -> None:
    found = diagnose("vllm", lines("TimeoutError: Timed out waiting for engine core processes to start. This is often caused "
                                   "by slow weight loading for large models. Waited 600s (configured by"), ended(1))
    assert found.cause == "start-stalled" and "VLLM_ENGINE_READY_TIMEOUT_S over 600" in found.change


def test_a_model_with_code_of_its_own() -> None:
    found = diagnose("sglang", lines("ValueError: The repository models/x contains custom code which must be executed to"),
                     ended(1))
    assert found.cause == "arguments-invalid" and "--trust-remote-code" in found.change


def test_a_watchdog_counts_only_when_it_ends_the_engine() -> None:
    text = SG + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft={})"
    hung = diagnose("sglang", lines(text.format("False")), ended(-9, starting=False))
    assert hung.cause == "engine-watchdog" and hung.numbers == {"watchdog_seconds": 300}
    assert diagnose("sglang", lines(text.format("True")), ended(-9, starting=False)).cause == "engine-exited"


def test_nothing_said() -> None:
    found = diagnose("vllm", [], ended(0))
    assert (found.cause, found.evidence, found.confidence) == ("unknown", (), "guess")
    assert "exit code 0" in found.summary
    assert "SIGSEGV" in diagnose("vllm", [], ended(-11, starting=False)).summary
    died = diagnose("vllm", lines("a", "b"), ended(None, starting=False, role="engine-core"))
    assert died.cause == "rank-died" and "engine-core" in died.summary and died.evidence == ("a", "b")


def test_the_last_lines_are_the_evidence_when_nothing_decides() -> None:
    assert diagnose("vllm", lines(*"abcdefgh"), ended(3)).evidence == tuple("defgh")


@pytest.mark.parametrize("text", [
    "vllm serve: error: unrecognized arguments: --api-kye sk-secret --tokn=sk-secret --foo",
    "vllm serve: error: argument --api-key sk-secret: not allowed",
    "ValueError: bad config {'api_key': 'sk-secret', \"hf_token\": \"sk-secret\"} --admin-api-key=sk-secret",
])
def test_secrets_are_not_repeated(text: str) -> None:
    found = diagnose("vllm", lines(text), ended(2))
    assert "sk-secret" not in repr(found) and "***" in repr(found)


def test_numbers_of_tokens_are_no_secrets() -> None:
    text = "ValueError: max_total_num_tokens=8192 and token 5 of num_tokens: 7"
    assert diagnose("sglang", lines(text), ended(1)).evidence == (text,)


def test_every_signature_has_a_known_cause_and_a_pattern_without_catastrophe() -> None:
    for signature in (*vllm.SIGNATURES, *sglang.SIGNATURES, *atom.SIGNATURES, *common.SIGNATURES):
        assert signature.cause in CAUSES
        assert signature.match("x" * 20_000) is None
        assert signature.match("") is None


@given(st.text(max_size=300), st.sampled_from(["vllm", "sglang"]))
def test_no_text_breaks_it(text: str, engine: str) -> None:
    assert deciding_line(engine, lines(text)[0]) is None
    diagnose(engine, lines(text), ended(-9, starting=False))


@given(st.text(max_size=60), st.sampled_from([case[:2] for case in SIZING]))
def test_a_text_quoted_after_other_words_decides_nothing(before: str, case: tuple[str, str]) -> None:
    engine, text = case
    quoted = "said: " + before + text.replace("\x1b[0;36m", "").replace("\x1b[0;0m", "")
    assert deciding_line(engine, lines(quoted.replace("\x1b", ""))[0]) is None


@pytest.mark.parametrize("size", ["0.0/0.0", "1.2.3/80.0", "9" * 400 + "/80.0", "9" * 400 + "/" + "9" * 400])
def test_numbers_without_sense_leave_the_verdict(size: str) -> None:
    found = deciding_line("vllm", *lines(WORKER + f"ValueError: Free memory on device cuda:0 ({size} GiB) on startup is less "
                                         "than desired GPU memory utilization (0.92, 73.6 GiB)."))
    assert found and found.cause == "device-memory-taken" and found.change == "see the numbers in the line"
