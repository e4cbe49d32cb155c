"""The kernel's log: what is read of it, and what it may decide."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tightrank.diagnose import ExitInfo, diagnose
from tightrank.readers import kernel
from tightrank.readers.kernel import KernelLog
from tightrank.records import Line

OOM = ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/x,task_memcg=/x,task=python3,"
       "pid=42,uid=0")
GIB = 1 << 30


def record(text: str, number: int = 1) -> bytes:
    return f"4,{number},24385915389,-;{text}\n SUBSYSTEM=memory\n DEVICE=+x\n".encode()


@pytest.fixture
def namespace(tmp_path: Path) -> str:
    path = tmp_path / "pid"
    path.symlink_to("pid:[4026531836]")
    return str(path)


@pytest.fixture
def log(tmp_path: Path, namespace: str) -> Iterator[KernelLog]:
    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    opened = KernelLog(str(path), namespace)
    assert opened.why == ""
    yield opened
    opened.close()


def script(monkeypatch: pytest.MonkeyPatch, *answers: bytes | OSError) -> None:
    """What the kernel answers to one read after the other; then that there is nothing."""
    waiting = iter(answers)

    def read(descriptor: int, size: int) -> bytes:
        answer = next(waiting, BlockingIOError(11, "again"))
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(kernel.os, "read", read)


def test_lines_of_interest_are_taken_in_order(log: KernelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [OOM, "Memory cgroup out of memory: Killed process 42 (python3) total-vm:1kB",
             "NVRM: Xid (PCI:0000:3b:00): 79, pid=42, name=python3, GPU has fallen off the bus.",
             "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from x",
             "amdgpu 0000:0b:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:1, for process python pid 42 "
             "thread",
             "python3[42]: segfault at 0 ip 00007f sp 00007f error 4 in libcuda.so.1[7f+1000]"]
    script(monkeypatch, record("usb 1-1: new device"), *[record(text) for text in texts], record("audit: oom is a word"))
    found = log.read()
    assert [line.text for line in found] == texts
    assert {line.stream for line in found} == {"kernel"}
    assert log.read() == []


def test_a_gap_is_survived_and_counted(log: KernelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, record(OOM, 1), BrokenPipeError(32, "Broken pipe"), record(OOM, 900))
    assert len(log.read()) == 2 and log.lost == 1 and log.why == ""


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00\x01", b"", b";", b"4,1,2,-;", b"no semicolon", b"4,1,2,-;\x80\x81\n"])
def test_garbage_is_no_line_and_no_end(log: KernelLog, monkeypatch: pytest.MonkeyPatch, garbage: bytes) -> None:
    script(monkeypatch, *([garbage] if garbage else []), record(OOM))
    assert [line.text for line in log.read()] == [OOM]


def test_a_log_that_breaks_says_why_and_is_left(log: KernelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, record(OOM), OSError(22, "Invalid argument"), record(OOM))
    assert len(log.read()) == 1 and "Invalid argument" in log.why
    assert log.read() == []


def test_a_flood_does_not_hold_the_tick(log: KernelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.os, "read", lambda descriptor, size: record("a flood"))
    assert log.read() == []


def test_what_was_there_before_is_not_read(tmp_path: Path, namespace: str) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(record(OOM))
    opened = KernelLog(str(path), namespace)
    assert opened.read() == []
    with path.open("ab") as file:
        file.write(record(OOM, 2))
    assert [line.text for line in opened.read()] == [OOM]
    opened.close()


def test_where_it_may_not_be_read_it_says_why(tmp_path: Path, namespace: str) -> None:
    missing = KernelLog(str(tmp_path / "none"), namespace)
    assert "No such file" in missing.why and missing.read() == []
    other = tmp_path / "other"
    other.symlink_to("pid:[4026532999]")
    assert "namespace" in KernelLog("/dev/null", str(other)).why
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "seek" in KernelLog(str(pipe), namespace).why
    assert KernelLog(str(tmp_path), str(tmp_path / "gone")).why != ""


@pytest.mark.parametrize(("text", "pids"), [
    (OOM, {42}), ("Out of memory: Killed process 42 (python3) total-vm:1kB", {42}), ("usb 1-1: new device", set()),
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, x", set()),
    ("NVRM: Xid (PCI:0000:3b:00): 31, pid=42, name=python3, x", {42}),
    ("amdgpu 0000:0b:00.0: amdgpu:  Process python pid 42 thread python pid 43", {42, 43}),
    ("python3[42]: segfault at 0 ip 0 sp 0 error 4 in libcuda.so.1[7f+1000]", {42})])
def test_which_processes_a_line_names(text: str, pids: set[int]) -> None:
    assert kernel.pids(text) == pids


def of_kernel(*texts: str) -> list[Line]:
    return [Line(100.0, 0.0, "kernel", text) for text in texts]


@pytest.mark.parametrize(("pids", "cause"), [(frozenset({42}), "killed-by-oom"), (frozenset({4242, 7}), "engine-exited"),
                                             (frozenset(), "engine-exited")])
def test_a_kill_counts_only_of_a_process_of_ours(pids: frozenset[int], cause: str) -> None:
    for text in (OOM, "Out of memory: Killed process 42 (python3) total-vm:1kB"):
        found = diagnose("vllm", of_kernel(text), ExitInfo(-9, False, pids=pids))
        assert (found.cause, found.confidence) == (cause, "certain" if cause == "killed-by-oom" else "guess")


@pytest.mark.parametrize(("task", "cause"), [("python3", "killed-by-oom"), ("VLLM::EngineCor", "killed-by-oom"),
                                             ("cicc", "killed-by-oom"), ("chrome", "engine-exited")])
def test_without_pids_its_name_makes_it_likely(task: str, cause: str) -> None:
    found = diagnose("vllm", of_kernel(OOM.replace("python3", task)), ExitInfo(-9, False))
    assert found.cause == cause and found.confidence in ("likely", "guess")


def test_the_kernel_names_constraint_task_and_pid() -> None:
    found = diagnose("sglang", of_kernel(OOM), ExitInfo(-9, False, pids=frozenset({42})))
    assert "CONSTRAINT_MEMCG" in found.summary and "python3" in found.summary and found.numbers == {"pid": 42}


XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid={}, name=python3, something"


@pytest.mark.parametrize(("number", "pid", "cause", "confidence"), [
    (79, "42", "device-fault", "certain"), (79, "'<unknown>'", "device-fault", "likely"), (79, "99", "engine-exited", "guess"),
    (31, "42", "device-kernel-error", "certain"), (31, "99", "engine-exited", "guess"),
    (45, "42", "engine-exited", "guess"),            # preemptive clean-up: an effect
    (63, "42", "engine-exited", "guess"),            # a row was remapped: a note
])
def test_what_an_xid_means(number: int, pid: str, cause: str, confidence: str) -> None:
    found = diagnose("vllm", of_kernel(XID.format(number, pid)), ExitInfo(-6, False, pids=frozenset({42})))
    assert (found.cause, found.confidence) == (cause, confidence)


def test_a_segfault_of_ours_names_the_library() -> None:
    text = "python3[42]: segfault at 0 ip 00007f00 sp 00007f00 error 4 in libcuda.so.1[7f00+1000]"
    found = diagnose("vllm", of_kernel(text), ExitInfo(-11, False, pids=frozenset({42})))
    assert found.cause == "rank-died" and "libcuda.so.1" in found.summary


LAST = [Line(100.0, 0.0, "stderr", "(EngineCore pid=2) INFO 11-30 10:00:00 [core.py:1] at work")]


@pytest.mark.parametrize(("code", "lowest", "cause"), [
    (-9, 90 << 20, "killed-by-oom"), (None, 90 << 20, "killed-by-oom"), (-9, 9 * GIB, "unknown"), (-9, None, "unknown"),
    (1, 90 << 20, "unknown"), (-11, 90 << 20, "unknown"), (0, 90 << 20, "unknown")])
def test_a_kill_without_a_word_and_without_memory_is_likely_one(code: int | None, lowest: int | None, cause: str) -> None:
    found = diagnose("vllm", LAST, ExitInfo(code, True, lowest_available_bytes=lowest))
    assert found.cause == cause and found.confidence != "certain"
    if cause == "killed-by-oom":
        assert found.numbers == {"lowest_available_bytes": 90 << 20} and "90 MiB" in found.summary


def test_memory_explains_a_rank_that_was_killed_and_none_that_crashed() -> None:
    text = "ERROR 11-30 10:00:00 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: {}), shutting down executor."
    for code, cause in ((-9, "killed-by-oom"), (-11, "rank-died"), (1, "rank-died")):
        lines = [Line(100.0, 0.0, "stderr", text.format(code))]
        assert diagnose("vllm", lines, ExitInfo(0, False, lowest_available_bytes=1 << 20)).cause == (
            cause if code != -9 else "killed-by-oom")


def test_what_the_engine_says_itself_beats_the_memory() -> None:
    said = [Line(100.0, 0.0, "stderr", "ValueError: No available memory for the cache blocks. Try")]
    assert diagnose("vllm", said, ExitInfo(-9, True, lowest_available_bytes=1 << 20)).cause == "kv-pool-too-small"


def test_the_driver_s_own_shortage_is_evidence_and_no_cause() -> None:
    """Starts that succeed print it too (vllm-project/vllm#56824)."""
    text = "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from x"
    lines = [*of_kernel(text), *LAST]
    assert diagnose("vllm", lines, ExitInfo(-9, False)).cause == "engine-exited"
    found = diagnose("vllm", lines, ExitInfo(-9, False, lowest_available_bytes=1 << 20))
    assert found.cause == "killed-by-oom" and found.evidence == (text,)


@pytest.mark.parametrize(("text", "device"), [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, x", "0000:3b:00"),
    ("NVRM: Xid (PCI:00000000:3B:00): 79", "0000:3b:00"), ("amdgpu 0000:0b:00.0: amdgpu: GPU reset(1) failed", "0000:0b:00"),
    ("PCI:0000:65:00.0", "0000:65:00"), ("oom-kill:constraint=CONSTRAINT_NONE,task=python3,pid=42", None)])
def test_the_device_that_a_line_is_about(text: str, device: str | None) -> None:
    assert kernel.device(text) == device
