"""ATOM's answers, read from v0.1.2 to 2026-08-22 and run on stand-ins only: its packages need ROCm. Paths are under atom/."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tightrank.config import Worker
from tightrank.config.flags import FLAGS, has
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

_FLAGS = FLAGS["atom"]
# model_engine/model_runner.py, model_engine/engine_core.py, entrypoints/openai/api_server.py
_STEPS = (
    (StartStep.WARMING, re.compile(r"cudagraph capture.{0,4000} cost: |EngineCore fully initialized and ready|"
                                   r"Starting server on |Application startup complete|Started server process")),
    (StartStep.CAPTURING, re.compile(r"Memory budget: total_gpu=")),
    (StartStep.SIZING, re.compile(r"Model load done: |Model warmup done: ")),
    (StartStep.LOADING, re.compile(r"Initializing engine with model |Creating EngineCore|ModelRunner rank=|"
                                   r"Loading drafter model")),
)
_ELSEWHERE = "name one worker per replica"


class Atom:
    name = "atom"
    distribution = "atom"
    # v0.1.6-rc0 has no variable for the indexer yet; the adapter looks again where a release candidate was installed
    releases: Mapping[str, tuple[int, ...]] = {
        "ranks": (0, 1, 2), "indexer": (0, 1, 6), "headroom": (0, 1, 2), "empty-cache": (0, 1, 2)}
    namesake = ("atom/entrypoints/openai_server.py",
                "PyPI's atom (memory efficient Python objects, by the Nucleic team), which only shares the name; install "
                "AMD's ATOM from github.com/ROCm/ATOM in an environment of its own, or use its image")
    plugins_variable = ""              # its own server knows no plugins: sitecustomize is the way in
    transfer_roles = ()
    transfer_port = 0
    transfers = ()
    address_variable = ""
    whole_steps = False

    def transfer_host(self, host: str, address: str) -> str:
        return address

    def peering(self, peering: Peering) -> tuple[Setting, ...]:
        return ()                      # `refusal` lets no role but both come so far

    def arguments(self, wish: Wish) -> tuple[str, ...]:
        # No chunk or length of ours: without the hook `line` there is none. v0.1.2 takes each flag in one spelling only.
        return () if wish.as_written else (*self._base(wish), *wish.worker.args)

    @staticmethod
    def _base(wish: Wish) -> tuple[str, ...]:
        worker = wish.worker
        return ("--model", wish.model, "--host", worker.host, "--server-port", str(worker.port),
                *given("--tensor-parallel-size", worker.tensor_parallel, unless=1),
                *given("--pipeline-parallel-size", worker.pipeline_parallel, unless=1),
                *given("--served-model-name", wish.served_model))

    def environment(self) -> Mapping[str, str]:
        return {}

    def score_variables(self, budget_bytes: int) -> Mapping[str, str]:
        return {"ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB": str(budget_bytes >> 20)}    # read as the models' modules are imported

    def refusal(self, worker: Worker, hooks: Sequence[str]) -> str | None:
        args = worker.args
        if worker.role != "both":
            return (f"role {worker.role}: the gateway cannot pair ATOM workers yet; leave role out and, where ATOM's "
                    "own router pairs them, write --kv-transfer-config in args")
        if worker.transfer_port is not None:
            return "transfer_port: ATOM takes handshake_port in --kv-transfer-config; leave transfer_port out"
        if worker.api_key_file is not None:
            return "api_key_file: ATOM's server asks for no key; leave it out, and let only the gateway reach its port"
        if (number("atom", args, "data_parallel") or 1) > 1 or has(args, "--enable-dp-attention"):
            return f"data parallelism is not supported inside one worker; {_ELSEWHERE}"
        if (number("atom", args, "context_parallel") or 1) > 1:
            return "--prefill-context-parallel-size over 1 is not supported: its ranks are not counted; leave it out"
        if has(args, "--enable-rapidserve"):
            return "--enable-rapidserve starts a second set of ranks, which is not supported; leave it out"
        return None

    def own_context(self, model: Mapping[str, Any]) -> int:
        return int(sections(model).get("max_position_embeddings") or 2048)      # config.py Config.__post_init__

    def granule(self, args: Sequence[str], model: Mapping[str, Any]) -> int:
        return math.lcm(LEAST_GRANULE, number("atom", args, "page") or 16)

    def start_step(self, text: str) -> StartStep | None:
        return match_step(_STEPS, text)

    def processes(self, spec: WorkerSpec) -> tuple[Expected, ...]:
        # One engine core for each pipeline stage, which starts the runners of its stage (engine_core_mgr.py).
        stages, ranks = spec.pipeline_parallel, spec.tensor_parallel * spec.pipeline_parallel
        return Expected("engine-core", stages, stages), Expected("runner", ranks, ranks)

    def health(self, spec: WorkerSpec) -> Probe:
        # {"status": "ok"} whatever became of the engine: it tells that the port is open, and only the canary more.
        return Probe("GET", url(spec, "/health"), {})

    def canary(self, spec: WorkerSpec) -> Probe:
        # Text: its prompt is a string (entrypoints/openai/protocol.py), tokens get 422.
        body = {"model": spec.served_model, "prompt": "Is anybody there?", "max_tokens": 1, "temperature": 0,
                "ignore_eos": True}
        return Probe("POST", url(spec, "/v1/completions"), authorization(spec.api_key), body)

    def budget(self, spec: WorkerSpec, budget: int) -> Probe | None:
        return None


ENGINE = Atom()
