"""The preflight's arithmetic, as tables: heads, memory of host and devices, what devices can do. No item raises for garbage."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preflight import GIB, item_of, make_config, make_memory, make_spec
from tightrank.check import devices, memory, parallel, quantization
from tightrank.check.devices import Device, DeviceFacts
from tightrank.check.item import Item
from tightrank.check.memory import Need
from tightrank.check.model import ModelFacts
from tightrank.check.program import ProgramFacts
from tightrank.check.quantization import QuantizationFacts
from tightrank.plan.safetensors import Tensor

DENSE = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 64}
MLA = {"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "kv_lora_rank": 512,
       "qk_rope_head_dim": 64}

# --- tensor parallel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "size", "status", "said"), [
    (DENSE, 1, "pass", "valid: 1, 2, 4"), (DENSE, 2, "pass", ""), (DENSE, 4, "pass", ""),
    (DENSE, 3, "fail", "tensor_parallel 3 does not divide 4 attention heads, 2 KV heads; use one of 1, 2, 4"),
    ({"num_attention_heads": 2}, 3, "fail", "use one of 1, 2"),
    ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "fail", "use one of 1, 2, 4, 12"),
    ({"num_attention_heads": 40, "num_key_value_heads": 8}, 5, "fail", "use one of 1, 2, 4, 8, 40"),
    (MLA, 64, "pass", "valid: 1, 2, 4, 8, 16, 32, 64, 128"), ({"text_config": DENSE}, 3, "fail", ""),
    ({"n_head": 12}, 8, "fail", "use one of 1, 2, 3, 4, 6, 12"),
    ({}, 3, "unknown", "does not say"), ({"num_attention_heads": "4"}, 3, "unknown", ""),
    ({"num_attention_heads": 0}, 3, "unknown", "")])
def test_heads_are_divided_by_tensor_parallel(model: dict[str, Any], size: int, status: str, said: str) -> None:
    found = item_of("tensor parallel", parallel.items(model, make_spec(tensor_parallel=size), on_cpu=False))
    assert (found.status, found.cause) == (status, "tensor-parallel-invalid" if status == "fail" else None)
    assert said in found.text


def test_sglang_pads_heads_on_a_cpu() -> None:
    spec = make_spec(engine="sglang", tensor_parallel=3)
    assert item_of("tensor parallel", parallel.items(DENSE, spec, on_cpu=True)).status == "warn"
    assert item_of("tensor parallel", parallel.items(DENSE, spec, on_cpu=False)).status == "fail"


def test_layers_and_experts() -> None:
    found = list(parallel.items({**DENSE, "n_routed_experts": 8}, make_spec(("--enable-expert-parallel",), tensor_parallel=3,
                                                                              pipeline_parallel=4), False))
    assert [(item.item, item.status) for item in found] == [("tensor parallel", "fail"), ("pipeline parallel", "fail"),
                                                            ("experts", "warn")]
    assert "use one of 1, 2, 4, 8" in found[2].text


# --- memory -----------------------------------------------------------------------------------------------------------


def weights(*tensors: tuple[str, str, int, int]) -> ModelFacts:
    return ModelFacts("/m", tensors=tuple(Tensor(name, dtype, (1,) * dimensions, size * GIB)
                                          for name, dtype, dimensions, size in tensors))


LARGE = weights(("model.layers.0.q_proj.weight", "BF16", 2, 8), ("model.layers.0.norm.weight", "BF16", 1, 1),
                ("model.layers.0.mlp.gate.weight", "BF16", 2, 1), ("model.layers.61.eh_proj.weight", "BF16", 2, 100),
                ("mtp.0.weight", "BF16", 2, 100))


@pytest.mark.parametrize(("facts", "args", "tensor", "pipeline", "model", "wanted_gib"), [
    (LARGE, (), 1, 1, MLA, 10), (LARGE, (), 4, 1, MLA, 4), (LARGE, (), 4, 2, MLA, 2),
    (LARGE, ("--load-format", "dummy"), 1, 1, MLA, 0),
    (LARGE, ("--dtype", "float32"), 1, 1, MLA, 20), (LARGE, ("--quantization", "fp8"), 1, 1, MLA, 5.5),
    (LARGE, ("--quantization", "awq"), 1, 1, MLA, 3.25),
    (LARGE, ("--dtype", "float32"), 1, 1, {**MLA, "quantization_config": {"quant_method": "fp8"}}, 10),
    (weights(("a", "F32", 2, 8)), (), 1, 1, {}, 4), (weights(("a", "F32", 2, 8)), ("--dtype", "float32"), 1, 1, {}, 8),
    (weights(("a", "F8_E4M3", 2, 8)), ("--dtype", "float32"), 1, 1, {}, 8), (weights(), (), 1, 1, {}, 0)])
def test_weights_of_a_rank(facts: ModelFacts, args: tuple[str, ...], tensor: int, pipeline: int, model: dict[str, Any],
                           wanted_gib: float) -> None:
    spec = make_spec(args, tensor_parallel=tensor, pipeline_parallel=pipeline)
    assert memory.need(facts, spec, {}, model, False).weights_bytes == wanted_gib * GIB


@pytest.mark.parametrize(("engine", "args", "env", "tensor", "model", "wanted"), [
    ("vllm", (), {"VLLM_CPU_KVCACHE_SPACE": "60"}, 2, DENSE, (60 * GIB, "VLLM_CPU_KVCACHE_SPACE")),
    ("vllm", ("--kv-cache-memory-bytes", "2G"), {"VLLM_CPU_KVCACHE_SPACE": "60"}, 1, DENSE,
     (2 * GIB, "--kv-cache-memory-bytes")),
    ("vllm", (), {}, 1, DENSE, (0, "")),
    ("vllm", ("--kv-cache-memory-bytes", "lots"), {}, 1, DENSE, (0, "--kv-cache-memory-bytes")),
    ("sglang", (), {"VLLM_CPU_KVCACHE_SPACE": "60"}, 1, DENSE, (0, "")),
    ("sglang", ("--max-total-tokens", "1000"), {}, 1, DENSE, (0, ""))])       # an upper bound
def test_kv_of_a_rank(engine: str, args: tuple[str, ...], env: dict[str, str], tensor: int, model: dict[str, Any],
                      wanted: tuple[int, str]) -> None:
    need = memory.need(weights(), make_spec(args, engine=engine, env=env, tensor_parallel=tensor), {}, model, cpu=True)
    assert (need.kv_bytes, need.kv_flag) == wanted


def host(available_gib: float | None, *needs: Need, tensor: int = 1) -> Item:
    workers = [(make_spec(tensor_parallel=tensor, name=f"w{index}"), need) for index, need in enumerate(needs)]
    return item_of("memory of the host", memory.host_items(make_config(), workers, make_memory(available_gib)))


def need(weights_gib: float, kv_gib: float = 0, reserve_gib: float = 0) -> Need:
    flag = "VLLM_CPU_KVCACHE_SPACE" if kv_gib else ""
    return Need(int(weights_gib * GIB), int(kv_gib * GIB), 0, int(reserve_gib * GIB), flag)


def test_memory_of_the_host() -> None:
    """The floor is 1.5 GiB, the margin 0.5."""
    assert host(12.1, need(2, 8)).status == "pass"
    assert host(11.9, need(2, 8)).status == "warn"
    found = host(10, need(2, 8))
    assert (found.status, found.cause) == ("fail", "host-memory-too-small")
    assert found.sentence == ("the rank takes about 10.00 GiB (weights 2.00, KV 8.00), 10.00 in all; 10.00 GiB are "
                              "available, of which guard.floor keeps 1.50")
    assert found.change == "free 1.50 GiB, or lower VLLM_CPU_KVCACHE_SPACE by 1.50 GiB for each rank"
    assert host(10, need(12)).change == "free 3.50 GiB, or use a smaller or quantized model"
    assert host(20, need(2, 8), tensor=2).change.endswith("by 0.75 GiB for each rank")
    assert host(25, need(10), need(10)).status == "pass" and host(21, need(10), need(10)).status == "fail"
    assert host(14, need(2, 8, reserve_gib=3)).status == "warn"
    assert host(None, need(2)).status == "unknown" and host(10, need(0)).status == "unknown"


H200 = Device(0, "GPU-a", "H200", (9, 0), 140 * GIB, 139 * GIB)
T4 = Device(1, "GPU-b", "T4", (7, 5), 16 * GIB, 15 * GIB)
GB10 = Device(0, "GPU-c", "GB10", (12, 1), None, None)


def device(facts: DeviceFacts, found: Need, args: tuple[str, ...] = (), **spec: Any) -> Item:
    (item,) = memory.device_items(facts, make_spec(args, **spec), {}, found)
    return item


def test_memory_of_devices() -> None:
    both = DeviceFacts((T4, H200))
    assert device(both, need(100)).status == "pass", "the freest counts"
    assert device(both, need(100), devices=("1",)).status == "pass", "numbers of unlike devices are CUDA's own"
    found = device(both, need(100), devices=("1",), env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert (found.status, found.cause) == ("fail", "kv-pool-too-small") and "device 1 has 15.00 of 16.00 GiB free" in found.text
    assert device(both, need(100), tensor_parallel=2).status == "fail"
    assert device(both, need(100), ("--nnodes", "2"), tensor_parallel=2).status == "pass"
    assert device(both, need(100), ("--cpu-offload-gb", "90"), devices=("GPU-b",)).status == "pass"
    taken = DeviceFacts((replace(H200, free_bytes=90 * GIB),))
    found = device(taken, need(100))
    assert (found.status, found.cause) == ("fail", "device-memory-taken") and "nvidia-smi" in found.change
    assert device(DeviceFacts(why="no NVML"), need(1)) == Item("unknown", "memory of w0's devices", "no NVML")


@pytest.mark.parametrize(("engine", "args", "status", "said"), [
    ("vllm", (), "fail", "or use --gpu-memory-utilization 0.71 or less"),
    ("vllm", ("--gpu-memory-utilization", "0.72"), "fail", "--gpu-memory-utilization 0.72 of 140.00 GiB is 100.80"),
    ("vllm", ("--gpu-memory-utilization", "0.7"), "pass", ""), ("vllm", ("--gpu-memory-utilization", "x"), "fail", ""),
    ("sglang", (), "pass", "")])
def test_vllm_wants_its_part_of_all_memory_to_be_free(engine: str, args: tuple[str, ...], status: str, said: str) -> None:
    found = device(DeviceFacts((replace(H200, free_bytes=100 * GIB),)), need(1), args, engine=engine)
    assert (found.status, found.cause) == (status, "device-memory-taken" if status == "fail" else None) and said in found.text


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("facts", "args", "spec", "statuses"), [
    (DeviceFacts((H200,)), ("--dtype", "bfloat16"), {}, ["pass", "pass"]),
    (DeviceFacts((T4,)), ("--dtype", "bfloat16"), {}, ["pass", "fail"]), (DeviceFacts((T4,)), (), {}, ["pass", "pass"]),
    (DeviceFacts((T4, H200)), ("--dtype", "bfloat16"), {"devices": ("GPU-a",)}, ["pass", "pass"]),
    (DeviceFacts((H200,)), (), {"tensor_parallel": 2}, ["fail"]),
    (DeviceFacts((T4, H200)), (), {"tensor_parallel": 2, "env": {"CUDA_VISIBLE_DEVICES": "GPU-b"}}, ["fail"]),
    (DeviceFacts((H200,)), (), {"tensor_parallel": 4, "env": {"CUDA_VISIBLE_DEVICES": "MIG-1"}}, ["fail"]),
    (DeviceFacts((H200,)), (), {"env": {"CUDA_VISIBLE_DEVICES": "MIG-1"}}, ["pass", "pass"]),
    (DeviceFacts((H200,)), ("--nnodes", "2"), {"tensor_parallel": 2}, ["pass", "pass"]),
    (DeviceFacts((H200,)), ("--distributed-executor-backend", "ray"), {"tensor_parallel": 8}, ["pass", "pass"]),
    (DeviceFacts(why="NVML: no driver"), (), {}, ["unknown"])])
def test_what_devices_can_do(facts: DeviceFacts, args: tuple[str, ...], spec: dict[str, Any], statuses: list[str]) -> None:
    found = list(devices.items(facts, make_spec(args, **spec), {}, cpu=False))
    assert [item.status for item in found] == statuses
    causes = {item.item: item.cause for item in found if item.status == "fail"}
    assert causes.items() <= {"devices": "arguments-invalid", "data type": "dtype-unsupported"}.items()


@pytest.mark.parametrize(("engine", "args", "env", "release", "cpu"), [
    ("vllm", (), {}, "0.32.0+cpu", True), ("vllm", (), {}, "0.32.0", False),
    ("sglang", ("--device", "cpu"), {}, "0.5.23", True),
    ("sglang", (), {"SGLANG_USE_CPU_ENGINE": "1"}, "0.5.23", True), ("vllm", (), {}, "0.32.0+cu128", False)])
def test_who_computes_on_the_cpu(engine: str, args: tuple[str, ...], env: dict[str, str], release: str, cpu: bool) -> None:
    spec = make_spec(args, engine=engine)
    assert devices.on_cpu(spec, env, release) == cpu
    assert not cpu or [item.status for item in devices.items(DeviceFacts(), spec, env, cpu)] == ["pass"]


def test_a_device_without_memory_of_its_own_shares_the_hosts() -> None:
    assert DeviceFacts((GB10,)).unified and not DeviceFacts((H200,)).unified


def test_nvml_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in devices.read().why


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
                    max_leaves=4)
KEYS = st.sampled_from([*DENSE, *MLA, "text_config", "n_routed_experts", "quantization_config", "hidden_size", "layer_types"])


@given(st.dictionaries(KEYS, JSON), st.integers(1, 9), st.sampled_from(["vllm", "sglang", "atom"]))
def test_no_config_json_makes_an_item_raise(model: dict[str, Any], size: int, engine: str) -> None:
    spec = make_spec(("--max-total-tokens", "9", "--enable-expert-parallel"), engine=engine, tensor_parallel=size)
    list(parallel.items(model, spec, False))
    list(quantization.items(QuantizationFacts(), ProgramFacts(), spec, model, (8, 0)))
    assert memory.need(LARGE, spec, {}, model, True).total_bytes >= 0
