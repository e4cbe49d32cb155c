"""The hook `heads` in a real vLLM without a ROCm device: it says what it found, and the engine serves. One server."""
from __future__ import annotations

from pathlib import Path

import pytest
from raw_engine import CACHE, RawEngine, interpreter
from tightrank_adapter import wire

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PORT = 32640


def test_a_worker_without_the_backend_fails_the_hook_and_serves(tmp_path: Path) -> None:
    settings = wire.Settings("solo", 1, "vllm", {"ranks": {}, "line": {"budget": 1_000_000, "minimum": 128, "maximum": 512,
                                                                       "granule": 64}, "heads": {}})
    argv = [interpreter("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(CACHE / "models" / "dense"), "--host",
            "127.0.0.1", "--port", str(PORT), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024",
            "--max-num-batched-tokens", "512", "--max-num-seqs", "2", "--enforce-eager"]
    engine = RawEngine(tmp_path / "run", argv, PORT, settings, env={
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"})
    try:
        engine.wait_ready()
        status, _ = engine.request("POST", "/v1/completions", {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2})
        assert status == 200
        assert engine.hello("worker").hooks["heads"] == {
            "state": wire.FAILED, "wanted": "vLLM's ROCm AITER MLA backend with FP8 prefill",
            "found": "attention backend CPU_ATTN on device cpu"}
        assert "heads" not in engine.hello("engine-core").hooks
        assert engine.faults() == []
    finally:
        engine.stop()
