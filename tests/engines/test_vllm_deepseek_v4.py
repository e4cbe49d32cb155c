"""The line on a DeepSeek-V4 whose indexer's score buffer is real: two prompts at once, and the buffer stays bounded."""
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ROOT
from raw_engine import CACHE, RawEngine, interpreter
from tightrank_adapter import wire

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
needs_amx = pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(),
                               reason="vLLM's DeepSeek-V4 needs a processor with AMX for chunked prefill")

PORT, BUDGET, LENGTHS = 32510, 4 << 20, (7000, 5000)
BYTES_PER_PAIR = 1  # fp32 scores against one compressed key for 4 tokens


@needs_amx
def test_the_score_buffer_of_two_prompts_in_flight_stays_under_the_budget(tmp_path: Path) -> None:
    scores = tmp_path / "scores.jsonl"
    line = {"budget": BUDGET, "minimum": 256, "maximum": 2048, "granule": 64, "rule": "span", "step": "granule"}
    argv = [interpreter("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(CACHE / "models" / "deepseek-v4"),
            "--host", "127.0.0.1", "--port", str(PORT), "--served-model-name", "tiny", "--load-format", "dummy",
            "--kv-cache-dtype", "fp8", "--max-model-len", "16384", "--max-num-batched-tokens", "2048",
            "--max-num-seqs", "4", "--enforce-eager"]
    engine = RawEngine(tmp_path / "run", argv, PORT, wire.Settings("deepseek", 1, "vllm", {
                           "ranks": {}, "line": line, "indexer": {"budget_bytes": 16 << 20}}),
                       python_path=str(ROOT / "scripts" / "cpu" / "deepseek_v4" / "plugin"),
                       env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
                            "MALLOC_MMAP_THRESHOLD_": "1048576", "DEEPSEEK_V4_SCORES": str(scores)})
    try:
        engine.wait_ready()
        assert engine.hello("engine-core").facts["granule_tokens"] == 256
        indexer = engine.hello("worker").hooks["indexer"]      # this builder takes all rows at once, whatever the budget
        assert indexer["state"] == wire.FAILED and "DeepseekV4CPUIndexerMetadataBuilder" in indexer["found"]
        with ThreadPoolExecutor(2) as pool:
            statuses = list(pool.map(lambda length: engine.request("POST", "/v1/completions", {
                "model": "tiny", "prompt": [(index + length) ** 2 % 250 for index in range(length)], "max_tokens": 2,
                "temperature": 0})[0], LENGTHS))
        assert statuses == [200, 200]
        steps = engine.steps_until(0, sum(LENGTHS))
    finally:
        engine.stop()
    assert all(step.rows * step.width <= BUDGET and not step.over for step in steps)
    sizes = [json.loads(text)["bytes"] for text in scores.read_text().splitlines()]
    assert BUDGET // 2 < max(sizes) <= BUDGET * BYTES_PER_PAIR  # reached, and kept
