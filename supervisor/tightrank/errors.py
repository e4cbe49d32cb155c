"""Cause IDs and exit codes. An ID is never renamed: metrics, journals and runbooks are keyed by it. Imports nothing of ours."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EXIT_CONFIG = 78         # sysexits EX_CONFIG: nothing was started; change the configuration
EXIT_UNAVAILABLE = 69    # EX_UNAVAILABLE: a worker failed with a cause that no restart fixes
EXIT_TEMPORARY = 75      # EX_TEMPFAIL: ended before it was clean; trying again may help
EXIT_SOFTWARE = 70       # EX_SOFTWARE: a fault of ours


@dataclass(frozen=True, slots=True)
class Cause:
    """A named reason for a failure. `restart_helps`: whether the same start may succeed next time.

    `lasts`: what it is a fact of, where no restart helps. configuration: it stays until that changes (breaker.py keeps
    it on disk); boot: until the host is booted again; moment: what stood in the way may be gone when a supervisor starts.
    """
    id: str
    meaning: str
    restart_helps: bool
    lasts: Literal["configuration", "boot", "moment"] = "configuration"

    @property
    def runbook(self) -> str:
        """Where it is written what to do, from the root of the repository."""
        return f"docs/runbooks/causes.md#{self.id}"

    @property
    def exit_code(self) -> int:
        """What a supervisor ends with that does not hold a worker which failed for good."""
        if self.restart_helps:
            return EXIT_TEMPORARY
        return EXIT_CONFIG if self.lasts == "configuration" else EXIT_UNAVAILABLE


_ALL = (
    # configuration: exit 78, nothing started
    Cause("config-invalid", "The configuration has an unknown key or a value outside its range.", False),
    Cause("model-directory-missing", "The model directory is not there or has no readable config.json.", False),
    Cause("port-taken", "A port that a worker or the supervisor needs is in use.", False, "moment"),
    Cause("state-directory-unusable", "The state directory cannot be made or written.", False),
    Cause("state-directory-in-use", "Another supervisor holds the state directory.", False),
    Cause("engine-binary-missing", "The engine's program is not there or not executable.", False),
    Cause("hook-unavailable", "A hook was asked for that this engine or release does not have.", False),
    # sizing at start: no restart can fix them
    Cause("kv-pool-too-small", "Weights and activations leave no room for the KV cache.", False),
    Cause("context-exceeds-kv-pool", "The KV cache cannot hold one request of the maximum length.", False),
    Cause("device-memory-taken", "Too little device memory is free at start for what the engine was told to use.", False,
          "moment"),
    Cause("host-memory-too-small", "Host memory cannot hold what the engine was told to reserve.", False, "moment"),
    Cause("graph-capture-out-of-memory", "CUDA graph capture ran out of memory.", False),
    Cause("state-cache-too-small", "The hybrid (mamba / linear attention) state cache cannot hold the requests.", False),
    Cause("tensor-parallel-invalid", "The model's heads cannot be divided by the tensor parallel size.", False),
    Cause("arguments-invalid", "The engine refused its command line or configuration.", False),
    Cause("model-unreadable", "The engine could not read the model's files.", False),
    Cause("dtype-unsupported", "The device does not support the data type or quantization.", False),
    Cause("weights-too-large", "The model's weights do not fit into the device's memory.", False),
    Cause("model-not-found", "The engine found no such model: a wrong name, path or revision.", False, "moment"),
    Cause("hub-access-denied", "The model hub refused the model to this token, or there is no token.", False, "moment"),
    Cause("hub-unreachable", "The model hub did not answer and the model is not in the local cache.", True),
    Cause("model-unsupported", "This release of the engine does not know the model's architecture.", False, "moment"),
    Cause("device-missing", "The engine sees no device.", False, "moment"),
    Cause("device-unsupported", "The engine's build has no code for this device.", False, "boot"),
    Cause("libraries-mismatched", "The engine's packages or libraries do not fit each other.", False, "moment"),
    Cause("jit-compile-failed", "A kernel could not be compiled on this host.", False, "moment"),
    Cause("custom-all-reduce-failed", "The engine's own all-reduce does not work between these devices.", False, "boot"),
    Cause("graph-capture-failed", "CUDA graph capture failed, and not for lack of memory.", True),
    Cause("collective-init-failed", "The ranks could not set up their communication (NCCL, RCCL).", False, "moment"),
    Cause("rendezvous-timeout", "A rank or node waited in vain for the others to join.", True),
    Cause("pd-transfer-unavailable", "The KV transfer between prefill and decode cannot be set up.", False, "moment"),
    Cause("shared-memory-full", "Shared memory (/dev/shm) is full.", False, "moment"),
    Cause("memlock-limit", "Memory could not be locked: the limit of locked memory is too small.", True),
    Cause("memory-profiling-disturbed", "Memory changed under the engine while it was measuring.", True),
    # the adapter
    Cause("adapter-not-in-force", "A hook that was asked for is not in force on every rank.", False),
    Cause("adapter-fault", "A function of the adapter raised inside the engine.", True),
    # while starting or running
    Cause("out-of-memory", "The device or the host ran out of memory.", True),
    Cause("kv-pool-exhausted", "The KV cache ran out of room in a step and the engine did not survive it.", True),
    Cause("kv-accounting-failed", "The engine's check of its KV book-keeping failed and ended it.", True),
    Cause("killed-by-oom", "The kernel's OOM killer ended a process of the worker.", True),
    Cause("device-fault", "A device, its memory or its link is broken until it is reset.", False, "boot"),
    Cause("device-kernel-error", "A kernel of the engine failed on the device.", True),
    Cause("nan-logits", "The model's output was not a number.", True),
    Cause("collective-timeout", "Ranks waited for each other until a time limit ended the engine.", True),
    Cause("engine-watchdog", "A step hung or took too long, and the engine's own time limit ended it.", True),
    Cause("pd-transfer-lost", "The KV transfer lost its peer.", True),
    Cause("disk-full", "A disk that the engine or its supervisor writes to is full.", True),
    Cause("open-files-limit", "A process of the engine has reached its limit of open files.", True),
    Cause("process-limit", "No more processes or threads may be made.", True),
    Cause("rank-died", "A rank or role process of the worker ended.", True),
    Cause("engine-exited", "The engine's main process ended without being asked.", True),
    Cause("engine-error", "The engine reported a fatal error of its own.", True),
    Cause("engine-hung", "The engine made no progress for longer than any step takes although it had work.", True),
    Cause("start-stalled", "The engine made no progress while starting.", True),
    Cause("canary-failed", "The engine says it is healthy and did not answer a real request.", True),
    Cause("guard-floor", "Available memory fell under the guard's floor; the guard ended all ranks.", True),
    Cause("node-lost", "Another host of the worker, its supervisor or the network to it is gone.", True),
    Cause("node-recalled", "The leader ended the generation on all hosts.", True),
    Cause("process-unkillable", "A process stayed in state D after SIGKILL.", False, "boot"),
    Cause("port-not-released", "A port of the worker stayed in use after its tree was ended.", True),
    Cause("device-memory-not-released", "Device memory of a generation was not free again after its tree was ended.", True),
    Cause("spawn-failed", "The engine's process could not be started.", True),
    Cause("unknown", "The engine ended and nothing it printed says why.", True),
)
CAUSES = {cause.id: cause for cause in _ALL}


def exit_code(failed: Sequence[str], forced: bool, told: bool) -> int:
    """Of a supervisor that ends while workers have failed for good by these causes. `forced`: a drain did not end in time;
    `told`: whoever runs it is to know the kind (`on_failed: exit`); what no restart can fix goes before what one may."""
    codes = {CAUSES[cause].exit_code for cause in failed}
    if told and codes:
        return max(codes - {EXIT_TEMPORARY}, default=EXIT_TEMPORARY)
    if forced:
        return EXIT_TEMPORARY
    return EXIT_UNAVAILABLE if codes else 0


class ConfigError(Exception):
    """Bad input found before anything was started. One line: key, value, range, place, what to do. Exit code 78."""

    def __init__(self, message: str, *, cause: str = "config-invalid") -> None:
        super().__init__(message)
        self.cause = CAUSES[cause].id
