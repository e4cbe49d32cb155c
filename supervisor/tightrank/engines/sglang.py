"""SGLang's answers, read from and run with 0.5.23 on the CPU. Paths in comments are under sglang/srt/."""
from __future__ import annotations

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
    is_address,
    match_step,
    number,
    sections,
    url,
)
from tightrank.records import StartStep, WorkerSpec

_FLAGS = FLAGS["sglang"]
# model_executor/model_runner.py, mem_cache/kv_cache_configurator.py, cuda_graph_setup.py, managers/scheduler.py
_STEPS = (
    (StartStep.WARMING, re.compile(r"max_total_num_tokens=|Application startup complete|The server is fired up|"
                                   r"Started server process")),
    (StartStep.CAPTURING, re.compile(r"Capture .*graph begin|Capturing batches")),
    (StartStep.SIZING, re.compile(r"Load weight end|KV [Cc]ache is allocated|Memory pool end")),
    (StartStep.LOADING, re.compile(r"Load weight begin|Loading safetensors|Init torch distributed begin")),
)
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
FAKE_BOOTSTRAP_HOST = "2.2.2.2"   # disaggregation/utils.py: a role answers such a request without its peer


class SGLang:
    name = "sglang"
    distribution = "sglang"
    releases: Mapping[str, tuple[int, ...]] = {"ranks": (0, 5, 20), "line": (0, 5, 20), "indexer": (0, 5, 20),
                                               "headroom": (0, 5, 20), "empty-cache": (0, 5, 20)}
    namesake = ("", "")
    plugins_variable = "SGLANG_PLUGINS"
    transfer_roles = ("prefill",)      # the bootstrap server
    transfer_port = 8998
    transfers = ()                     # plugins add to them (arg_groups/choices.py)
    address_variable = "SGLANG_HOST_IP"
    whole_steps = True

    def transfer_host(self, host: str, address: str) -> str:
        return host                    # the bootstrap server's address is the API's (managers/disagg_service.py)

    def peering(self, peering: Peering) -> tuple[Setting, ...]:
        seconds, decode = str(math.ceil(peering.patience_seconds)), peering.role == "decode"
        found = [Setting("--disaggregation-transfer-backend", peering.transfer or "mooncake",
                         "carries the KV; the same for prefill and decode", "pd.transfer" if peering.transfer else "")]
        if peering.port is not None:
            found.append(Setting("--disaggregation-bootstrap-port", str(peering.port),
                                 "decode workers find this one there", "workers[].transfer_port"))
        if is_address(peering.address):
            found.append(Setting("SGLANG_HOST_IP", peering.address,
                                 "where it listens for KV; its own guess is the address of the default route"))
        # disaggregation/common/conn.py: 300 s each, and a heartbeat every 5 s; under 2 s it takes 2 s
        found += [Setting("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", seconds,
                          "a prefill whose decode worker says nothing ends after pd.patience, not 300 s"),
                  Setting("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", seconds,
                          "a decode whose KV does not come ends after pd.patience, not 300 s")]
        if decode:
            found += [Setting("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2", "a prefill worker that is gone is seen sooner"),
                      Setting("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "2", "after so many heartbeats without answer")]
        return tuple(found)

    def arguments(self, wish: Wish) -> tuple[str, ...]:
        args = wish.worker.args
        ours: tuple[str, ...] = ()
        if wish.maximum is not None and not has(args, *_FLAGS["chunk"]):
            ours += ("--chunked-prefill-size", str(wish.maximum))
        if wish.context is not None and not has(args, *_FLAGS["context"]):
            ours += ("--context-length", str(wish.context))
        return ours if wish.as_written else (*self._base(wish), *args, *ours)

    @staticmethod
    def _base(wish: Wish) -> tuple[str, ...]:
        worker, place = wish.worker, wish.place
        meeting = () if place is None else ("--nnodes", str(place.count), "--node-rank", str(place.rank),
                                            "--dist-init-addr", f"{place.address}:{place.port}")
        return ("--model-path", wish.model, "--host", worker.host, "--port", str(worker.port),
                *given("--tp-size", worker.tensor_parallel, unless=1),
                *given("--pp-size", worker.pipeline_parallel, unless=1),
                *given("--served-model-name", wish.served_model),
                *given("--disaggregation-mode", worker.role, unless="both"), *meeting)

    def environment(self) -> Mapping[str, str]:
        # On by default, they keep a dead engine's port open: 5 s (dead rank) to 65 s (dead detokenizer), measured.
        return {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}

    def score_variables(self, budget_bytes: int) -> Mapping[str, str]:
        # read where its module is imported (kernels/ops/attention/dsv4/fp4_indexer_hip.py); the others are set by the adapter
        return {"SGLANG_DSV4_FP4_LOGITS_BUDGET_MB": str(budget_bytes >> 20)}

    def refusal(self, worker: Worker, hooks: Sequence[str]) -> str | None:
        args = worker.args
        if worker.api_key_file is not None and not has(args, "--api-key", "--config"):
            return ("api_key_file: SGLang reads its key only from --api-key, which every user of the host can see, or "
                    "from a file: add --config FILE with `api-key: ...` in it")
        if (number("sglang", args, "data_parallel") or 1) > 1 or has(args, "--enable-dp-attention"):
            return "data parallelism is not supported inside one worker; name one worker per replica"
        if "line" in hooks and has(args, "--enable-dynamic-chunking"):
            return "--enable-dynamic-chunking sets chunk sizes and so does the hook line; drop one of the two"
        return None

    def own_context(self, model: Mapping[str, Any]) -> int:
        """As get_context_length in utils/hf_transformers/common.py."""
        text = sections(model)
        rotary = text.get("rope_scaling") or text.get("rope_parameters") or {}
        scaled = "original_max_position_embeddings" in rotary or rotary.get("rope_type") == "llama3"
        factor = 1 if scaled else rotary.get("factor", 1)
        return next((int(factor * text[name]) for name in _LENGTHS if text.get(name)), 2048)

    def granule(self, args: Sequence[str], model: Mapping[str, Any]) -> int:
        page = number("sglang", args, "page") or (256 if model.get("model_type") == "deepseek_v4" else 1)
        return math.lcm(LEAST_GRANULE, page)

    def start_step(self, text: str) -> StartStep | None:
        return match_step(_STEPS, text)

    def processes(self, spec: WorkerSpec) -> tuple[Expected, ...]:
        schedulers = Expected("scheduler", spec.ranks_here, spec.ranks_here)
        return (schedulers,) if spec.node else (schedulers, Expected("detokenizer", 1, 1))

    def health(self, spec: WorkerSpec) -> Probe:
        return Probe("GET", url(spec, "/health"), {})

    def canary(self, spec: WorkerSpec) -> Probe:
        body: dict[str, Any] = {"input_ids": [1, 2, 3, 4],
                                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        if spec.role != "both":
            body |= {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}
        return Probe("POST", url(spec, "/generate"), authorization(spec.api_key), body)

    def budget(self, spec: WorkerSpec, budget: int) -> Probe | None:
        # An admin key, when there is one, is asked for here and the API key is not (utils/auth.py, ADMIN_OPTIONAL).
        key = value(spec.argv, "--admin-api-key") or spec.api_key
        return Probe("POST", url(spec, "/set_internal_state"), authorization(key),
                     {"server_args": {wire.BUDGET_KEY: budget}})


ENGINE = SGLang()
