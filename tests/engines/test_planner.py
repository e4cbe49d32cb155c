"""The memory plan against real engines on the CPU: KV tokens within 2 % of what they report, weights within 1 %.

Each row of the tables is one start up to where the KV cache is sized. What it is held against is printed by the engine (its own
"KV cache size" and "max_total_num_tokens") and by a plugin inside it (planner_report: bytes of parameters and of the pool).
"""
from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, free_ports, run_command, wait_until
from preflight import make_config
from raw_engine import CACHE, RawEngine
from tightrank import host, inputs, plan
from tightrank.check import model
from tightrank.plan.budget import kv_pool, memory_plan
from tightrank.plan.case import Case
from tightrank.plan.terms import READ, Memory
from tightrank.records import WorkerSpec

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

GIB = 2**30
PLUGIN = Path(__file__).parent / "planner_report"
READY_SECONDS = 300
COMMANDS = {"vllm": ("bin/vllm", "serve"), "sglang": ("bin/python", "-m", "sglang.launch_server")}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                           "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
ARGUMENTS = {"vllm": ("--enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024"),
             "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-running-requests", "4",
                        "--sleep-on-idle", "--chunked-prefill-size", "1024", "--mem-fraction-static", "0.1")}
TOKENS = {"vllm": re.compile(r"KV cache size: ([\d,]+) tokens"), "sglang": re.compile(r"max_total_num_tokens=(\d+)")}
REPORT = re.compile(r"planner_report (\w+)=(\d+)")
DUMMY = ("--load-format", "dummy")


@dataclass(frozen=True)
class Row:
    """One combination. `model`: changes of config.json of the tiny model `base`, its weights with it; `plugin`: one more for
    the engine; `weights`: whether an estimate is held against the engine's own, too."""
    model: dict[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    context: int = 8192
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    base: str = "dense"
    plugin: str = ""
    weights: bool = True


MIXED = {"num_hidden_layers": 6, "sliding_window": 1024,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
MLA = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_attention_heads": 16,
       "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
       "q_lora_rank": None, "first_k_dense_replace": 2, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
       "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
# Two layers with a window alone and an entry for 4 tokens; its weights are a tenth of what holds its layers together.
FOUR = Row({}, (*DUMMY, "--kv-cache-dtype", "fp8"), 16384, base="deepseek-v4", weights=False,
           plugin=str(ROOT / "scripts" / "cpu" / "deepseek_v4" / "plugin"))
HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
          "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 2,
          "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
          "partial_rotary_factor": 0.25}
VLLM = {
    "bf16": Row(), "float32": Row(args=("--dtype", "float32"), context=4096), "odd context": Row(context=5000),
    "two ranks": Row(tensor_parallel=2), "one key head on two ranks": Row({"num_key_value_heads": 1}, tensor_parallel=2),
    "wide heads, three layers": Row({"head_dim": 128, "num_hidden_layers": 3, "num_key_value_heads": 4}),
    "tied, padded vocabulary": Row({"tie_word_embeddings": True, "vocab_size": 500}),
    "small blocks": Row(args=("--block-size", "32"), context=3000),
    "windows in two layers of three": Row(MIXED, context=16384),
    "a window in all layers": Row({"sliding_window": 1024}, context=16384),
    "fp8 KV": Row(args=("--kv-cache-dtype", "fp8")), "MLA": Row(MLA, DUMMY), "DeepSeek-V4": FOUR,
    "linear attention in three layers of four": Row(HYBRID, DUMMY, weights=False),
    "two stages of three layers": Row({"num_hidden_layers": 3}, pipeline_parallel=2)}
SGLANG = {
    "bf16": Row(), "float32": Row(args=("--dtype", "float32"), context=4096), "two ranks": Row(tensor_parallel=2),
    "one key head on two ranks": Row({"num_key_value_heads": 1}, tensor_parallel=2),
    "pages of 64": Row(args=("--page-size", "64")), "an upper bound": Row(args=("--max-total-tokens", "5000")),
    "wide heads, three layers": Row({"head_dim": 128, "num_hidden_layers": 3, "num_key_value_heads": 4}),
    "tied, padded vocabulary": Row({"tie_word_embeddings": True, "vocab_size": 500}),
    "two stages of three layers": Row({"num_hidden_layers": 3}, pipeline_parallel=2), "windows kept whole": Row(MIXED)}


def spec_of(engine: str, row: Row, directory: Path) -> Case:
    """As `tightrank plan` would start it, without hooks; the model is made on the spot."""
    path = directory / "model"
    changes = [f"{key}={json.dumps(value)}" for key, value in row.model.items()]
    made = run_command([sys.executable, ROOT / "scripts" / "cpu" / "make_model.py", row.base, path, *changes])
    assert made.returncode == 0, made.stderr
    if DUMMY[0] in row.args:
        (path / "model.safetensors").unlink(missing_ok=True)
    length = ("--max-model-len" if engine == "vllm" else "--context-length", str(row.context))
    first, *rest = COMMANDS[engine]
    config = make_config(**{
        "engine": engine, "model": str(path), "command": (str(CACHE / "envs" / engine / first), *rest), "hooks": (),
        "workers[0].port": str(free_ports(1)[0]), "workers[0].args": (*ARGUMENTS[engine], *length, *row.args),
        "workers[0].env": ENVIRONMENTS[engine], "workers[0].tensor_parallel": str(row.tensor_parallel),
        "workers[0].pipeline_parallel": str(row.pipeline_parallel)})
    read = inputs.read(config, {})
    spec, = plan.build(config, host.read(), read)
    ranks = spec.tensor_parallel * spec.pipeline_parallel
    memory = Memory((24 * GIB,) * ranks, (20 * GIB,) * ranks, ranks, READ, "test")
    return Case(config, spec, read.model, model.read(path).tensors, memory, cpu=True)


@dataclass(frozen=True)
class Reported:
    """By the engine: `tokens`, and of each rank the bytes of its parameters and of its pool."""
    tokens: int
    weights_bytes: list[int]
    pool_bytes: list[int]


def reported(spec: WorkerSpec, directory: Path, plugin: str) -> Reported:
    """Starts it, waits for the size of its KV cache, ends it."""
    path = os.pathsep.join(filter(None, (str(PLUGIN), plugin)))
    engine = RawEngine(directory / "run", spec.argv, spec.port, None, env=spec.env, python_path=path)
    ranks = spec.tensor_parallel * spec.pipeline_parallel

    def text() -> str:
        return engine.log.read_text(errors="replace")

    def there() -> bool:
        found = text()
        return bool(TOKENS[spec.engine].search(found)) and found.count("planner_report pool_bytes=") >= ranks

    try:
        wait_until(lambda: there() or engine.process.poll() is not None, READY_SECONDS, f"{engine.log} says its size")
        found = text()
        assert there(), found[-4000:]
    finally:
        engine.stop()
    numbers = [(name, int(number)) for name, number in REPORT.findall(found)]
    tokens = TOKENS[spec.engine].search(found)
    assert tokens is not None
    return Reported(int(tokens[1].replace(",", "")), sorted(number for name, number in numbers if name == "weights_bytes"),
                    [number for name, number in numbers if name == "pool_bytes"])


def held_against(engine: str, row: Row, directory: Path) -> None:
    case = spec_of(engine, row, directory)
    found, planned = reported(case.spec, directory, row.plugin), memory_plan(case)
    weights = sorted(rank.bytes_of("weights") for rank in planned.ranks)
    assert not row.weights or weights == pytest.approx(found.weights_bytes, rel=0.01)
    pool = kv_pool(case, min(found.pool_bytes))
    assert pool is not None and pool.tokens == pytest.approx(found.tokens, rel=0.02)
    if engine == "vllm" or "--max-total-tokens" in row.args:           # their size does not depend on what is free
        tokens = planned.number("KV tokens")
        assert tokens is not None and tokens.value == pytest.approx(found.tokens, rel=0.02)


@pytest.mark.parametrize("name", VLLM)
def test_vllm(name: str, tmp_path: Path) -> None:
    held_against("vllm", VLLM[name], tmp_path)


@pytest.mark.parametrize("name", SGLANG)
def test_sglang(name: str, tmp_path: Path) -> None:
    held_against("sglang", SGLANG[name], tmp_path)
