"""KV tokens as the plan counts them against vLLM's own code: layers that keep all, a window or a state in any mixture, and
DeepSeek-V4's."""
from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from raw_engine import interpreter
from tightrank.plan import pool
from tightrank.plan.kv import Storage
from tightrank.plan.layers import FULL, STATE, WINDOW, Layers, State
from tightrank.plan.pool import Question
from tightrank.plan.shape import shape

PROGRAM = Path(__file__).with_name("vllm_pool_program.py")
CASES = 200


def kinds(source: random.Random) -> list[str]:
    """A period of layers repeated, or a mixture without one."""
    period = source.choice([[FULL], [WINDOW], [WINDOW] * source.randint(1, 5) + [FULL],
                            [STATE] * source.randint(1, 7) + [FULL]])
    mixed = [FULL] * source.randint(1, 13) + [source.choice([WINDOW, STATE])] * source.randint(1, 13)
    return source.choice([period * source.randint(1, 8), mixed])


def cases() -> list[dict[str, Any]]:
    source = random.Random(7)
    return [{"kinds": kinds(source), "kv_heads": source.choice([1, 2, 8]), "head_dim": source.choice([64, 128]),
             "block": source.choice([16, 32, 128]), "state": source.randint(1000, 400_000),
             "context": source.randint(200, 200_000), "in_flight": source.choice([512, 2048, 16384]),
             "window": source.choice([128, 1024, 4096]), "prefix_caching": source.random() < 0.5,
             "pool": source.randint(2**28, 2**34)} for _ in range(CASES)]


def compressed() -> list[dict[str, Any]]:
    """Of DeepSeek-V4's kind: the ratios of its layers, in its own order and in others."""
    source = random.Random(8)
    ratios = [[0, 4], [128, *[4, 128] * 30], [0, 0, *[4, 128] * 20, 4],
              *([source.choice([0, 4, 128]) for _ in range(source.randint(1, 40))] for _ in range(40))]
    return [{"ratios": each, "context": source.randint(300, 10**6), "in_flight": source.choice([512, 2048, 16384]),
             "pool": source.randint(2**30, 2**36), "prefix_caching": True} for each in ratios]


def question(case: dict[str, Any]) -> Question:
    if "ratios" in case:
        found = shape({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 512, "sliding_window": 128,
                       "num_hidden_layers": len(case["ratios"]), "compress_ratios": case["ratios"], "index_n_heads": 1,
                       "index_head_dim": 128, "index_topk": 512})
        return Question(found, Storage("fp8", 1), "vllm", 1, 1, 256, case["context"], case["in_flight"], 2, 4)
    found = shape({"num_attention_heads": 32, "num_key_value_heads": case["kv_heads"], "head_dim": case["head_dim"]})
    layers = Layers(tuple(case["kinds"]), case["window"])
    found = replace(found, layers=layers, state=State(case["state"], 0))
    return Question(found, Storage("auto", 2), "vllm", 1, 1, case["block"], case["context"], case["in_flight"], 1, 1,
                    prefix_caching=case["prefix_caching"])


def test_blocks_and_tokens_are_vllms_own() -> None:
    asked = [*cases(), *compressed()]
    for case in asked:                  # vLLM's platform sets it before, from what it knows of the layers
        if "block" in case:
            case["block"] = pool.block_tokens(question(case))
    done = subprocess.run([interpreter("vllm"), PROGRAM], input=json.dumps(asked), capture_output=True, text=True, timeout=250,
                          check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for case, (blocks, tokens) in zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True):
        found = pool.tokens(question(case), case["pool"])
        assert found is not None and found.tokens == tokens, (case, found, tokens)
        assert found.formula.startswith(f"{blocks:,} blocks of "), (case, found, blocks)
