"""vLLM's answers, read from and run with 0.32.0 on the CPU. Paths in comments are under vllm/."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tightrank.config import Worker
from tightrank.config.flags import FLAGS, has, value
from tightrank.engines.base import (
    LEAST_GRANULE,
    Expected,
    Probe,
    Wish,
    authorization,
    given,
    match_step,
    number,
    sections,
    url,
)
from tightrank.records import StartStep, WorkerSpec

_FLAGS = FLAGS["vllm"]
# v1/worker/gpu_model_runner.py, cpu_model_runner.py, gpu_worker.py, v1/core/kv_cache_utils.py, v1/engine/core.py
_STEPS = (
    (StartStep.WARMING, re.compile(r"init engine \(profile|Starting vLLM (API )?server|Application startup complete|"
                                   r"Warming up|Started server process")),
    (StartStep.CAPTURING, re.compile(r"Capturing CUDA graphs|Graph capturing|Compile and warming up model")),
    (StartStep.SIZING, re.compile(r"Model loading took|Available KV cache memory|KV cache size:|Loading weights took")),
    (StartStep.LOADING, re.compile(r"Starting to load model|Loading safetensors|Loading drafter model|"
                                   r"Initializing a V1 LLM engine")),
)
# transformers_utils/model_arch_config_convertor.py: the smallest of these is the model's length
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
            "max_sequence_length", "max_seq_length", "seq_len")
# config/model.py _get_and_verify_max_len: rotary scalings whose factor is in max_position_embeddings already
_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


class VLLM:
    name = "vllm"
    distribution = "vllm"
    releases: Mapping[str, tuple[int, ...]] = {"ranks": (0, 28), "line": (0, 28)}
    plugins_variable = "VLLM_PLUGINS"
    transfer_roles = ("prefill", "decode")       # NIXL's side channel
    transfer_port = 5600

    def arguments(self, wish: Wish) -> tuple[str, ...]:
        args = wish.worker.args
        ours: tuple[str, ...] = ()
        if wish.maximum is not None and not has(args, *_FLAGS["chunk"]):
            ours += ("--max-num-batched-tokens", str(wish.maximum))
        if wish.maximum is not None and not has(args, "--enable-chunked-prefill"):
            ours += ("--enable-chunked-prefill",)
        if wish.context is not None and not has(args, *_FLAGS["context"]):
            ours += ("--max-model-len", str(wish.context))
        if not has(args, "--shutdown-timeout"):   # its default, 0, aborts what is in flight at SIGTERM (config/vllm.py)
            ours += ("--shutdown-timeout", str(math.ceil(wish.drain_seconds)))
        return ours if wish.as_written else (*self._base(wish), *args, *ours)

    @staticmethod
    def _base(wish: Wish) -> tuple[str, ...]:
        worker = wish.worker
        model = (wish.model,) if wish.command[-1:] == ("serve",) else ("--model", wish.model)
        return (*model, "--host", worker.host, "--port", str(worker.port),
                *given("--tensor-parallel-size", worker.tensor_parallel, unless=1),
                *given("--pipeline-parallel-size", worker.pipeline_parallel, unless=1),
                *given("--served-model-name", wish.served_model))

    def environment(self) -> Mapping[str, str]:
        return {}

    def refusal(self, worker: Worker, hooks: Sequence[str]) -> str | None:
        args = worker.args
        if worker.role != "both" and not has(args, "--kv-transfer-config"):
            return f"role {worker.role} needs --kv-transfer-config '{{...}}'; add it, or make the role both"
        if (number("vllm", args, "data_parallel") or 1) > 1:
            return "--data-parallel-size over 1 is not supported inside one worker; name one worker per replica"
        if "line" in hooks and has(args, "--no-enable-chunked-prefill"):
            return "--no-enable-chunked-prefill leaves the hook line without chunks; drop one of the two"
        return None

    def own_context(self, model: Mapping[str, Any]) -> int:
        text = sections(model)
        lengths = [int(text[name]) for name in _LENGTHS if text.get(name)]
        if text.get("model_max_length"):
            lengths = [int(text["model_max_length"])]
        rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        if kind == "longrope" and text.get("original_max_position_embeddings"):
            return int(text["original_max_position_embeddings"])
        factor = 1 if kind in _SCALED or "gemma3" in model.get("model_type", "") else rotary.get("factor") or 1
        return int(min(lengths, default=2048) * factor)

    def granule(self, args: Sequence[str], model: Mapping[str, Any]) -> int:
        block = number("vllm", args, "page") or 16
        if model.get("model_type") == "deepseek_v4":   # its kernels know no other size (platforms/cpu.py, v1/attention)
            block = 256
        return math.lcm(LEAST_GRANULE, block)

    def start_step(self, text: str) -> StartStep | None:
        return match_step(_STEPS, text)

    def processes(self, spec: WorkerSpec) -> tuple[Expected, ...]:
        ranks = spec.tensor_parallel * spec.pipeline_parallel
        # A single rank on a GPU runs inside the engine core (config/parallel.py: "uni"); on the CPU it is a process.
        inside = ranks == 1 and value(spec.argv, "--distributed-executor-backend") != "mp"
        return Expected("engine-core", 1, 1), Expected("worker", 0 if inside else ranks, ranks)

    def health(self, spec: WorkerSpec) -> Probe:
        return Probe("GET", url(spec, "/health"), {})

    def canary(self, spec: WorkerSpec) -> Probe:
        # An ordinary prompt: 4 tokens as the first request ever kill the bf16 worker of 0.32.0 on a CPU with AMX (SIGILL).
        body = {"model": spec.served_model, "prompt": list(range(1, 65)), "max_tokens": 1, "temperature": 0}
        return Probe("POST", url(spec, "/v1/completions"), authorization(spec.api_key), body)

    def budget(self, spec: WorkerSpec, budget: int) -> Probe | None:
        return None


ENGINE = VLLM()
