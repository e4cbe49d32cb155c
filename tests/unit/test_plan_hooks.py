"""What the plan tells each hook, and what it refuses."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import Proves
from tightrank.adapter import heads
from tightrank.config import load
from tightrank.config.keys import ENGINES, HOOKS
from tightrank.errors import ConfigError
from tightrank.host import HostFacts
from tightrank.inputs import Inputs
from tightrank.plan import build
from tightrank.plan.workspaces import COMPUTE_UNITS
from tightrank.records import WorkerSpec

MIB, GIB = 2**20, 2**30
LLAMA = {"model_type": "llama", "max_position_embeddings": 32768}
KIMI = {"model_type": "kimi_k3", "max_position_embeddings": 262144, "num_attention_heads": 96, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
Plan = Callable[..., WorkerSpec]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    def make(text: str, engine: str = "vllm", worker: str = "", model: Mapping[str, Any] = LLAMA,
             environment: Mapping[str, str] | None = None) -> WorkerSpec:
        path = tmp_path / "tightrank.yaml"
        path.write_text(f"model: m\nengine: {engine}\nworkers:\n  - {{name: a, port: 9001{worker}}}\n{text}\n")
        config = load(path, {}).config
        [spec] = build(config, HostFacts(None, None), Inputs(dict(environment or {}), model))
        return spec
    return make


def test_no_values_but_those_of_the_hooks_asked_for(plan: Plan) -> None:
    spec = plan("hooks: [ranks]")
    assert spec.hooks == {"ranks": {}} and spec.line is None


def test_the_line_is_told_as_before(plan: Plan) -> None:
    spec = plan("line: {budget: 2e6, minimum: 64, maximum: 1024}")
    assert spec.line is not None
    assert spec.hooks["line"] == {"budget": 2_000_000, **spec.line.keywords()}


@pytest.mark.parametrize(("engine", "variable"), [("vllm", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"),
                                                  ("sglang", "SGLANG_DSV4_FP4_LOGITS_BUDGET_MB"),
                                                  ("atom", "ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB")])
def test_the_indexers_budget_reaches_hook_and_environment(plan: Plan, engine: str, variable: str) -> None:
    spec = plan("hooks: [ranks, indexer]\nindexer: {budget: 64MiB}", engine)
    assert spec.hooks["indexer"] == {"budget_bytes": 64 * MIB, "ranks": 1} and spec.env[variable] == "64"
    with pytest.raises(ConfigError, match=f"yaml:4: {variable}: 512 is not indexer.budget, which makes it 256; leave it out"):
        plan("hooks: [ranks, indexer]", engine, worker=f", env: {{{variable}: 512}}")


def test_the_plan_knows_what_the_published_budget_does(plan: Plan) -> None:
    """c from 14 to about 11 bytes, and B from 2.0e8 to 2.6e8 in the 2.87 GB that were measured."""
    spec = plan("hooks: [ranks, line, indexer]\nline: {budget: 2.05e8}")
    [note] = [note for note in spec.notes if note.startswith("indexer")]
    assert "holds 14 bytes" in note and "then holds 11.3" in note and "205,000,000 is enough for 260,156,454" in note


def test_headroom_by_default_is_the_published_fraction(plan: Plan) -> None:
    spec = plan("hooks: [ranks, headroom]", worker=", tensor_parallel: 4")
    assert spec.hooks["headroom"] == {"fraction": 0.08, "ranks": 4}


@pytest.mark.parametrize(("reserve", "values"), [("4GiB", {"bytes": [4 * GIB]}), ("6GiB+4GiB", {"bytes": [6 * GIB, 4 * GIB]}),
                                                 (".05", {"fraction": 0.05}), ("0", {"fraction": 0.0})])
def test_headroom_as_it_is_written(plan: Plan, reserve: str, values: dict[str, Any]) -> None:
    spec = plan(f"hooks: [ranks, headroom]\nheadroom: {{reserve: {reserve}}}", worker=", tensor_parallel: 2")
    assert spec.hooks["headroom"] == {**values, "ranks": 2}


@pytest.mark.parametrize(("text", "worker", "message"), [
    ("hooks: [ranks, headroom]\nheadroom: {reserve: 1.5}", "", "headroom.reserve: 1.5 must be a fraction under 1"),
    ("hooks: [ranks, headroom]\nheadroom: {reserve: -1GiB}", "", "headroom.reserve: -1GiB must be"),
    ("hooks: [ranks, headroom]\nheadroom: {reserve: 1GiB+2GiB+3GiB}", ", tensor_parallel: 2",
     "headroom.reserve: 3 sizes, and workers[0] has 2 ranks; give one for all workers' ranks, or 2 joined by +"),
    ("hooks: [ranks, headroom]\nheadroom: {reserve: 1GiB+2GiB}", "", "has 1 rank; give one for all workers' ranks"),
    ("hooks: [ranks, headroom]\nheadroom: {reserve: 2000TiB}", "", "headroom.reserve: 2000TiB must be between 0B and 1024TiB"),
    ("hooks: [ranks, line, headroom]\nobserve: [line]\nheadroom: {reserve: derived}", "", "take line out of observe, or give"),
    ("hooks: [headroom]", "", "hooks: headroom: the others report by way of ranks; add it"),
    ("hooks: [ranks, headroom]\nobserve: [headroom, headroom]", "", "observe: headroom, headroom: name each hook once"),
    ("hooks: [ranks, headroom]", ", args: [--num-gpu-blocks-override, 100]", "--num-gpu-blocks-override sizes the KV cache"),
    ("hooks: [ranks, headroom]", ", args: [--distributed-executor, ray]", "--distributed-executor is short for"),
    ("hooks: [ranks, headroom]\nheadroom: {reserve: derived}", "", "headroom.reserve: derived: needs the hook line"),
    ("hooks: [ranks, indexer]\nindexer: {budget: 1.5MiB}", "", "must be whole MiB, as engines take it; give 1MiB or 2MiB"),
    ("hooks: [ranks, indexer]\nindexer: {budget: 1KiB}", "", "indexer.budget: 1KiB must be between 1MiB"),
    ("hooks: [ranks]\nobserve: [headroom]", "", "observe: headroom: not in hooks (ranks); add it there"),
    ("observe: [ranks]", "", "observe: [ranks] has 'ranks', which must be one of line, indexer"),
    ("hooks: [ranks, empty-cache]\nempty_cache: {when: often}", "", "empty_cache.when: often must be one of never, pressure"),
    ("hooks: [ranks, headroom]", ", args: [--distributed-executor-backend, uni]", "needs mp, one process per rank"),
    ("hooks: [ranks, heads]", "", "has no num_attention_heads, qk_nope_head_dim"),
])
def test_what_does_not_go_together_is_said_in_one_line(plan: Plan, text: str, worker: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(text, worker=worker)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_derived_headroom_is_a_prefill_under_the_line_and_what_comes_after_sizing(plan: Plan) -> None:
    text = "hooks: [ranks, line, headroom]\nheadroom: {reserve: derived}\nline: {budget: 2e8}"
    assert plan(text).hooks["headroom"] == {"bytes": [14 * 200_000_000], "terms": {"prefill": 14 * 200_000_000},
                                            "guard_bytes": 2 * GIB, "ranks": 1}
    with_indexer = plan(text.replace("line, ", "line, indexer, ")).hooks["headroom"]
    assert with_indexer["bytes"] == [10 * 200_000_000 + 256 * MIB]
    spec = plan(text.replace("headroom]", "headroom, heads]"), model=KIMI,
                worker=", tensor_parallel: 8, args: [--kv-cache-dtype, fp8, --max-num-seqs, 64, --max-num-batched-tokens, "
                       "8192]")
    terms = spec.hooks["headroom"]["terms"]
    tiles = heads.tiles_by_heads(16, COMPUTE_UNITS, 64, 8192)
    assert terms["FP8 MLA workspace"] >= heads.workspace_bytes(12, tiles, 8192, 128) > 1900 * MIB
    assert terms["bf16 MLA prefill"] > 800 * MIB and spec.hooks["headroom"]["bytes"] == [sum(terms.values())]
    assert any("FP8 MLA workspace" in note for note in spec.notes)


@pytest.mark.parametrize("flag", ["--max-num-seqs, -1", "--max-num-seqs, 0", "--block-size, auto"])
def test_a_workspace_is_not_planned_from_a_number_that_is_none(plan: Plan, flag: str) -> None:
    with pytest.raises(ConfigError, match="must be at least 1 where the hook heads plans its workspace"):
        plan("hooks: [ranks, line, heads]", model=KIMI, worker=f", args: [--kv-cache-dtype, fp8, {flag}]")
    assert plan("hooks: [ranks, heads]", model=KIMI, worker=f", args: [--kv-cache-dtype, fp8, {flag}]").hooks["heads"] == {}


@pytest.mark.parametrize(("observe", "bytes_"), [("", 10 * 200_000_000 + 256 * MIB), ("observe: [indexer]", 14 * 200_000_000)])
def test_an_observed_indexer_saves_nothing(plan: Plan, observe: str, bytes_: int) -> None:
    spec = plan(f"hooks: [ranks, line, indexer, headroom]\nheadroom: {{reserve: derived}}\n{observe}")
    assert spec.hooks["headroom"]["bytes"] == [bytes_]


def test_a_decode_worker_prefills_nothing(plan: Plan) -> None:
    text = "hooks: [ranks, line, headroom]\nheadroom: {reserve: derived}"
    assert plan(text, "sglang", worker=", role: decode, address: 127.0.0.1").hooks["headroom"]["bytes"] == [0]


def test_keys_of_a_hook_that_is_not_wanted_are_told(plan: Plan) -> None:
    notes = plan("headroom: {reserve: 4GiB}\nempty_cache: {when: never}").notes
    assert "headroom.reserve is set and has no effect: hooks does not name headroom" in notes
    assert "empty_cache.when is set and has no effect: hooks does not name empty-cache" in notes


def test_heads_needs_an_fp8_kv_cache(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"heads is for an FP8 KV cache; add --kv-cache-dtype fp8") as caught:
        plan("hooks: [ranks, heads]", model=KIMI)
    assert caught.value.cause == "hook-unavailable"


def test_the_cache_is_emptied_under_the_guards_memory_and_a_prefill_by_default(plan: Plan) -> None:
    spec = plan("hooks: [ranks, line, empty-cache]\nline: {budget: 2e8}\nguard: {floor: 1GiB, margin: 512MiB}")
    assert spec.hooks["empty-cache"] == {"when": "pressure", "mark_bytes": GIB + 512 * MIB + 14 * 200_000_000}
    spec = plan("hooks: [ranks, empty-cache]\nempty_cache: {when: every-chunk, mark: 3GiB}")
    assert spec.hooks["empty-cache"] == {"when": "every-chunk", "mark_bytes": 3 * GIB}


def test_atoms_own_variable_is_honoured(plan: Plan) -> None:
    variable = {"ATOM_KV_PREFILL_HEADROOM_FRAC": "0.12"}
    assert plan("hooks: [ranks, headroom]", "atom", environment=variable).hooks["headroom"] == {"fraction": 0.12, "ranks": 1}
    assert plan("hooks: [ranks, headroom]", environment=variable).hooks["headroom"]["fraction"] == 0.08
    with pytest.raises(ConfigError, match=r"headroom.reserve: ATOM_KV_PREFILL_HEADROOM_FRAC=0.12 says it too"):
        plan("hooks: [ranks, headroom]\nheadroom: {reserve: 0.1}", "atom", environment=variable)
    with pytest.raises(ConfigError, match=r"env: ATOM_KV_PREFILL_HEADROOM_FRAC: 'eight' must be a fraction under 1"):
        plan("hooks: [ranks, headroom]", "atom", environment={"ATOM_KV_PREFILL_HEADROOM_FRAC": "eight"})


def test_an_observed_hook_leaves_the_engines_command_and_environment_alone(plan: Plan) -> None:
    every = "hooks: [ranks, line, indexer, headroom, empty-cache]"
    alone = plan("hooks: [ranks, headroom]\nobserve: [headroom]")
    spec = plan(f"{every}\nobserve: [line, indexer, headroom, empty-cache]")
    assert spec.argv == alone.argv and spec.env == alone.env and spec.context_tokens is None
    assert all(values["observe"] is True for hook, values in spec.hooks.items() if hook != "ranks")
    assert spec.hooks["line"]["budget"] == 200_000_000, "what it would keep is known"
    assert sum("is only observed" in note for note in spec.notes) == 4 and spec.line is None and spec.schedule == ()


def test_hooks_of_the_workers_get_one_process_per_rank(plan: Plan) -> None:
    executor = ("--distributed-executor-backend", "mp")
    assert plan("hooks: [ranks, headroom]").argv[-2:] == executor
    assert "--distributed-executor-backend" not in plan("hooks: [ranks, line]").argv
    given = plan("hooks: [ranks, headroom]", worker=", args: [--distributed-executor-backend, mp]")
    assert given.argv.count("--distributed-executor-backend") == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_hook_that_an_engine_has_no_use_for_is_refused(plan: Plan, engine: str, proves: Proves) -> None:
    from tightrank import engines
    for hook in sorted(set(HOOKS) - set(engines.get(engine).releases)):
        with pytest.raises(ConfigError) as caught:
            plan(f"hooks: [ranks, {hook}]", engine)
        assert caught.value.cause == "hook-unavailable" and hook in str(caught.value)
        # MLA's FP8 kernels on ROCm are called by vLLM with padded heads; the other two have kernels of their own
        proves(engine, "*", hook, by="not needed" if hook == "heads" else "refused (no hook point in its releases)")
