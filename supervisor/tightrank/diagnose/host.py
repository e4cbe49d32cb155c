"""Texts of this host: its kernel's log, its disk, shared memory and limits."""
from __future__ import annotations

from tightrank.diagnose.signature import Rank, Signature

_MORE_MEMORY = "give the host or container more memory, or the engine less; raise guard.floor so that the guard acts first"
_SHM = ("a larger /dev/shm (docker --shm-size=10g or --ipc=host; Kubernetes: an emptyDir of medium Memory); `ls -l /dev/shm` "
        "shows what dead engines left there")
_RESET = ("take the device out of `devices`; then reset it (nvidia-smi --gpu-reset -i N) or reboot the host, and have it "
          "checked when it comes back")
_AFTER = "see the engine's log at that time"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "killed-by-oom",
        r"oom-kill:constraint=(?P<constraint>CONSTRAINT_MEMCG|CONSTRAINT_\w+),.*\btask=(?P<task>[^,]+),pid=(?P<pid>\d+)",
        "The kernel's OOM killer ended {task} (pid {pid}; {constraint}: MEMCG means the container's limit, else the host).",
        _MORE_MEMORY, "Linux 4.19 - 6.17 mm/oom_kill.c", shape="kernel", start_only=False, decisive=False),
    Signature(
        "killed-by-oom",
        r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+) \((?P<task>[^)]*)\)",
        "The kernel's OOM killer ended {task} (pid {pid}).",
        _MORE_MEMORY, "Linux 4.19 - 6.17 mm/oom_kill.c", shape="kernel", start_only=False, decisive=False),
    Signature(
        "device-fault",
        r"NVRM: Xid \(PCI:(?P<device>[0-9A-Fa-f:.]+)\): (?P<xid>48|61|62|64|74|79|95|110|119|120|140|143), pid=(?P<pid>\d+), "
        r"name=(?P<task>[^,]{1,80})",
        "The driver reported Xid {xid} on device {device}: the device or its link is at fault.",
        _RESET, "NVIDIA driver 470 - 580", shape="kernel", start_only=False, decisive=False),
    Signature(
        "device-fault",
        r"NVRM: Xid \(PCI:(?P<device>[0-9A-Fa-f:.]+)\): (?P<xid>48|61|62|64|74|79|95|110|119|120|140|143),",
        "The driver reported Xid {xid} on device {device}: the device or its link is at fault.",
        _RESET, "NVIDIA driver 470 - 580", shape="kernel", start_only=False, decisive=False, rank=Rank.RAISED,
        confidence="likely"),
    Signature(
        "device-fault",
        r"amdgpu (?P<device>[0-9a-f:.]+): .{0,60}(?:uncorrectable hardware errors detected|GPU reset\(\d+\) failed)",
        "The driver reported a hardware error of device {device}.",
        "take the device out of `devices`; reboot the host, and have the device checked when it comes back",
        "Linux 5.15 - 6.17 drivers/gpu/drm/amd", shape="kernel", start_only=False, decisive=False, rank=Rank.RAISED,
        confidence="likely"),
    Signature(
        "device-kernel-error",
        r"NVRM: Xid \(PCI:(?P<device>[0-9A-Fa-f:.]+)\): (?P<xid>13|31|68|69|94), pid=(?P<pid>\d+), name=(?P<task>[^,]{1,80})",
        "A kernel of the engine failed on device {device} (Xid {xid}).",
        f"{_AFTER}; on one device again and again: have it checked", "NVIDIA driver 470 - 580", shape="kernel",
        start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "device-kernel-error",
        r"amdgpu (?P<device>[0-9a-f:.]+): .{0,40}(?:page fault .{0,120}for process (?P<task>.{1,60}?) pid (?P<pid>\d+) "
        r"thread|ring \S+ timeout)",
        "A kernel of the engine failed on device {device}.",
        _AFTER, "Linux 5.15 - 6.17 drivers/gpu/drm/amd", shape="kernel", start_only=False, decisive=False,
        rank=Rank.RAISED, confidence="likely"),
    Signature(
        "device-kernel-error",
        r"amdgpu (?P<device>[0-9a-f:.]+): amdgpu: {1,3}Process (?P<task>.{1,60}?) pid (?P<pid>\d+) thread",
        "A kernel of the engine failed on device {device}.",
        _AFTER, "Linux 6.10 - 6.18 drivers/gpu/drm/amd", shape="kernel", start_only=False, decisive=False,
        rank=Rank.RAISED, confidence="likely"),
    Signature(
        "rank-died",
        r"(?:traps: )?(?P<task>[^\[]{1,40})\[(?P<pid>\d+)\]:? (?P<what>segfault|trap invalid opcode|general protection "
        r"fault).{0,200}? in (?P<library>[^\[\s]{1,80})\[",
        "{task} (pid {pid}) crashed in native code: {what} in {library}.",
        "another release of that library, or the engine without the feature that uses it",
        "Linux arch/x86/kernel/traps.c, mm/fault.c", shape="kernel", start_only=False, decisive=False, rank=Rank.VAGUE),
    Signature(
        "shared-memory-full",
        r"Insufficient space in (?P<path>\S{1,100}) for .{1,120}: (?P<needed_mib>\d+) MiB required, (?P<free_mib>\d+) MiB free",
        "{path} has {free_mib} MiB free; the engine needs {needed_mib} MiB.",
        _SHM, "vLLM 0.28.0 - 0.33.0 shm_broadcast.py"),
    Signature(
        "shared-memory-full",
        r"(?:\[[\d :-]{19}\] )?(?:\S{1,200}:\d+:\d+ \[\d+\] )?(?:\S{1,60} )?NCCL WARN (?:Error while creating shared memory "
        r"segment (?P<path>\S{1,100}) \(size (?P<needed>\d+)\).{0,20}(?:, error: No space left on device.{0,10})?$|Call to "
        r"posix_fallocate failed : No space left on device)",
        "NCCL could not make its segment in /dev/shm: it is full.",
        _SHM, "NCCL 2.18 - 2.28 misc/shmutils.cc", shape="any", start_only=False, decisive=False),
    Signature(
        "shared-memory-full",
        r"(?:unable to (?:allocate|write|resize|mmap) .{0,200}No space left on device|Unexpected bus error encountered in "
        r"worker)",
        "Shared memory (/dev/shm) is full.",
        _SHM, "torch 2.1 - 2.13 MapAllocator.cpp", start_only=False, decisive=False, rank=Rank.RAISED),
    Signature(
        "shared-memory-full",
        r"\[Errno 28\] No space left on device: '(?P<path>(?:/dev/shm/|/psm_|/?sem\.)[^']{0,200})'",
        "Shared memory is full: {path}.",
        _SHM, "CPython", start_only=False, decisive=False, rank=Rank.DOUBTFUL, error="OSError"),
    Signature(
        "disk-full",
        r"\[Errno 28\] No space left on device(?:: '(?P<path>[^']{1,200})')?",
        "A disk is full ({path}).",
        "`df -h` and `df -i`: the disk of the model cache (HF_HOME), of compiled kernels (~/.cache, TMPDIR) and of the logs",
        "CPython", start_only=False, decisive=False, rank=Rank.DOUBTFUL, error="OSError"),
    Signature(
        "disk-full",
        r"(?:.{0,200}No space left on device \(os error 28\)|\S{1,200}: fatal error: error writing to .{1,100}: No space "
        r"left on device)",
        "A disk is full.",
        "`df -h` and `df -i`: the disk of the model cache (HF_HOME), of compiled kernels (~/.cache, TMPDIR) and of the logs",
        "Rust std (safetensors, hf-xet), gcc", shape="any", start_only=False, decisive=False, rank=Rank.DOUBTFUL),
    Signature(
        "open-files-limit",
        r"(?:\[Errno 24\] Too many open files|unable to open (?:file|shared memory object) .{0,200}Too many open files "
        r"\(24\)|Too many open files)",
        "A process of the engine has reached its limit of open files.",
        "a higher limit: `ulimit -n 65536`, LimitNOFILE= of the unit, docker --ulimit nofile=65536:65536",
        "CPython, torch, ZeroMQ", start_only=False, decisive=False, rank=Rank.DOUBTFUL),
    Signature(
        "process-limit",
        r"(?:can't start new thread|OpenBLAS blas_thread_init: pthread_create failed|libgomp: Thread creation failed)",
        "No more processes or threads may be made.",
        "a higher limit: `ulimit -u`, TasksMax= of the unit, docker --pids-limit; or fewer threads (OMP_NUM_THREADS)",
        "CPython, OpenBLAS, libgomp", shape="any", start_only=False, decisive=False, rank=Rank.DOUBTFUL),
    Signature(
        "memlock-limit",
        r"(?:\[[\d.]{1,30}\] \[[^\]]{1,80}\]\s+\w{1,40}\.c:\d+\s+UCX\s+ERROR ibv_\w+\(.{0,200}\) failed: Cannot allocate "
        r"memory|(?:\S{1,200}:\d+:\d+ \[\d+\] )?(?:\S{1,60} )?NCCL WARN Call to ibv_\w+ failed with error Cannot allocate "
        r"memory|E\d{4} [\d:. ]{10,40} \w{1,40}\.cpp:\d+\] Failed to register memory .{0,80}Cannot allocate memory)",
        "Memory could not be locked for the network card: the limit of locked memory is too small.",
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity of the unit, docker --ulimit memlock=-1",
        "UCX 1.14 - 1.20, NCCL 2.18 - 2.28, Mooncake", shape="any", start_only=False, decisive=False, rank=Rank.RAISED),
)
