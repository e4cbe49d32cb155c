"""The preflight of this machine: limits, disks, swap, other daemons, what an earlier run left, settings that do harm."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from helpers import free_ports
from preflight import GIB, item_of, make_config, make_spec
from tightrank.check import leftovers, machine, settings
from tightrank.check.item import Item
from tightrank.check.leftovers import LeftoverFacts
from tightrank.check.machine import MachineFacts
from tightrank.check.settings import HealthCheck
from tightrank.readers.process import Process
from tightrank.records import ProcessId

MIB = 2**20
GOOD = MachineFacts(
    shm_total_bytes=16 * GIB, shm_free_bytes=16 * GIB, memlock=(64 * MIB, 64 * MIB), open_files=(1024, 65536),
    processes_left=2000, may_lock=False, disk="/d", disk_free_bytes=9 * GIB, disk_free_files=10**6, min_free_bytes=64 * MIB,
    daemons=(), meminfo={"MemTotal": 64 * GIB, "SwapTotal": 0, "SwapFree": 0, "Cached": 30 * GIB, "Shmem": GIB})
SWAPS = {**(GOOD.meminfo or {}), "SwapTotal": 8 * GIB, "SwapFree": 7 * GIB}


def items(facts: MachineFacts, unified: bool | None = False, **spec: Any) -> list[Item]:
    return list(machine.items(facts, make_config(), [make_spec(**spec)], unified))


def test_a_good_machine() -> None:
    assert {item.status for item in items(GOOD)} == {"pass"}


def test_what_cannot_be_read_is_unknown() -> None:
    assert {item.status for item in items(MachineFacts(), None)} == {"unknown"}


@pytest.mark.parametrize(("name", "changes", "status", "said"), [
    ("/dev/shm", {"shm_free_bytes": 0}, "fail", "it is full: 0 of 16384 MiB are free"),
    ("disk of the state directory", {"disk_free_bytes": 10 * MIB}, "warn", ""),
    ("memlock limit", {"memlock": (8 * MIB, 8 * MIB)}, "warn", "the guard locks only as much"),
    ("memlock limit", {"memlock": (8 * MIB, 8 * MIB), "may_lock": True}, "pass", ""),
    ("open files limit", {"open_files": (1024, 1024)}, "warn", "1024 at the most"),
    ("process limit", {"processes_left": 100}, "warn", "100 processes and threads are left"),
    ("disk of the state directory", {"disk_free_bytes": MIB - 1}, "fail", "journal and logs do not fit"),
    ("disk of the state directory", {"disk_free_files": 3}, "fail", "3 files are free"),
    ("disk of the state directory", {"disk_free_files": None}, "pass", "9.00 GiB are free"),
    ("disk of the state directory", {"disk_free_bytes": 500 * MIB}, "warn", "0.49 GiB"),
    ("swap", {"meminfo": SWAPS}, "pass", "1.00 of 8.00 GiB"),
    ("swap", {"meminfo": {**SWAPS, "SwapFree": GIB}}, "warn", "7.00 of 8.00 GiB are used"),
    ("vm.min_free_kbytes", {"min_free_bytes": 6 * GIB}, "warn", "6.00 GiB of 64.00 are the kernel's reserve"),
    ("other OOM daemons", {"daemons": ((7, "earlyoom"),)}, "warn", "earlyoom (pid 7)")])
def test_each_thing(name: str, changes: dict[str, Any], status: str, said: str) -> None:
    found = item_of(name, items(replace(GOOD, **changes)))
    assert found.status == status and said in found.text
    assert found.status == "pass" or found.change


@pytest.mark.parametrize(("name", "changes", "spec"), [
    ("/dev/shm", {"shm_total_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}, {"tensor_parallel": 2}),
    ("/dev/shm", {"shm_free_bytes": 40 * MIB}, {"pipeline_parallel": 2}),
    ("memlock limit", {}, {"role": "decode"})])
def test_what_only_several_ranks_or_roles_need(name: str, changes: dict[str, Any], spec: dict[str, Any]) -> None:
    assert item_of(name, items(replace(GOOD, **changes), **spec)).status == "warn"
    assert item_of(name, items(replace(GOOD, **changes))).status == "pass"


def test_one_rank_of_sglang_needs_no_shared_memory() -> None:
    assert item_of("/dev/shm", items(replace(GOOD, shm_free_bytes=0), engine="sglang")).status == "pass"


def test_unified_memory() -> None:
    swaps = replace(GOOD, meminfo=SWAPS)
    assert item_of("swap", items(swaps, unified=True)).status == "warn"
    found = item_of("page cache", items(GOOD, unified=True))
    assert found.status == "warn" and "29.00 of 64.00 GiB" in found.sentence and "drop_caches" in found.change
    assert item_of("page cache", items(GOOD, unified=None)).status == "unknown"


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    facts = machine.read(tmp_path / "not" / "there")
    assert facts.disk == str(tmp_path) and facts.disk_free_bytes and facts.memlock and facts.open_files and facts.meminfo
    assert facts.processes_left is not None and facts.daemons is not None


def test_a_machine_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    facts = machine.read(tmp_path, tmp_path / "proc", tmp_path / "shm", tmp_path / "cgroup")
    assert (facts.shm_free_bytes, facts.meminfo, facts.min_free_bytes, facts.daemons) == (None, None, None, None)


def test_the_room_of_a_pids_cgroup_and_the_names_of_daemons(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "a"
    for path, text in {proc / "self" / "cgroup": "0::/a\n", group / "pids.max": "100", group / "pids.current": "58",
                       proc / "7" / "comm": "earlyoom\n", proc / "8" / "comm": "bash\n",
                       proc / "self" / "status": "Name: x\nCapEff:\t0000000000004000\n"}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = machine.read(tmp_path, proc, tmp_path, tmp_path / "cgroup")
    assert facts.processes_left == 42 and facts.daemons == ((7, "earlyoom"),) and facts.may_lock


# --- leftovers --------------------------------------------------------------------------------------------------------


def test_nothing_is_left() -> None:
    assert [item.status for item in leftovers.items(LeftoverFacts((), 0, (), (), ()))] == ["pass"] * 3


def test_leftovers_that_cannot_be_looked_at_are_unknown() -> None:
    assert [item.status for item in leftovers.items(LeftoverFacts())] == ["unknown"] * 3


def test_what_is_left_is_named() -> None:
    orphan = Process(ProcessId(9, 1), 1, 9, "VLLM::EngineCore", "S", 2 * GIB, 1.0)
    found = list(leftovers.items(LeftoverFacts((5, 6), 0, (orphan,), (("psm_1", 3 * MIB), ("psm_2", 0)), ((8001, 9, "VLLM"),))))
    assert [item.status for item in found] == ["warn"] * 4
    said = " | ".join(item.text for item in found)
    for words in ("pid 5, 6", "pid 9 (VLLM::EngineCore, 2.00 GiB)", "2 segments that nobody here has open, 3 MiB",
                  "port 8001 by pid 9 (VLLM)"):
        assert words in said


@pytest.fixture
def segment() -> Iterator[shared_memory.SharedMemory]:
    made = shared_memory.SharedMemory(create=True, size=8 * MIB)
    made.buf[:] = b"x" * made.size
    yield made
    made.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what all processes have open")
def test_a_segment_is_left_once_nobody_has_it_open(segment: shared_memory.SharedMemory, tmp_path: Path) -> None:
    def there() -> bool:
        found = leftovers.read(tmp_path / "state", []).segments
        assert found is not None
        return dict(found).get(segment.name) == 8 * MIB
    assert not there()
    segment.close()
    assert there()


def test_marked_processes_and_port_holders_are_found(tmp_path: Path) -> None:
    from tightrank import plan
    port = free_ports(1)[0]
    text = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env={"TIGHTRANK_RUN": f"{plan.mark(tmp_path)}:w0:1"})
    try:
        assert process.stdout is not None and process.stdout.read(1)
        found = leftovers.read(tmp_path, [make_spec(port=port)])
        assert found.marked == (process.pid,)
        assert found.holders is not None and [(each[0], each[1]) for each in found.holders] == [(port, process.pid)]
    finally:
        process.communicate(b"\n")
    assert leftovers.read(tmp_path, [make_spec(port=port)]).marked == ()
    assert leftovers.read(tmp_path / "never", []).marked == ()


def test_of_a_server_and_its_forks_the_server_is_named() -> None:
    """A fork that has not yet become another program holds its parent's port for a moment."""
    port = free_ports(1)[0]
    text = (f"import os, socket; s = socket.create_server(('127.0.0.1', {port})); forks = [os.fork() for _ in range(3)]; "
            "all(forks) and print(1, flush=True); input()")
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None and process.stdout.read(1)
        for _ in range(5):
            assert [(each[0], each[1]) for each in leftovers._holders({port}) or ()] == [(port, process.pid)]
    finally:
        process.communicate(b"\n" * 16)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "env", "args", "status", "said"), [
    ("sglang", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, (), "fail", "become NaN"),
    ("sglang", {"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, (), "fail", "take it out of PYTORCH_ALLOC_CONF"),
    ("vllm", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, (), "warn", "NaN"),
    ("sglang", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, (), "pass", ""),
    ("vllm", {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}, (), "warn", "does nothing"),
    ("vllm", {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"}, (), "pass", ""),
    ("sglang", {"SGLANG_SANITIZE_NAN_LOGITS": "1"}, (), "warn", "random tokens"),
    ("sglang", {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "true"}, (), "warn", "book-keeping"),
    ("vllm", {}, ("--kv-transfer-config", '{"kv_load_failure_policy": "recompute"}'), "warn", 'use "fail"'),
    ("vllm", {}, (), "pass", "none that is known to do harm")])
def test_settings(engine: str, env: dict[str, str], args: tuple[str, ...], status: str, said: str) -> None:
    for worker, ours in ((env, {}), ({}, env)):
        found = item_of("settings", settings.items(make_spec(args, engine=engine, env=worker), ours))
        assert found.status == status and said in found.text


def test_the_hook_heads_wants_a_variable() -> None:
    heads: dict[str, dict[str, Any]] = {"heads": {}}
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH=0" in item_of("settings", settings.items(make_spec(hooks=heads), {})).text
    spec = make_spec(hooks=heads, env={"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"})
    assert item_of("settings", settings.items(spec, {})).status == "pass"


@pytest.mark.parametrize(("command", "status"), [
    ("CMD python3 -c 'import vllm'", "warn"), ("CMD-SHELL python -m sglang.check", "warn"), ("CMD python3 /health.py", "warn"),
    ("CMD python3 -I -S /health.py", None), ("CMD python -IS /health.py", None), ("CMD curl -f http://localhost/readyz", None)])
def test_health_checks(command: str, status: str | None) -> None:
    found = [item.status for item in settings.health_items([HealthCheck("compose.yaml", "worker", command)])]
    assert found == ([status] if status else [])


@pytest.mark.parametrize(("text", "commands"), [
    ("services: {a: {healthcheck: {test: [CMD, python3, x.py]}}, b: {}}", ["CMD python3 x.py", ""]),
    ("services: {a: {healthcheck: {test: curl x}}}", ["curl x"]), ("[1]", []),
    ("services: [a]", []), ("a: [", []), ("services: {a: 1}", [])])
def test_health_checks_of_a_compose_file_beside_the_configuration(tmp_path: Path, text: str, commands: list[str]) -> None:
    (tmp_path / "compose.yaml").write_text(text)
    config = replace(make_config(), places={"engine": f"{tmp_path}/tightrank.yaml:1"})
    assert [check.command for check in settings.read(config)] == commands


@pytest.mark.parametrize(("facts", "cause", "status"), [
    (LeftoverFacts((5,), 0), "device-memory-taken", "warn"), (LeftoverFacts((), 1), "host-memory-too-small", "warn"),
    (LeftoverFacts((), 0), "device-memory-taken", "fail"), (LeftoverFacts((5,), 1), "tensor-parallel-invalid", "fail")])
def test_what_an_earlier_run_of_ours_holds_refuses_no_start(facts: LeftoverFacts, cause: str, status: str) -> None:
    """The daemon ends it before the first start; refused, it would stay for ever."""
    assert leftovers.softened(facts, Item("fail", "memory", "9 GiB are taken", "end it", cause)).status == status
