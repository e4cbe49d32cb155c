"""A short request that arrives in the middle of a long prefill: the line may not keep it waiting for longer than twice what it
waits without."""
from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, free_ports
from raw_engine import CACHE, RawEngine, interpreter
from tightrank_adapter import wire

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1200)]

LONG, SHORT, CONTEXT, CHUNK = 60_000, 32, 65_536, 1024
LINE = {"budget": CHUNK * 20_000, "minimum": 64, "maximum": CHUNK, "granule": 64}      # binds from 20k tokens on
OVERRIDE = json.dumps({"max_position_embeddings": CONTEXT})
ARGUMENTS = {
    "vllm": ("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "4", "--enforce-eager",
             "--no-enable-prefix-caching", "--hf-overrides", OVERRIDE),
    "sglang": ("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", str(2 * CONTEXT),
               "--max-running-requests", "4", "--chunked-prefill-size", str(CHUNK), "--sleep-on-idle", "--disable-radix-cache",
               "--json-model-override-args", OVERRIDE)}
ENVIRONMENTS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
                "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}}


def start(directory: Path, engine: str, model: str, hooked: bool) -> RawEngine:
    [port] = free_ports(1)
    head = [str(CACHE / "envs" / "vllm" / "bin" / "vllm"), "serve", model, "--served-model-name", "tiny"] if engine == "vllm" \
        else [interpreter("sglang"), "-m", "sglang.launch_server", "--model-path", model]
    settings = wire.Settings("w", 1, engine, {"ranks": {}, "line": LINE}) if hooked else None
    stubs = str(ROOT / "scripts" / "cpu" / "stubs") if engine == "sglang" else ""
    return RawEngine(directory, [*head, "--host", "127.0.0.1", "--port", str(port), *ARGUMENTS[engine]], port, settings,
                     env=ENVIRONMENTS[engine], python_path=stubs)


def ask(server: RawEngine, engine: str, tokens: int, seed: int) -> float:
    """Seconds until its one token has come."""
    ids = [(place * 7 + seed * 13) % 250 + 3 for place in range(tokens)]
    body: dict[str, Any] = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0} if engine == "vllm" else \
        {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    began = time.monotonic()
    status, answer = server.request("POST", "/v1/completions" if engine == "vllm" else "/generate", body, timeout=600)
    assert status == 200, answer
    return time.monotonic() - began


def waits(server: RawEngine, engine: str) -> tuple[float, float]:
    """Seconds of the long one alone, and of a short one that comes when half of that has passed."""
    server.wait_ready()
    ask(server, engine, 300, 1)
    alone = ask(server, engine, LONG, 2)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask, server, engine, LONG, 3)
        time.sleep(alone / 2)
        assert not beside.done()
        short = ask(server, engine, SHORT, 4)
        beside.result()
    return alone, short


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_waits_no_longer_than_twice(tmp_path: Path, dense_model: str, engine: str) -> None:
    found = {}
    for hooked in (False, True):
        server = start(tmp_path / f"run-{hooked}", engine, dense_model, hooked)
        try:
            found[hooked] = waits(server, engine)
            if hooked:
                rows = {step.rows for step in server.steps() if step.rows >= 64}
                assert min(rows) < CHUNK, "the line did not bind"
        finally:
            server.stop()
    (plain, without), (lined, with_line) = found[False], found[True]
    print(f"{engine}: {LONG} tokens alone {plain:.1f} s without the line, {lined:.1f} s with; {SHORT} tokens beside it "
          f"{without:.2f} s without, {with_line:.2f} s with: {with_line / without:.2f}")
    assert with_line <= 2 * without
