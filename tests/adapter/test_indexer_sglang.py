"""The hook `indexer` on SGLang's released functions, on the CPU: V4.1's torch score path, the formula of free memory."""
from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT, ROOT, Proves
from raw_engine import CACHE, interpreter, wire

pytestmark = pytest.mark.engine

MIB = 2**20
WANTED = 16 * MIB
UTILS = "sglang.srt.layers.attention.mqa_logits_utils"
SGLANG = ("sglang", "sglang-0.5.22")  # the environment's release, and one whose sources lie beside it


def run_release(release: str, program: str, run: Path) -> Any:
    """What `program` printed last, as JSON, with the adapter and the sources of `release`."""
    path = [str(INJECT), str(ROOT / "scripts" / "cpu" / "stubs")]
    if release != "sglang":
        path.append(str(CACHE / "releases" / release))
    done = subprocess.run([interpreter("sglang"), "-c", program], capture_output=True, text=True, timeout=240, check=False,
                          cwd=run, env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TIGHTRANK_ADAPTER": str(run),
                                        "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=SGLANG)
def score_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], wire.Hello]:
    """What SCORE_PATH printed in one release of SGLang, and its hello."""
    run = tmp_path_factory.mktemp("sglang") / "run"
    run.mkdir(mode=0o700)
    wire.write_settings(str(run), wire.Settings("w", 1, "sglang", {"indexer": {"budget_bytes": WANTED}}))
    result = run_release(request.param, SCORE_PATH, run)
    assert request.param == "sglang" or result["release"] == request.param.partition("-")[2]
    [path] = run.glob("hello-*.json")
    return result, wire.read_json(str(path), wire.Hello)


# The scheduler's real imports under the hook, then V4.1's prefill top-k on the torch path: 512 rows over 4096 keys, 32
# heads, which is 128 MiB of bf16 scores and three times that in transients.
SCORE_PATH = r"""
import json, sys
import triton.language
class Constant:
    def __init__(self, value): self.value = value
triton.language.constexpr = Constant  # the one stand-in whose value is read at an import
import torch
import sglang
import sglang.srt.managers.scheduler
from types import SimpleNamespace as Bag
from sglang.srt.layers.attention import mqa_logits_utils as utils
from sglang.srt.layers.attention.dsa import dsa_indexer, dsa_indexer_kpool
from sglang.srt.layers.attention.dsv4 import metadata, low_ratio_backend_hip
from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer
from sglang.srt.layers.attention.dsv4.v41_indexer import full_topk, scoring, types
from sglang.srt.layers.attention.qsa import qsa_indexer
from sglang.kernels.ops.attention.dsv4 import fp4_indexer_hip as hip
from tightrank_adapter import memory, peak, rank
from tightrank_adapter.sglang import indexer

ROWS, KEYS, HEADS, DIM, TOPK = 512, 4096, 32, 128, 64
torch.manual_seed(7)
layer = DeepseekV41Indexer(Bag(
    index_n_heads=HEADS, index_head_dim=DIM, qk_rope_head_dim=64, index_topk=TOPK, kv_source_layer_ids=[], q_lora_rank=64,
    candidate_source_layer_id=-1, candidate_topk_blocks=0, candidate_block_size=8, hidden_size=64, rms_norm_eps=1e-6),
    0, DIM, None, "")
for parameter in layer.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
keys, angles = torch.randn(KEYS, DIM, dtype=torch.bfloat16), torch.rand(KEYS, 32)
inputs = dict(
    indexer=layer, layer_id=0, compress_ratio=1, freqs_cis=torch.polar(torch.ones_like(angles), angles),
    x=torch.randn(ROWS, 64, dtype=torch.bfloat16), q_lora=torch.randn(ROWS, 64, dtype=torch.bfloat16),
    positions=torch.arange(KEYS - ROWS, KEYS), req_rows=torch.zeros(ROWS, dtype=torch.int64),
    req_pool_indices=torch.zeros(1, dtype=torch.int64), k_slots=torch.arange(KEYS), index_plans=None,
    kv_page_table=torch.zeros(1, 1, dtype=torch.int32), seq_lens_cpu=[KEYS], rows_per_request=[ROWS],
    rows_per_request_device=torch.tensor([ROWS]))
topk = full_topk.FullTopKIndexer(
    token_to_kv_pool=Bag(get_low_ratio_index_k_dequant=lambda layer, slots: keys[slots]),
    req_to_token=torch.arange(KEYS)[None], use_deep_gemm_prefill=False, use_deep_gemm_decode=False)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def score():
    out = dict(out_raw_indices=torch.empty(ROWS, TOPK, dtype=torch.int32),
               out_page_indices=torch.empty(ROWS, TOPK, dtype=torch.int32))
    peak.reset()
    before = resident()
    with torch.no_grad():
        topk.topk_prefill(types.PrefillInputs(**{
            name: {**inputs, **out}[name] for name in types.PrefillInputs.__struct_fields__}))
    return out, peak.read() - before

def ask(budget):
    held = rank.settings()
    rank._settings = held._replace(hooks={"indexer": {"budget_bytes": budget}})
    modules = {each.module.__name__: each.module for each in indexer._globals}
    indexer._globals.clear()
    for module in modules.values():
        indexer._set_globals(module)
    return score()

rank.hello("scheduler", 0)
indexer._finish(Bag(tp_worker=Bag(model_runner=Bag(gpu_id=0, model=torch.nn.ModuleDict({"attention": layer})))))
at_start = scoring._TORCH_SCORE_BUDGET_BYTES
score()
small, small_peak = score()
large, large_peak = ask(1 << 30)
again, again_peak = ask(16 << 20)

# The real formula, on a device that these numbers describe.
total, free, available = 128 << 30, 2 << 30, 10 << 30
utils.get_device_module = lambda: Bag(get_device_properties=lambda index: Bag(total_memory=total))
utils.get_schedule = lambda: Bag(mem_fraction_static=0.8)
torch.cuda.mem_get_info = lambda index: (free, total)
derived = {}
for name, budget, shared in (("asked", 16 << 20, True), ("own", 8 << 30, False), ("available", 8 << 30, True)):
    rank._settings = rank.settings()._replace(hooks={"indexer": {"budget_bytes": budget}})
    memory.rank_memory = lambda ranks: memory.Memory(available, total, shared)
    derived[name] = [module.mqa_logits_budget_bytes(device_index=0, allow_sync=True)
                     for module in (utils, dsa_indexer, dsa_indexer_kpool, metadata)]
derived["unhooked"] = utils.mqa_logits_budget_bytes.__wrapped__(device_index=0, allow_sync=True)
derived["captured"] = metadata.mqa_logits_budget_bytes(device_index=0, allow_sync=False)
memory.device = lambda: torch.cuda
dsa_indexer.get_is_capture_mode = lambda: False
rank._settings = rank.settings()._replace(hooks={"indexer": {"budget_bytes": 16 << 20}})
indexer._pin(0)
derived["class"] = dsa_indexer.Indexer._mqa_logits_budget_bytes
memory.rank_memory = lambda ranks: 1 // 0
rank._settings = rank.settings()._replace(hooks={"indexer": {"budget_bytes": 8 << 30}})
derived["faulty"] = metadata.mqa_logits_budget_bytes(device_index=0, allow_sync=True)
print(json.dumps({
    "release": sglang.__version__, "at_start": at_start, "derived": derived,
    "same": all(torch.equal(small[name], other[name]) for name in small for other in (large, again)),
    "found": int((small["out_raw_indices"] >= 0).sum()), "peaks": [small_peak, large_peak, again_peak]}))
"""


def test_the_real_score_path_answers_the_same_within_a_smaller_peak(score_path: tuple[dict[str, Any], wire.Hello],
                                                                    proves: Proves) -> None:
    result, _ = score_path
    assert result["at_start"] == WANTED
    assert result["same"] and result["found"] == 512 * 64
    small, large, again = result["peaks"]
    assert large > 300 * MIB, "the scores in one piece: 128 MiB, and their transients"
    assert 2 * max(small, again) < large, "pieces of 16 MiB, and their transients"
    proves("sglang", result["release"], "indexer", by="classes")


def test_a_real_release_says_what_it_holds(score_path: tuple[dict[str, Any], wire.Hello]) -> None:
    _, hello = score_path
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE
    names = {path.rpartition(".")[2]: value for path, value in hello.facts["indexer"].items()}
    assert names == dict.fromkeys(("_TORCH_SCORE_BUDGET_BYTES", "_DEEP_GEMM_SCORE_BUDGET_BYTES", "_LOGITS_BUDGET_ELEMS",
                                   "_CANDIDATE_SCORE_BUDGET_BYTES", "_QSA_PREFILL_LOGITS_BUDGET_BYTES",
                                   "mqa_logits_budget_bytes", "mqa_logits_static_budget_bytes"), WANTED)


def test_the_real_formula_of_free_memory(score_path: tuple[dict[str, Any], wire.Hello]) -> None:
    derived, hello = score_path[0]["derived"], score_path[1]
    own = int((2 << 30) * 0.2)  # a fifth of MemFree
    assert derived["unhooked"] == derived["faulty"] == own
    assert derived["asked"] == [WANTED] * 4
    assert derived["own"] == [own] * 4
    assert derived["available"] == [2 << 30] * 4, "a fifth of what is available"
    assert derived["captured"] == pytest.approx((128 << 30) * 0.2 * 0.2), "what the device's size alone allows"
    assert derived["class"] == {"0": WANTED}
    assert [fault["where"] for fault in hello.facts["faults"]] == [f"{UTILS}.mqa_logits_budget_bytes"]
