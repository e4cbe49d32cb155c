"""vLLM's answers, read from and run with 0.32.0 on the CPU. Paths in comments are under vllm/."""
from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tightrank.adapter import wire
from tightrank.config import Worker
from tightrank.config.flags import FLAGS, has, value
from tightrank.engines.base import (
    LEAST_GRANULE,
    Expected,
    Peering,
    Probe,
    Setting,
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


_EXECUTOR = FLAGS["vllm"]["executor"][0]
LEASE_SECONDS = 30          # vLLM's own kv_lease_duration; renewed by the decode worker every sixth of it


def _in_workers(hooks: Sequence[str]) -> list[str]:
    """Those of `hooks` that live in the worker processes alone."""
    return [hook for hook in hooks if wire.HOOK_ROLES["vllm"].get(hook) == ("worker",)]


class VLLM:
    name = "vllm"
    distribution = "vllm"
    releases: Mapping[str, tuple[int, ...]] = {"ranks": (0, 28), "line": (0, 28), "indexer": (0, 28), "headroom": (0, 28),
                                               "empty-cache": (0, 28), "heads": (0, 28)}
    namesake = ("", "")
    plugins_variable = "VLLM_PLUGINS"
    transfer_roles = ("prefill", "decode")       # NIXL's side channel
    transfer_port = 5600
    transfers = ("nixl",)
    address_variable = "VLLM_HOST_IP"
    whole_steps = False

    def transfer_host(self, host: str, address: str) -> str:
        return address                 # NIXL listens at the address that it tells its peers (nixl/base_scheduler.py)

    def peering(self, peering: Peering) -> tuple[Setting, ...]:
        # kv_buffer_device is left to vLLM: the platform's own device, "cpu" on a CPU (config/kv_transfer.py)
        lease_seconds = int(min(LEASE_SECONDS, peering.patience_seconds))
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[peering.role]     # kv_both is deprecated
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_load_failure_policy": "fail",
                    "kv_connector_extra_config": {"kv_lease_duration": lease_seconds}}
        return (Setting("--kv-transfer-config", json.dumps(transfer, separators=(",", ":")),
                        f"NIXL carries the KV; what fails to arrive fails the request; a prefill worker keeps KV for "
                        f"{lease_seconds} s after the decode worker's last sign", "pd.transfer" if peering.transfer else ""),
                Setting("VLLM_NIXL_SIDE_CHANNEL_HOST", peering.address,
                        "where it listens for its peers, and what it tells them", "workers[].address"),
                Setting("VLLM_NIXL_SIDE_CHANNEL_PORT", str(peering.port), "each worker of a host needs its own",
                        "workers[].transfer_port"))

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
        if _in_workers(wish.hooks) and not has(args, _EXECUTOR):   # else a single rank is a part of the engine core's process
            ours += (_EXECUTOR, "mp")
        return ours if wish.as_written else (*self._base(wish), *args, *ours)

    @staticmethod
    def _base(wish: Wish) -> tuple[str, ...]:
        worker, place = wish.worker, wish.place
        meeting: tuple[str, ...] = ()
        if place is not None:
            meeting = ("--nnodes", str(place.count), "--node-rank", str(place.rank), "--master-addr", place.address,
                       "--master-port", str(place.port), *(("--headless",) if place.rank else ()))
        model = (wish.model,) if wish.command[-1:] == ("serve",) else ("--model", wish.model)
        return (*model, "--host", worker.host, "--port", str(worker.port),
                *given("--tensor-parallel-size", worker.tensor_parallel, unless=1),
                *given("--pipeline-parallel-size", worker.pipeline_parallel, unless=1),
                *given("--served-model-name", wish.served_model), *meeting)

    def environment(self) -> Mapping[str, str]:
        return {}

    def score_variables(self, budget_bytes: int) -> Mapping[str, str]:
        return {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": str(budget_bytes >> 20)}

    def refusal(self, worker: Worker, hooks: Sequence[str]) -> str | None:
        args = worker.args
        if (wanted := _in_workers(hooks)) and value(args, _EXECUTOR) not in (None, "mp"):
            return (f"{_EXECUTOR} {value(args, _EXECUTOR)}: the hook {wanted[0]} needs mp, one process per rank; leave the "
                    "flag out")
        if "headroom" in hooks and has(args, "--num-gpu-blocks-override"):
            return ("--num-gpu-blocks-override sizes the KV cache whatever memory there is, the hook headroom by what there "
                    "is; drop one of the two")
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
        ranks = spec.ranks_here
        if spec.node:              # an executor without an engine core (entrypoints/cli/serve.py run_headless)
            return (Expected("worker", ranks, ranks),)
        # A single rank on a GPU runs inside the engine core (config/parallel.py: "uni"); on the CPU it is a process.
        inside = ranks == spec.nodes == 1 and value(spec.argv, _EXECUTOR) != "mp"
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
