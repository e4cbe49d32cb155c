"""A short request that arrives in the middle of a long prefill: the line may not keep it waiting for longer than twice what it
waits without. On both engines a long prompt fills each step without the line, and the short one waits for its end; with it the
short one joins the next step."""
from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from helpers import ROOT, free_ports, wait_until
from raw_engine import CACHE, RawEngine, interpreter
from tightrank_adapter import wire

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1200)]

LONG, SHORT, CONTEXT, CHUNK = 60_000, 32, 65_536, 1024
ASKED, PATIENCE = 3, 30        # without the line SGLang's answer takes minutes: waited for 30 times as long as with it
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


def start(directory: Path, engine: str, model: str, hooks: dict[str, Any]) -> RawEngine:
    [port] = free_ports(1)
    head = [str(CACHE / "envs" / "vllm" / "bin" / "vllm"), "serve", model, "--served-model-name", "tiny"] if engine == "vllm" \
        else [interpreter("sglang"), "-m", "sglang.launch_server", "--model-path", model]
    stubs = str(ROOT / "scripts" / "cpu" / "stubs") if engine == "sglang" else ""
    return RawEngine(directory, [*head, "--host", "127.0.0.1", "--port", str(port), *ARGUMENTS[engine]], port,
                     wire.Settings("w", 1, engine, hooks), env=ENVIRONMENTS[engine], python_path=stubs)


def ask(server: RawEngine, engine: str, tokens: int, seed: int, patience: float = 600) -> float:
    """Seconds until its one token has come; `patience` where it had not by then."""
    ids = [(place * 7 + seed * 13) % 250 + 3 for place in range(tokens)]
    body: dict[str, Any] = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0} if engine == "vllm" else \
        {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    began = time.monotonic()
    try:
        status, answer = server.request("POST", "/v1/completions" if engine == "vllm" else "/generate", body, timeout=patience)
    except TimeoutError:
        return patience
    assert status == 200, answer
    return time.monotonic() - began


def beside(server: RawEngine, engine: str, patience: float) -> list[float]:
    """Seconds of short ones, one after the other, from when half of the long one is computed. Its end is not waited for: on a
    CPU SGLang's attention goes over all keys for each of them in each chunk, and the second half takes minutes."""
    def cut_short() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask(server, engine, LONG, 2)

    server.wait_ready()
    ask(server, engine, 300, 1)
    long, found = threading.Thread(target=cut_short, daemon=True), list[float]()
    long.start()
    wait_until(lambda: any(step.width >= LONG // 2 for step in server.steps()), 400, "half of the long prompt")
    while long.is_alive() and len(found) < ASKED and patience not in found:
        found.append(ask(server, engine, SHORT, 3 + len(found), patience))
    assert found, "the long one had ended already"
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_waits_no_longer_than_twice(tmp_path: Path, dense_model: str, engine: str) -> None:
    found: dict[str, list[float]] = {}
    for name, hooks in (("with", {"ranks": {}, "line": LINE}), ("without", {"ranks": {}})):
        server = start(tmp_path / name, engine, dense_model, hooks)
        try:
            found[name] = beside(server, engine, PATIENCE * median(found["with"]) if found else 300)
            rows = {step.rows for step in server.steps() if step.width > LONG // 2}
            assert (max(rows) < CHUNK - SHORT) == (name == "with"), f"{name}: chunks of {rows}"
        finally:
            server.stop()
    without, with_line = median(found["without"]), median(found["with"])
    print(f"{engine}: {SHORT} tokens in the middle of {LONG}: without the line {without:.2f} s {found['without']}, with it "
          f"{with_line:.2f} s {found['with']}: {with_line / without:.2f}")
    assert with_line <= 2 * without
