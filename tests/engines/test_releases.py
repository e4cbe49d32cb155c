"""One more release of each engine, as a real server on the CPU with all hooks that apply: its own code, run in the environment
of the release that is tested throughout (scripts/setup releases; vLLM's has the kernels of that one)."""
from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers import ROOT, Proves, free_ports, wait_until
from raw_engine import CACHE, RawEngine, interpreter, wire
from tightrank_adapter import headroom, line

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RELEASES = {"sglang": "0.5.22", "vllm": "0.33.0"}
BUDGET, KEYWORDS = 1_500_000, {"minimum": 128, "maximum": 1024, "granule": 128}
HOOKS = {"ranks": {}, "line": {"budget": BUDGET, **KEYWORDS}, "headroom": {"fraction": 0.01, "ranks": 1},
         "empty-cache": {"when": "every-chunk", "mark_bytes": 0}}
ROLES = {"sglang": ("scheduler",), "vllm": ("engine-core", "worker")}
PROMPT = [(place * 7) % 250 + 3 for place in range(4000)]


def start(engine: str, directory: Path, model: str) -> RawEngine:
    port, release = free_ports(1)[0], str(CACHE / "releases" / f"{engine}-{RELEASES[engine]}")
    settings = wire.Settings("w", 1, engine, HOOKS)
    if engine == "sglang":
        argv = [interpreter(engine), "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port",
                str(port), "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.04",
                "--max-running-requests", "8", "--chunked-prefill-size", "1024", "--sleep-on-idle"]
        env = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        path = f"{release}:{ROOT / 'scripts' / 'cpu' / 'stubs'}"
        return RawEngine(directory, argv, port, settings, env=env, python_path=path)
    argv = [interpreter(engine), "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", "tiny", "--max-model-len", "8192", "--max-num-batched-tokens", "1024",
            "--enable-chunked-prefill", "--max-num-seqs", "8", "--enforce-eager"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    return RawEngine(directory, argv, port, settings, env=env, python_path=release)


def complete(engine: RawEngine, name: str, ids: list[int]) -> None:
    path, body = {
        "sglang": ("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}),
        "vllm": ("/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 2, "temperature": 0})}[name]
    status, answer = engine.request("POST", path, body)
    assert status == 200, answer


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_all_hooks_do_their_work(name: str, tmp_path: Path, dense_model: str, proves: Proves) -> None:
    engine = start(name, tmp_path / "run", dense_model)
    try:
        engine.wait_ready()
        before = len(engine.steps())
        complete(engine, name, PROMPT)
        steps = engine.steps_until(before, len(PROMPT))
        time.sleep(1.1)
        complete(engine, name, PROMPT[1:200])
        hellos = [hello for hello in engine.hellos() if hello.role in ROLES[name]]
        states = {hook: state["state"] for hello in hellos for hook, state in hello.hooks.items()}
        assert states == dict.fromkeys(HOOKS, wire.IN_FORCE) and not engine.faults()
        assert {hello.engine_version.partition("+")[0] for hello in hellos} == {RELEASES[name]}
        for step in steps[:-1]:
            [[prefix, new]] = step.chunks
            assert new == line.chunk_tokens(BUDGET, prefix, **KEYWORDS) and not step.over
        assert len({step.rows for step in steps}) > 3, "the line must bind for this to show anything"
        holder = engine.hello(ROLES[name][-1])
        terms = headroom.of_fact(holder.facts["headroom"])
        assert terms is not None and terms.bound == "engine" and terms.own_bytes > 0
        wait_until(lambda: engine.hello(ROLES[name][-1]).facts["cache_releases"] >= len(steps), 10, "the heap went back")
        proves(name, holder.engine_version, *HOOKS, by="server")
    finally:
        engine.stop()
