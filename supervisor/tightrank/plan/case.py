"""All that goes into the memory plan of one worker. Pure."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tightrank import engines
from tightrank.config import Config
from tightrank.config.flags import FLAGS, value
from tightrank.engines.base import number
from tightrank.plan import estimate, kv, peak, process, weights
from tightrank.plan.line import own_context
from tightrank.plan.pace import Pace
from tightrank.plan.safetensors import Tensor
from tightrank.plan.shape import ModelShape, shape
from tightrank.plan.terms import ASSUMED, READ, Memory, Term
from tightrank.records import WorkerSpec

_DEFAULT_CHUNK = {"vllm": 2048, "atom": 16384}


@dataclass(frozen=True)
class Case:
    """`tensors`: of the model's files, () where they are not there. `measured`: terms of earlier runs by the names of
    calibration.py. `memory` None: not known."""
    config: Config
    spec: WorkerSpec
    model: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()
    memory: Memory | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)
    pace: Pace | None = None

    @cached_property
    def shape(self) -> ModelShape:
        return shape(self.model)

    @cached_property
    def in_files(self) -> bool:
        """Whether the weights can be read from the files' headers, and will be by the engine."""
        return bool(self.tensors) and value(self.spec.argv, "--load-format") != "dummy"

    @cached_property
    def stage_weights(self) -> tuple[int, ...]:
        """Bytes on each rank of each pipeline stage."""
        found = self.tensors if self.in_files else estimate.tensors(self.shape, self.model)
        return weights.rank_bytes(found, self.shape, weights.split(self.spec, self.model, self.cpu))

    def weights(self, rank: int) -> Term:
        """What the rank holds of them; 0 where config.json does not say enough and no files are there."""
        size = self.stage_weights[rank // self.spec.tensor_parallel]
        if self.in_files:
            return Term("weights", size, "bytes", "the tensors' headers, divided by tensor_parallel "
                        f"{self.spec.tensor_parallel}; norms, routers and the like whole", READ, "*.safetensors")
        return Term("weights", size, "bytes", "estimated from the shape in config.json: the files are not there", ASSUMED,
                    "config.json")

    @cached_property
    def context(self) -> int:
        """The longest request that the engine takes. Raises ConfigError when config.json's length makes no sense."""
        asked = self.spec.context_tokens or self.flag("context")
        return asked or own_context(self.config, engines.get(self.spec.engine), self.model)

    @property
    def ranks(self) -> int:
        return self.spec.tensor_parallel * self.spec.pipeline_parallel

    @cached_property
    def how(self) -> kv.Storage | None:
        """How KV is stored; None: a form whose size is not known here."""
        return kv.storage(self.spec, self.shape)

    @cached_property
    def token_bytes(self) -> float | None:
        """KV of a token on each rank, all stages together; None: not known."""
        return kv.token_bytes(self.shape, self.how, self.attention_ranks) if self.how else None

    @property
    def state_size(self) -> int:
        """Bytes of a recurrent element of linear attention, where the model leaves it to the engine."""
        asked = value(self.spec.argv, "--mamba-ssm-cache-dtype", "--mamba-ssm-dtype")
        usual = 4 if self.cpu or self.spec.engine == "sglang" else 2
        return {"float32": 4, "float16": 2, "bfloat16": 2}.get(asked or "", usual)

    @property
    def chunk(self) -> int:
        """The largest chunk that it takes."""
        if (asked := self.spec.line.maximum if self.spec.line else self.flag("chunk")) is not None:
            return asked
        if self.spec.engine == "sglang":
            return process.sglang_sizes(max(self.memory.total_bytes) if self.memory else 0, self.spec.tensor_parallel)[0]
        return _DEFAULT_CHUNK[self.spec.engine]

    @property
    def context_parallel(self) -> int:
        return process.whole(value(self.spec.argv, "--attn-cp-size", "--attention-context-parallel-size")) or 1

    @property
    def attention_ranks(self) -> int:
        """Ranks that share a layer's heads; under SGLang's context parallelism those of one part of the prompt."""
        return max(1, self.spec.tensor_parallel // self.context_parallel)

    def flag(self, name: str) -> int | None:
        """None: not there, or no positive number, with which engines say that they choose (auto, -1)."""
        found = number(self.spec.engine, self.spec.argv, name) if name in FLAGS[self.spec.engine] else None
        return found if found and found > 0 else None

    @cached_property
    def peak(self) -> peak.Peak:
        return peak.peak(self.config, self.spec, self.shape, self.context_parallel, self.measured, self.cpu)
