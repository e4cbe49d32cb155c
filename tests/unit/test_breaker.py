"""What is kept of a worker's failures, and for whom it counts."""
from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tightrank import breaker, host
from tightrank.breaker import GIVEN_UP_SECONDS, Breaker, Standing, facts
from tightrank.errors import CAUSES, EXIT_CONFIG, EXIT_TEMPORARY, EXIT_UNAVAILABLE
from tightrank.host import HostFacts
from tightrank.records import Diagnosis, WorkerSpec

SPEC = WorkerSpec(
    name="w", engine="vllm", role="both", argv=("vllm", "serve", "/m"), env={"VLLM_API_KEY": "sk-secret"}, host="127.0.0.1",
    port=8001, model="/nowhere", served_model="m", tensor_parallel=1, pipeline_parallel=1, devices=(), hooks={"ranks": {}},
    line=None, context_tokens=None, schedule=(), drain_seconds=1, start_stall_seconds=1, api_key="sk-secret")
HOST = HostFacts(64 << 30, None, ("0000:01:00.0",))


def failure(cause: str) -> Diagnosis:
    return Diagnosis(cause, "it failed", ("its line",), "change it", CAUSES[cause].restart_helps, {"free_bytes": 7.0})


SIZING, TAKEN, STUCK, CRASH = map(failure, ("kv-pool-too-small", "device-memory-taken", "process-unkillable", "rank-died"))


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, told: list[str]) -> Callable[..., Breaker]:
    """A breaker of one state directory: called again, it is the next supervisor's."""
    def build(on: HostFacts = HOST, release: str | None = "0.32.0", **environment: str) -> Breaker:
        return Breaker(tmp_path / "breaker.json", facts(on, release), environment, told.append)

    return build


def test_nothing_is_known_at_first(make: Callable[..., Breaker], told: list[str]) -> None:
    assert make().standing("w", "k") == Standing() and told == []


def test_failures_in_a_row_outlive_the_supervisor(make: Callable[..., Breaker]) -> None:
    make().keep("w", "k", 3)
    assert make().standing("w", "k") == Standing(3)
    assert make().standing("w", "another") == make().standing("v", "k") == Standing()
    make().forget("w")
    assert make().standing("w", "k") == Standing()


@pytest.mark.parametrize(("diagnosis", "hours", "reboot", "stays"), [
    (SIZING, 0, False, True), (SIZING, 10**4, True, True),          # a fact of the configuration
    (TAKEN, 0, False, False),                                       # who took the memory may be gone
    (STUCK, 0, False, True), (STUCK, 10**4, False, True), (STUCK, 0, True, False),
    (CRASH, 0, False, True), (CRASH, 0.99, False, True), (CRASH, 1.01, False, False), (CRASH, 0, True, False)])
def test_what_stays_failed(make: Callable[..., Breaker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, diagnosis: Diagnosis,
                           hours: float, reboot: bool, stays: bool) -> None:
    make().keep("w", "k", 6, diagnosis)
    now = breaker._uptime()
    monkeypatch.setattr(breaker, "_uptime", lambda: now + hours * GIVEN_UP_SECONDS)
    if reboot:
        (tmp_path / "boot").write_text("another\n")
        monkeypatch.setattr(breaker, "_BOOT_ID", tmp_path / "boot")
    assert make().standing("w", "k") == Standing(6, diagnosis if stays else None)


def test_a_changed_configuration_engine_model_or_host_has_another_key(make: Callable[..., Breaker], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    spec = replace(SPEC, model=str(model))
    same = make().key(spec)
    assert make(VLLM_X="", HOSTNAME="a").key(spec) == make(VLLM_X="", HOSTNAME="b").key(spec)
    assert make().key(replace(spec, generation=7, run_directory="/r", notes=("a note",))) == same
    assert make(on=replace(HOST, mem_total_bytes=(64 << 30) + 4096)).key(spec) == same      # of another boot
    others = [make().key(replace(spec, argv=(*spec.argv, "--max-model-len", "8192"))), make().key(replace(spec, port=8002)),
              make().key(replace(spec, env={"VLLM_API_KEY": "sk-other"})), make().key(replace(spec, hooks={})),
              make(VLLM_CPU_KVCACHE_SPACE="1").key(spec), make(release="0.33.0").key(spec), make(release=None).key(spec),
              make(on=replace(HOST, mem_total_bytes=128 << 30)).key(spec), make(on=replace(HOST, devices=())).key(spec),
              make(on=replace(HOST, cgroup_limit_bytes=8 << 30)).key(spec)]
    (model / "config.json").write_text("{} ")
    others.append(make().key(spec))
    assert len({same, *others}) == 1 + len(others)


def test_accelerators_are_facts_of_the_host(tmp_path: Path) -> None:
    assert host.read(tmp_path, tmp_path, tmp_path) == HostFacts(None, None, ())
    for name in ("driver/nvidia/gpus/0000:01:00.0", "bus/pci/drivers/amdgpu/0000:03:00.0", "bus/pci/drivers/amdgpu/module"):
        (tmp_path / name).mkdir(parents=True)
    assert host.read(tmp_path, tmp_path, tmp_path).devices == ("0000:01:00.0", "0000:03:00.0")


def test_a_file_of_another_tree_keeps_no_secret(make: Callable[..., Breaker], tmp_path: Path) -> None:
    kept = make(HF_TOKEN="hf_secret")
    kept.keep("w", kept.key(SPEC), 1, SIZING)
    path = tmp_path / "breaker.json"
    assert "secret" not in path.read_text() and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "7", '{"w": null}', '{"w": {}}', '{"w": {"key": "k"}}', "\0" * 4096, "[" * 10**5,
    '{"w": {"key": "k", "failures": -1, "diagnosis": null, "boot": "b", "uptime_seconds": 1.0}}',
    '{"w": {"key": "k", "failures": 1, "diagnosis": {"cause": "no-such"}, "boot": "b", "uptime_seconds": 1.0}}'])
def test_a_torn_file_is_said_and_forbids_nothing(make: Callable[..., Breaker], tmp_path: Path, told: list[str],
                                                 text: str) -> None:
    (tmp_path / "breaker.json").write_text(text)
    torn = make()
    assert torn.standing("w", "k") == Standing()
    assert len(told) == 1 and "breaker.json: not readable" in told[0] and len(told[0]) < 1000
    torn.keep("w", "k", 1, SIZING)
    assert make().standing("w", "k") == Standing(1, SIZING) and len(told) == 1


FIELDS = st.sampled_from(["w", "key", "failures", "diagnosis", "boot", "uptime_seconds", "cause", "numbers"])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner))


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_no_json_of_others_raises(tmp_path_factory: pytest.TempPathFactory, values: Any) -> None:
    path = tmp_path_factory.mktemp("breaker") / "breaker.json"
    path.write_text(json.dumps(values))
    Breaker(path, (), {}, lambda _: None).standing("w", "k")


def test_a_full_disk_is_said_and_memory_goes_on(make: Callable[..., Breaker], told: list[str],
                                                monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: str, values: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(breaker.wire, "write_json", full)
    kept = make()
    kept.keep("w", "k", 1, SIZING)
    assert kept.standing("w", "k").diagnosis == SIZING and os.listdir(tmp_path) == []
    assert len(told) == 1 and "No space left on device" in told[0]


def test_each_cause_has_its_exit_code() -> None:
    codes = [CAUSES[each.cause].exit_code for each in (SIZING, TAKEN, STUCK, CRASH)]
    assert codes == [EXIT_CONFIG, EXIT_UNAVAILABLE, EXIT_UNAVAILABLE, EXIT_TEMPORARY]


def test_a_share_that_is_gone_is_another_key_and_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stale(self: Path, pattern: str) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert breaker.listing(tmp_path, "*") == []
    monkeypatch.setattr(Path, "glob", stale)
    assert breaker.listing(tmp_path, "*") == [(str(tmp_path), -1, errno.ESTALE)]
