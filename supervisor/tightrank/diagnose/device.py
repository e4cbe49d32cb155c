"""Texts of devices and of what runs on them: CUDA, HIP, NCCL and RCCL, compilers, KV transfer. The same in all engines."""
from __future__ import annotations

from tightrank.diagnose.signature import Rank, Signature

_NCCL = r"(?:\[[\d :-]{19}\] )?(?:\S{1,200}:\d+:\d+ \[\d+\] )?(?:\S{1,60} )?NCCL WARN "
_NETWORK = ("NCCL_DEBUG=WARN names the failing call; then NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (the interface), "
            "NCCL_P2P_DISABLE=1 (PCIe cards behind an IOMMU), the size of /dev/shm, free memory of the devices, one "
            "release of NCCL on all nodes")
_PEERS = "start all nodes of the worker together, with the same address; check firewall and interface (NCCL_SOCKET_IFNAME)"
_LESS = "leave more device memory free: a smaller share for the engine, fewer requests at once, or smaller prefill chunks"
_TOOLS = ("a CUDA toolkit that fits the engine's torch (nvcc, headers; CUDA_HOME), or the engine's container image; with "
          "little memory MAX_JOBS=2")
_PAIR = "restart both workers of the pair: one alone does not connect again; then look at the network between them"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "out-of-memory",
        _NCCL + r"Cuda failure(?: \d+)? '(?:out of memory|hipErrorOutOfMemory)'",
        "A collective library found no device memory for its buffers; the NCCL error after it is only the consequence.",
        _LESS, "NCCL 2.18 - 2.28", shape="any", start_only=False, decisive=False),
    Signature(
        "out-of-memory",
        r"(?:CUDA error: CUBLAS_STATUS_ALLOC_FAILED|Failed: (?:Cuda error )?\S{1,300}:\d+ 'out of memory'|HIP error: "
        r"hipErrorOutOfMemory|CUDA driver error: out of memory|Triton Error \[(?:CUDA|HIP)\]: out of memory)",
        "The device ran out of memory.",
        _LESS, "torch 2.1 - 2.13, Triton, vLLM csrc", shape="any", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "out-of-memory",
        r"\[enforce fail at alloc_cpu\.cpp:\d+\] .{1,40}DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried "
        r"to allocate (?P<asked>\d+) bytes",
        "The host ran out of memory: {asked} bytes were asked for.",
        "free host memory, or give the engine less of it (on the CPU VLLM_CPU_KVCACHE_SPACE, --max-total-tokens)",
        "torch 2.1 - 2.13 c10/core/impl/alloc_cpu.cpp", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "custom-all-reduce-failed",
        r"Failed: (?:Cuda error )?(?P<file>\S{1,200}custom_all_reduce\.cuh):(?P<line>\d+) "
        r"'(?P<why>(?!out of memory)[^']{1,80})'",
        "The engine's own all-reduce failed: {why}.",
        "--disable-custom-all-reduce", "vLLM 0.4 - 0.33.0 csrc/custom_all_reduce.cuh", shape="logged", decisive=False,
        start_only=False),
    Signature(
        "custom-all-reduce-failed",
        r"Runtime check failed at (?P<file>\S{1,200}custom_all_reduce\.cuh):(?P<line>\d+): (?P<why>.{1,120})",
        "The engine's own all-reduce failed: {why}.",
        "--disable-custom-all-reduce", "SGLang 0.5.10 - 0.5.23 jit_kernel", decisive=False, start_only=False),
    Signature(
        "device-missing",
        r"(?:No CUDA GPUs are available|Found no NVIDIA driver on your system|No HIP GPUs are available|no (?:CUDA|"
        r"ROCm)-capable device is detected|CUDA error: no CUDA-capable device is detected|Failed to infer device type, "
        r"please set|Device string must not be empty|No accelerator \(CUDA, XPU, HPU, NPU\) is available)",
        "The engine sees no device.",
        "in a container: --gpus all and the device's container toolkit; else the driver (nvidia-smi, rocm-smi), "
        "CUDA_VISIBLE_DEVICES and `devices`",
        "torch 2.1 - 2.13, vLLM 0.7 - 0.33.0 config/device.py, SGLang 0.5.23", decisive=False, rank=Rank.DOUBTFUL),
    Signature(
        "device-unsupported",
        r"(?:CUDA error: no kernel image is available for execution on the device|HIP error: invalid device function|CUDA "
        r"error: the provided PTX was compiled with an unsupported toolchain|FATAL: kernel .{0,200} is for sm\w+, but was "
        r"built for)",
        "The engine's build has no code for this device.",
        "a build of the engine for this device's architecture (its image or wheel for your CUDA or ROCm), or another device",
        "torch 2.1 - 2.13", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "device-fault",
        r"(?:CUDA error: (?:uncorrectable (?:ECC|NVLink) error encountered|uncorrectable .{1,40} error)|HIP error: "
        r"hipErrorECCNotCorrectable|Unable to determine the device handle for GPU)",
        "The device reported a fault of its memory or link.",
        "take the device out of `devices`; reset it (nvidia-smi --gpu-reset -i N) or reboot the host, and look at `dmesg -T` "
        "for Xid",
        "CUDA 11 - 13", start_only=False, decisive=False),
    Signature(
        "device-kernel-error",
        r"(?:CUDA|HIP) error: (?P<why>an illegal memory access was encountered|device-side assert triggered|unspecified "
        r"launch failure|misaligned address|an illegal instruction was encountered|unknown error|the launch timed out and "
        r"was terminated|operation failed due to a previous error during capture)",
        "A kernel of the engine failed on the device: {why}.",
        "see the stack in the log; on one device again and again: `dmesg -T` (Xid). Other attention backends or no graphs "
        "avoid some",
        "torch 2.1 - 2.13 c10/cuda", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "device-kernel-error",
        r"Memory access fault by GPU node-(?P<node>\d+) .{0,80}\. Reason: (?P<why>.{1,80})",
        "A kernel of the engine failed on device {node}: {why}",
        "see the stack in the log; another attention backend or ROCm release avoids some",
        "ROCr 5.7 - 7.2", shape="logged", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "nan-logits",
        r"(?:NaNs detected in logits|NaN detected! |probability tensor contains either `inf`, `nan` or element < 0|Detected "
        r"errors during sampling! NaN in the logits)",
        "The model's output was not a number.",
        "another attention backend or --dtype bfloat16 in place of half; on some machines --disable-custom-all-reduce",
        "torch, vLLM 0.28.0 - 0.33.0 v1/worker/utils.py, SGLang 0.4 - 0.5.23", shape="raised", start_only=False,
        decisive=False),
    Signature(
        "nan-logits",
        r"\S{1,200}:\d+: .{1,200}: block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion `probability tensor contains "
        r"either",
        "The model's output was not a number.",
        "another attention backend or --dtype bfloat16 in place of half; on some machines --disable-custom-all-reduce",
        "torch TensorCompare.cu", shape="logged", start_only=False, decisive=False),
    Signature(
        "collective-timeout",
        r"(?:\[[^\]]{1,60}\]\s*){0,3}Watchdog caught collective operation timeout: "
        r"WorkNCCL\(.{0,200}OpType=(?P<operation>\w+).{0,300}?ran for (?P<milliseconds>\d+) milliseconds",
        "Ranks waited for each other in {operation} for {milliseconds} ms: one did not take part.",
        "find that rank (the others' lines are from those that waited): stacks, `dmesg -T`; --dist-timeout where steps may "
        "take long",
        "torch 2.1 - 2.13 ProcessGroupNCCL.cpp", shape="any", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "rendezvous-timeout",
        r"(?:The client socket has timed out after (?P<waited>\S{1,20}) while trying to connect to \((?P<peer>[^)]{1,80})\)|"
        r"Timed out after (?P<waited_seconds>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<wanted>\d+) clients "
        r"joined|wait timeout after (?P<milliseconds>\d+)ms, keys: )",
        "A rank waited in vain for the others to join.",
        _PEERS, "torch 2.1 - 2.13 TCPStore", start_only=True, decisive=False, rank=Rank.DOUBTFUL),
    Signature(
        "collective-init-failed",
        r"NCCL (?:error: (?:unhandled (?:system|cuda) error|internal error|invalid (?:usage|argument)).{0,200}|error in: "
        r".{1,300})",
        "The ranks could not set up their communication (NCCL, on AMD devices RCCL).",
        _NETWORK, "vLLM 0.4 - 0.33.0, SGLang 0.4 - 0.5.23 pynccl_wrapper.py, torch 2.1 - 2.13", decisive=False,
        rank=Rank.DOUBTFUL, confidence="likely"),
    Signature(
        "engine-error",
        r"NCCL (?:error: |error in: ).{1,300}",
        "A collective failed while serving.",
        "see which rank failed first; NCCL_DEBUG=WARN names the call",
        "vLLM, SGLang pynccl_wrapper.py, torch", start_only=False, decisive=False, rank=Rank.VAGUE, confidence="likely"),
    Signature(
        "jit-compile-failed",
        r"(?:Ninja build failed|Error building extension|Error compiling objects|nvcc fatal {1,3}:|Could not find (?:nvcc|"
        r"CUDA installation)|CUDA_HOME environment variable is not set|Failed to find C compiler|Command "
        r"'\[?'?\S{0,200}(?:nvcc|ninja|gcc|g\+\+|c\+\+)'?.{0,2000} returned non-zero exit status|ninja exited with status "
        r"\d+)",
        "A kernel could not be compiled on this host.",
        _TOOLS, "FlashInfer 0.2 - 0.6, torch cpp_extension, Triton 3, tvm_ffi", start_only=False, decisive=False,
        rank=Rank.DOUBTFUL),
    Signature(
        "jit-compile-failed",
        r"out of resource: (?P<resource>[\w ]{1,40}), Required: (?P<required>\d+), Hardware limit: (?P<limit>\d+)",
        "A Triton kernel needs more {resource} ({required}) than this device has ({limit}).",
        "another attention or quantization backend; a release of the engine that is tuned for this device",
        "Triton 2.1 - 3.6", start_only=False, decisive=False, rank=Rank.RAISED, error="OutOfResources"),
    Signature(
        "libraries-mismatched",
        r"(?:(?P<library>lib[\w.+-]{1,80}\.so[\w.]{0,20}): cannot open shared object file|\S{1,300}\.so[\w.]{0,20}: "
        r"undefined symbol: (?P<symbol>\S{1,200})|\S{1,100}: version `(?P<version>\S{1,60})' not found|cannot import name "
        r"'(?P<name>\w{1,80})' from |No module named '(?P<module>[\w.]{1,80})'|operator torchvision::nms does not exist|The "
        r"detected CUDA version .{0,100}mismatches the version)",
        "The engine's packages do not fit each other: a library, a symbol or a module is missing.",
        "install the engine anew in an environment of its own with the versions that it pins, or use its image",
        "CPython, glibc, torch", decisive=False, rank=Rank.DOUBTFUL, confidence="likely",
        error="ImportError|ModuleNotFoundError|OSError|RuntimeError"),
    Signature(
        "pd-transfer-unavailable",
        r"(?:PD Disaggregation does NOT support PD different TP sizes.{0,200}|Head-sliced PD transfer needs .{0,200})",
        "The KV transfer between prefill and decode cannot be set up.",
        "the same tensor parallel size, block size and transfer backend on both roles; NIXL/UCX or Mooncake built for this "
        "device",
        "SGLang 0.5.16 - 0.5.23 disaggregation/, vLLM 0.20.2 - 0.33.0 kv_connector, NIXL 0.5 - 1.5", start_only=False,
        decisive=False, rank=Rank.RAISED),
    Signature(
        "pd-transfer-unavailable",
        r"(?:NIXL is not available|NIXL_ERR_BACKEND|NIXL_ERR_NOT_SUPPORTED|Failed to initialize (?:the )?[Mm]ooncake "
        r".{0,100}|Mooncake Transfer Engine initialization failed)",
        "The library that transfers the KV cache does not work here.",
        "NIXL/UCX or Mooncake built for this device and its driver; UCX_TLS and the network devices that it may use",
        "vLLM 0.20.2 - 0.33.0 kv_connector, NIXL 0.5 - 1.5, Mooncake 0.3", decisive=False, rank=Rank.RAISED),
    Signature(
        "pd-transfer-lost",
        r"(?:Lost connection with prefill instance \(bootstrap_addr: (?P<prefill>[^)]{1,100})\)|Decode instance could be "
        r"dead, remote |NIXL_ERR_REMOTE_DISCONNECT|NIXL_ERR_CANCELED|NIXL transfer failure: "
        r".{0,800}NIXL_ERR_REMOTE_DISCONNECT)",
        "The KV transfer lost its peer.",
        _PAIR, "SGLang 0.5.10 - 0.5.23 disaggregation/common/conn.py, NIXL 0.5 - 1.5", shape="any", start_only=False,
        decisive=False, rank=Rank.DOUBTFUL, confidence="likely"),
    Signature(
        "engine-error",
        r"(?P<why>.+)",
        "C++ code of the engine ended its process: {why}",
        "see the lines around this one in the log",
        "libstdc++ std::terminate", start_only=False, decisive=False, rank=Rank.VAGUE, error=r"what\(\)"),
)
