"""The memory plan: what each rank holds, what is left for a chunk, what binds; and the numbers of the published analysis."""
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preflight import make_config, make_spec
from tightrank.adapter import heads
from tightrank.errors import ConfigError
from tightrank.plan.answers import PROMPTS, predicted
from tightrank.plan.budget import memory_plan
from tightrank.plan.case import Case
from tightrank.plan.pace import PaceSample, fit, pairs
from tightrank.plan.peak import Peak
from tightrank.plan.safetensors import Tensor
from tightrank.plan.terms import ASSUMED, MEASURED, READ, Memory, MemoryPlan, weakest
from tightrank.plan.workspaces import sizes
from tightrank.records import LineSpec, WorkerSpec

GIB, GB = 2**30, 10**9
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False}
# DeepSeek-V4.1 as the published analysis has it: sources of ratio 1 and 2 that are scored densely, three ranks, one host each.
V41 = {**LLAMA_8B, "model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "num_key_value_heads": 1,
       "head_dim": 512, "compress_ratios": [1, 2, *[4, 128] * 15], "index_n_heads": 64, "index_head_dim": 128,
       "index_topk": 512, "sliding_window": 128, "max_position_embeddings": 1048576}
PUBLISHED = LineSpec(200_000_000, 256 * 512_000, 256, 2048, 256, "prefix", "pow2")
DENSE = Peak(0, 14, 0, None, True, 1, "", ASSUMED, "")


def own(gib: float, ranks: int = 1) -> Memory:
    """Devices with memory of their own."""
    return Memory((int(gib * GIB),) * ranks, (int(gib * GIB),) * ranks, 0, READ, "test")


def shared(gib: float, ranks: int = 1, sharing: int = 1) -> Memory:
    return Memory((int(gib * GIB),) * ranks, (int(gib * GIB),) * ranks, sharing, READ, "test")


def planned(model: dict[str, Any], memory: Memory | None, *args: str, line: LineSpec | None = None, context: int | None = None,
            case: dict[str, Any] | None = None, config: dict[str, str] | None = None, **spec: Any) -> MemoryPlan:
    found: WorkerSpec = replace(make_spec(args, **spec), line=line, context_tokens=context)
    return memory_plan(Case(make_config(**(config or {})), found, model, memory=memory, **(case or {})))


def value(plan: MemoryPlan, name: str) -> float:
    found = plan.number(name)
    assert found is not None, plan
    return found.value


# --- the published analysis -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bytes_measured", "tokens", "prefix"), [(2.97 * GB, 2048, 100_000), (2.6 * GB, 1024, 208_000)])
def test_what_a_dense_indexer_holds(bytes_measured: float, tokens: int, prefix: int) -> None:
    """Of these, 0.2 to 0.35 GB are touched KV pages, as it says."""
    assert DENSE.scores(tokens * prefix) == pytest.approx(bytes_measured, rel=0.05) or \
        DENSE.scores(tokens * prefix) + 0.35 * GB > bytes_measured
    assert DENSE.scores(tokens * prefix) == pytest.approx(bytes_measured, rel=0.15)


def test_token_pairs_that_its_memory_allows() -> None:
    """4.8 GB after boot, less a guard of 1.5 and a margin of 0.5: 2.8 GB, and at 14 bytes a pair 2.0e8; 6e8 on three ranks."""
    assert DENSE.pairs(4.8 * GB - 2 * GB, 2048) == pytest.approx(2.0e8, rel=0.05)
    assert replace(DENSE, ranks=3).pairs(2.8 * GB, 2048) == pytest.approx(6e8, rel=0.05)
    three = replace(DENSE, ranks=3)
    assert three.bytes(2048, 290_000) < 2.8 * GB < three.bytes(2048, 310_000), "chunks of 2048 reach about 300k"


def test_its_bands() -> None:
    plan = planned(V41, shared(200), engine="sglang", tensor_parallel=1, line=PUBLISHED, context=512_000)
    assert [band.chunk_tokens for band in plan.bands] == [2048, 1024, 512, 256]
    assert [band.by for band in plan.bands] == ["maximum", "line", "line", "line"]
    ends = [band.to_tokens for band in plan.bands]
    assert ends[:3] == [pytest.approx(tokens, rel=0.01) for tokens in (98_000, 195_000, 390_000)]


def test_half_a_million_tokens_in_about_seven_minutes() -> None:
    """From its rates by the band of the prefix, the middle of what is given for each: as they are, and as a model of time that
    is fitted to such chunks."""
    bands = ((0, 98_000, 2048, 2100), (98_000, 195_000, 1024, 1600), (195_000, 390_000, 512, 1200),
             (390_000, 780_000, 256, 800))
    by_rates = sum((min(end, 500_000) - start) / rate for start, end, _, rate in bands)
    samples = [PaceSample(tokens, pairs(tokens, prefix), prefix + tokens, tokens / rate)
               for start, end, tokens, rate in bands for prefix in range(start, end, (end - start) // 24)]
    plan = planned(V41, shared(200), engine="sglang", line=PUBLISHED, context=512_000, case={"pace": fit(samples)})
    found = {term.name: term.value for term in plan.first_token}
    assert by_rates / 60 == pytest.approx(7, rel=0.05)
    assert found["first token of 500,000"] / 60 == pytest.approx(7, rel=0.05)
    assert list(found) == [f"first token of {tokens:,}" for tokens in PROMPTS if tokens <= 512_000]


def test_the_server_makes_rank_0_the_tightest() -> None:
    plan = planned(V41, shared(119, 3), "--mem-fraction-static", "0.8", engine="sglang", tensor_parallel=3, line=PUBLISHED,
                   context=512_000)
    first, second, _ = plan.ranks
    assert plan.tightest_rank == 0 and first.bytes_of("server of rank 0") == 1.3e9
    assert second.spare.value - first.spare.value == pytest.approx(1.3e9)
    assert first.guard.value == 2 * GIB, "each rank is on a host of its own"


def test_workspaces_of_fp8_mla() -> None:
    """The third document: at 24 heads 193.6 MiB are reserved, padded to 32 heads 68.6 (1 request, 512 queries)."""
    for wide, mib in ((24, 193.6), (32, 68.6)):
        tiles = heads.tiles_by_heads(wide, 256, 1, 512)
        assert heads.workspace_bytes(24, tiles, 512, 128, wide=wide) / 2**20 == pytest.approx(mib, rel=0.05)
    assert set(sizes(heads.KIMI_K3_TP8, 2048, 500_000, 64, 16)) == {"FP8 MLA workspace", "bf16 MLA prefill"}


# --- what ranks hold --------------------------------------------------------------------------------------------------


def test_a_dense_model_on_a_device() -> None:
    plan = planned(LLAMA_8B, own(80), "--max-num-seqs", "256")
    rank, = plan.ranks
    assert rank.bytes_of("weights") == pytest.approx(8.03e9 * 2, rel=0.001)
    assert rank.bytes_of("graphs") == 512 * 2**20 and not rank.guard.value and not rank.bytes_of("process")
    held = sum(term.value for term in rank.rest if term.name not in ("KV pool",)) + rank.peak.value
    assert rank.bytes_of("KV pool") == pytest.approx(0.92 * 80 * GIB - held, rel=0.001), "vLLM's default part, less the rest"
    assert value(plan, "KV tokens") == pytest.approx(rank.bytes_of("KV pool") / 131072, rel=0.01)
    assert "longest request" in plan.binds and rank.spare.value == pytest.approx(0.08 * 80 * GIB, rel=0.001)


def test_what_comes_off_the_hosts_memory() -> None:
    """Two ranks on one host: each has half, and half of the guard's floor and margin."""
    plan = planned(LLAMA_8B, shared(64, 2, sharing=2), tensor_parallel=2, case={"cpu": True},
                   env={"VLLM_CPU_KVCACHE_SPACE": "4"})
    first, second = plan.ranks
    assert first.memory.value == 32 * GIB and first.guard.value == GIB and first.bytes_of("KV pool") == 4 * GIB
    assert not first.bytes_of("graphs") and not first.bytes_of("communicator") and first.bytes_of("process")
    assert value(plan, "KV tokens") == 4 * GIB // (128 * 65536) * 128
    assert second.bytes_of("server of rank 0") == 0


@pytest.mark.parametrize(("engine", "args", "pool_gib"), [
    ("vllm", ("--kv-cache-memory-bytes", "8G"), 8), ("vllm", ("--gpu-memory-utilization", "0.5"), 40 - 14.96 - 0.5 - 1 - 0.19),
    ("sglang", ("--mem-fraction-static", "0.5"), 40 - 14.96 - 0.5), ("sglang", (), 80 - 0.5 - 12 - 0.125 - 0.5 - 14.96 - 0.5),
    ("sglang", ("--max-total-tokens", "8192"), 1), ("atom", ("--enforce-eager",), 72 - 14.96 - 0.5 - 1.6 - 1.5)])
def test_kv_pools(engine: str, args: tuple[str, ...], pool_gib: float) -> None:
    plan = planned(LLAMA_8B, own(80), *args, engine=engine)
    assert plan.ranks[0].bytes_of("KV pool") / GIB == pytest.approx(pool_gib, rel=0.01)


def test_the_headroom_comes_off_what_is_free() -> None:
    hooks = {"headroom": {"bytes": [60 * GIB], "ranks": 1}}
    plan = planned(LLAMA_8B, own(80), hooks=hooks)
    assert plan.ranks[0].bytes_of("KV pool") / GIB == pytest.approx(20 - 14.96 - 0.5, rel=0.01)
    unequal = planned(LLAMA_8B, own(80, 2), hooks={"headroom": {"bytes": [GIB, 70 * GIB], "ranks": 2}}, tensor_parallel=2)
    assert value(unequal, "KV tokens") == pytest.approx((10 - 7.48 - 1) * GIB / 65536, rel=0.02), "the tightest sizes all"


# --- what binds -------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit() -> None:
    plan = planned(LLAMA_8B, own(12))
    assert plan.binds.startswith("memory: rank 0 holds more at rest than there is; over by") and "weights" in plan.binds
    assert value(plan, "KV tokens") == 0


def test_a_pool_smaller_than_one_request() -> None:
    plan = planned(LLAMA_8B, own(80), "--kv-cache-memory-bytes", "4G")
    assert plan.binds == "the KV pool: 32,768 tokens, less than one request of 131,072"
    assert value(plan, "longest prompt") == 32_768


def test_memory_that_binds_before_the_line() -> None:
    """1.4 GB are left of what the rank has: 1.0e8 pairs, half of what the line allows."""
    line = LineSpec(200_000_000, 256 * 512_000, 256, 2048, 256)
    args = ("--max-total-tokens", "600000", "--mem-fraction-static", "0.9", "--disable-cuda-graph")
    roomy = planned(V41, shared(60), *args, engine="sglang", line=line, context=512_000)
    assert value(roomy, "pairs that memory allows") > 2e8 and {band.by for band in roomy.bands} == {"maximum", "line"}
    held = roomy.ranks[0].rest_bytes + roomy.ranks[0].guard.value
    plan = planned(V41, shared((held + 1.4 * GB) / GIB), *args, engine="sglang", line=line, context=512_000)
    most = value(plan, "pairs that memory allows")
    assert most == pytest.approx(1.0e8, rel=0.01)
    assert plan.binds == f"memory: it allows {most:,.0f} token² a chunk, less than the line allows"
    assert {band.by for band in plan.bands} == {"maximum", "memory", "minimum"} and plan.bands[-1].chunk_tokens == 256
    assert value(plan, "longest prompt") == pytest.approx(1.0e8 / 256, rel=0.01)


def test_context_parallel_ranks_share_the_rows() -> None:
    line = LineSpec(600_000_000, 256 * 512_000, 256, 2048, 256)
    args = ("--max-total-tokens", "600000")
    one = planned(V41, shared(40, 3), *args, engine="sglang", tensor_parallel=3, line=line, context=512_000)
    three = planned(V41, shared(40, 3), *args, "--attn-cp-size", "3", engine="sglang", tensor_parallel=3, line=line,
                    context=512_000)
    assert value(three, "pairs that memory allows") == pytest.approx(3 * value(one, "pairs that memory allows"), rel=0.001)


@pytest.mark.parametrize(("config", "model", "engine", "free", "bounded", "bound"), [
    ({}, LLAMA_8B, "vllm", 0, 0, None), ({}, V41, "sglang", 14, 0, None), ({}, V41, "vllm", 0, 4, 512 << 20),
    ({"hooks": ("ranks", "line", "indexer")}, V41, "sglang", 10, 4, 256 << 20),
    ({"hooks": ("ranks", "line", "indexer")}, V41, "vllm", 0, 4, 256 << 20),
    ({}, {**V41, "model_type": "deepseek_v32"}, "sglang", 0, 4, 512 << 20),
    ({"headroom.pair_bytes": "8"}, LLAMA_8B, "vllm", 8, 0, None)])
def test_what_a_chunk_takes(config: dict[str, Any], model: dict[str, Any], engine: str, free: float, bounded: float,
                            bound: int | None) -> None:
    found = Case(make_config(**config), make_spec(engine=engine), model).peak
    assert (found.free, found.bounded, found.bound_bytes) == (free, bounded, bound)


def test_measured_terms_go_first() -> None:
    case = Case(make_config(), make_spec(), V41, measured={"pair_bytes": 1.0, "row_bytes": 22e3})
    assert (case.peak.free, case.peak.row_bytes, case.peak.origin) == (1.0, 22e3, MEASURED)
    assert case.peak.bytes(2048, 100_000) == 22e3 * 2048 + 2048 * 102_048


BYTES = st.just(0.0) | st.floats(0.01, 20)


@given(st.floats(0, 1e6), BYTES, BYTES, st.none() | st.integers(1, 2**31), st.booleans(), st.integers(1, 4), st.floats(0, 1e11),
       st.integers(1, 4096))
@settings(deadline=None)
def test_as_many_pairs_as_fit_and_no_more(rows: float, free: float, bounded: float, bound: int | None, together: bool,
                                          ranks: int, memory: float, tokens: int) -> None:
    peak = Peak(rows, free, bounded, bound, together, ranks, "", READ, "")
    pairs = peak.pairs(memory, tokens)
    of_rows = rows * tokens / ranks
    if pairs is None:
        assert not free and (not bounded or bound is not None), "only what grows with nothing is without end"
        return
    held = max(of_rows, peak.scores(pairs)) if together else of_rows + peak.scores(pairs)
    assert pairs == 0 or held <= memory * (1 + 1e-9) + 1
    more = pairs + ranks * max(1.0, 4 / max(free + bounded, 1e-9) + pairs * 1e-9)
    if pairs > 0 and free:
        assert (max(of_rows, peak.scores(more)) if together else of_rows + peak.scores(more)) > memory * (1 - 1e-9) - 1


def test_bands_cover_every_prefix_once() -> None:
    plan = planned(V41, shared(60), "--max-total-tokens", "100000", engine="sglang", line=PUBLISHED, context=512_000)
    assert plan.bands[0].from_tokens == 0 and plan.bands[-1].to_tokens == 511_999
    assert all(before.to_tokens + 1 == after.from_tokens for before, after in pairwise(plan.bands))


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_every_number_says_where_it_is_from() -> None:
    plan = planned(V41, shared(60), engine="sglang", line=PUBLISHED, context=512_000)
    terms = [*plan.numbers, *(term for rank in plan.ranks
                              for term in (rank.memory, rank.guard, rank.peak, rank.spare, *rank.rest))]
    assert all(term.formula and term.unit and term.origin in (READ, MEASURED, ASSUMED) for term in terms)
    assert weakest(READ, ASSUMED, MEASURED) == ASSUMED and weakest(READ, MEASURED) == MEASURED


def test_what_cannot_be_told_is_said() -> None:
    plan = planned({"model_type": "llama"}, None)
    said = " ".join(plan.unknown)
    assert plan.ranks == () and plan.tightest_rank is None
    assert "--memory" in said and "weights" in said and "heads and layers" in said and "first token" in said
    assert "turboquant_4bit_nc" in " ".join(planned(LLAMA_8B, own(80), "--kv-cache-dtype", "turboquant_4bit_nc").unknown)
    assert value(plan, "largest chunk") == 2048


def test_what_a_start_is_held_against() -> None:
    """Only what is certain: not weights that were estimated, nor a pool of what an engine is assumed to leave."""
    tensors = (Tensor("model.layers.0.self_attn.q_proj.weight", "BF16", (4096, 4096), 2**25),)
    assert predicted(planned(LLAMA_8B, own(80))) == {} == predicted(planned({}, own(80)))
    assert predicted(planned(LLAMA_8B, own(80), case={"tensors": tensors})) == {"weights_bytes": 2**25}
    sized = planned(LLAMA_8B, own(80), "--kv-cache-memory-bytes", "4G")
    assert predicted(sized) == {"kv_tokens": 32_768}
    assert predicted(planned(LLAMA_8B, own(80), "--max-total-tokens", "5000", engine="sglang")) == {"kv_tokens": 5000}


WORDS = ["--kv-cache-dtype", "fp8", "--max-total-tokens", "0", "7", "--max-model-len", "-1", "--enforce-eager", "--block-size",
         "--attn-cp-size", "3", "--mem-fraction-static", "0.0", "1", "--gpu-memory-utilization", "0", "--max-num-seqs", "x",
         "--kv-cache-memory-bytes", "1G", "--dtype", "float32", "--quantization", "--load-format", "dummy", "--page-size",
         "--max-mamba-cache-size", "--cuda-graph-max-bs", "--max-running-requests"]
HYBRID = {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 8,
          "moe_intermediate_size": 64, "num_experts_per_tok": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
JSON = st.none() | st.booleans() | st.integers(-3, 10**6) | st.integers() | st.floats() | st.text(max_size=3) | \
    st.lists(st.integers(-2, 200) | st.text(max_size=3), max_size=40)


@settings(deadline=None)
@given(st.sampled_from([{}, LLAMA_8B, V41, {**LLAMA_8B, **HYBRID}]),
       st.dictionaries(st.sampled_from(sorted({*LLAMA_8B, *V41, *HYBRID})), JSON, max_size=3),
       st.lists(st.sampled_from(WORDS), max_size=6), st.sampled_from(["vllm", "sglang", "atom"]), st.integers(1, 5),
       st.integers(1, 3), st.sampled_from([0, 1, 3]), st.integers(0, 2**38), st.none() | st.just(PUBLISHED))
def test_neither_a_config_json_nor_a_command_line_makes_it_raise(
        base: dict[str, Any], change: dict[str, Any], args: list[str], engine: str, tensor: int, pipeline: int, sharing: int,
        size: int, line: LineSpec | None) -> None:
    """But for a length that makes no sense, and numbers that are none: plan.build refuses these before."""
    ranks = tensor * pipeline
    memory = Memory((size,) * ranks, (size,) * ranks, sharing, READ, "test")
    spec = replace(make_spec(args, engine=engine, tensor_parallel=tensor, pipeline_parallel=pipeline), line=line,
                   context_tokens=512_000 if line else None)
    try:
        plan = memory_plan(Case(make_config(), spec, {**base, **change}, memory=memory, cpu=sharing == 3))
    except ConfigError:
        return
    except ValueError as error:
        if "invalid literal" not in str(error):
            raise
        return
    assert len(plan.ranks) == ranks and plan.binds and plan.bands
    assert all(term.value >= 0 for rank in plan.ranks for term in rank.rest)


def test_a_request_of_a_hybrid_has_its_states() -> None:
    """Qwen3-Next's kind: 8 of 32 layers keep tokens, 24 a state."""
    state = (2 * 2 * 64 + 4 * 64) * 3 * 2 + 4 * 64 * 64 * 4
    plan = planned({**LLAMA_8B, **HYBRID, "kv_lora_rank": None}, own(80), engine="sglang")
    assert value(plan, "KV of a token") == 8 * 8 * 2 * 128 * 2
    assert value(plan, "KV of the longest request") == value(plan, "KV of a token") * 131_072 + 24 * state
