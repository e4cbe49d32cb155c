"""The hook `indexer` of SGLang on stand-ins that have one budget each, in schedulers of their own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT
from raw_engine import wire

MIB = 2**20
WANTED = 16 * MIB
ATTENTION = "sglang.srt.layers.attention."
UTILS = ATTENTION + "mqa_logits_utils"
HIP = "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip"
BUDGETS = {  # module: name and value as in the release or branch that has it
    ATTENTION + "dsv4.v41_indexer.scoring": ("_TORCH_SCORE_BUDGET_BYTES", 1 << 30),
    ATTENTION + "dsv4.low_ratio_backend_hip": ("_CANDIDATE_SCORE_BUDGET_BYTES", 1 << 30),
    ATTENTION + "qsa.qsa_indexer": ("_QSA_PREFILL_LOGITS_BUDGET_BYTES", 128 * MIB),
    HIP: ("_LOGITS_BUDGET_ELEMS", 2048 * MIB // 4),
    ATTENTION + "deepseek_v4_backend": ("_TORCH_INDEXER_SCORE_BUDGET_BYTES", 1 << 30),
    ATTENTION + "dsv4.low_ratio_backend": ("_DENSE_INDEXER_LOGITS_BUDGET_BYTES", 1 << 31),
    ATTENTION + "dsv4.dense_prefill_indexer": ("_SCORE_BUDGET_BYTES", 2 << 30),
}
SCHEDULER = """
from types import SimpleNamespace
class Layer: ...
class LlamaForCausalLM:
    def named_modules(self): return [("", self), ("layers.0.self_attn%s", Layer())]
class Scheduler:
    def __init__(self):
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(gpu_id=0, model=LlamaForCausalLM()))
"""
DERIVED = """
def mqa_logits_free_mem_fraction(): return 0.2
def mqa_logits_static_budget_bytes(*, device_index): return 4 << 30
def mqa_logits_budget_bytes(*, device_index, allow_sync):
    budget = mqa_logits_static_budget_bytes(device_index=device_index)
    return min(int((2 << 30) * mqa_logits_free_mem_fraction()), budget) if allow_sync else budget
"""
CLASS = """
from sglang.srt.layers.attention.mqa_logits_utils import mqa_logits_budget_bytes
class Indexer:
    _mqa_logits_budget_bytes = {}
    def _get_mqa_logits_budget_bytes(self, device_index):
        if device_index not in self._mqa_logits_budget_bytes:
            self._mqa_logits_budget_bytes[device_index] = mqa_logits_budget_bytes(device_index=device_index, allow_sync=True)
        return self._mqa_logits_budget_bytes[device_index]
"""
CLASS_ALONE = """
class Indexer:
    _mqa_logits_budget_bytes = {}
    def _get_mqa_logits_budget_bytes(self, device_index):
        return self._mqa_logits_budget_bytes.setdefault(device_index, %d)
"""
BEGIN = """
import importlib, json, sys
from tightrank_adapter import rank
%s
for name in json.loads(sys.argv[1]): importlib.import_module(name)
from sglang.srt.managers.scheduler import Scheduler
rank.hello("scheduler", 0)
Scheduler()
for name in json.loads(sys.argv[2]): importlib.import_module(name)
def value(path):
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)
%s
"""


class Stand:
    """A package `sglang` with what a test writes into it, and a scheduler of it in an interpreter of its own."""

    def __init__(self, root: Path) -> None:
        self.run, self.path = root / "run", root / "path"
        self.run.mkdir(mode=0o700)
        self.settings()
        self.write("sglang", "__version__ = '9.9'\n", "__init__.py")
        self.scheduler()

    def settings(self, drill: dict[str, Any] | None = None, **values: Any) -> None:
        hooks = {"indexer": {"budget_bytes": WANTED, **values}}
        wire.write_settings(str(self.run), wire.Settings("w", 1, "sglang", hooks, drill or {}))

    def write(self, module: str, text: str, suffix: str = "") -> None:
        parts = module.split(".")
        file = self.path.joinpath(*parts, suffix) if suffix else self.path.joinpath(*parts).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def scheduler(self, indexer: bool = True) -> None:
        self.write("sglang.srt.managers.scheduler", SCHEDULER % (".indexer" if indexer else ""))

    def budget(self, module: str) -> str:
        """Writes the module with its budget; the path of that."""
        name, value = BUDGETS[module]
        self.write(module, f"{name} = {value}\n")
        return f"{module}.{name}"

    def start(self, before: list[str] | None = None, after: list[str] | None = None, first: str = "",
              last: str = "print(0)") -> tuple[Any, wire.Hello]:
        """Imports `before`, makes a Scheduler, imports `after`; what `last` printed, and the hello."""
        done = subprocess.run([sys.executable, "-c", BEGIN % (first, last), json.dumps(before or []), json.dumps(after or [])],
                              capture_output=True, text=True, timeout=60, check=False, env={
                                  **os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}{self.path}",
                                  "TIGHTRANK_ADAPTER": str(self.run)})
        assert done.returncode == 0, done.stderr
        [path] = self.run.glob("hello-*.json")
        return json.loads(done.stdout), wire.read_json(str(path), wire.Hello)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


@pytest.mark.parametrize("module", BUDGETS)
@pytest.mark.parametrize("late", [False, True])
def test_a_budget_is_set_at_its_import_and_read_back(stand: Stand, module: str, late: bool) -> None:
    path = stand.budget(module)
    other = stand.budget(next(name for name in BUDGETS if name != module))
    before, after = ([other.rpartition(".")[0]], [module]) if late else ([module], [])
    found, hello = stand.start(before, after, last=f"print(value({path!r}))")
    assert found == (WANTED // 4 if module == HIP else WANTED)
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE
    assert hello.facts["indexer"] == {path: WANTED, **({other: WANTED} if late else {})}


def test_without_a_budget_or_without_an_indexer_the_hook_is_refused(stand: Stand) -> None:
    _, hello = stand.start()
    state = hello.hooks["indexer"]
    assert state["state"] == wire.FAILED and "_TORCH_SCORE_BUDGET_BYTES" in state["wanted"]
    assert state["found"] == "none of them in sglang 9.9"
    (stand.run / f"hello-{hello.pid}.json").unlink()
    path = stand.budget(HIP)
    stand.scheduler(indexer=False)
    _, hello = stand.start([HIP])
    state = hello.hooks["indexer"]
    assert (state["state"], state["found"]) == (wire.FAILED, "LlamaForCausalLM has none")
    assert "a model with an indexer" in state["wanted"] and path.rpartition(".")[2] in state["wanted"]


def test_observed_it_reads_and_tells_and_changes_nothing(stand: Stand) -> None:
    stand.settings(observe=True)
    paths = {stand.budget(module): BUDGETS[module][1] for module in BUDGETS}
    stand.write(UTILS, DERIVED)
    found, hello = stand.start([UTILS, *BUDGETS], last=f"print(json.dumps([value(path) for path in {list(paths)!r}]))")
    assert found == list(paths.values())
    assert hello.hooks["indexer"]["state"] == wire.OBSERVING
    assert hello.facts["indexer"] == {path: 4 * value if HIP in path else value for path, value in paths.items()}
    assert hello.facts["indexer_wanted"] == dict.fromkeys(paths, WANTED)


def test_a_block_that_has_its_size_already_is_left_alone(stand: Stand) -> None:
    stand.write(HIP, "_LOGITS_BUDGET_ELEMS = 5\n_LOGITS_POOL = {0: 'block'}\n")
    found, hello = stand.start([HIP], last=f"print(value('{HIP}._LOGITS_BUDGET_ELEMS'))")
    assert found == 5
    assert hello.hooks["indexer"]["state"] == wire.FAILED and "_LOGITS_POOL" in hello.hooks["indexer"]["found"]


CALL = "print(value('%s.mqa_logits_budget_bytes')(device_index=0, allow_sync=%s))"
MEMORY = "from tightrank_adapter import memory; memory.rank_memory = lambda ranks: memory.Memory(%d // ranks, 128 << 30, %s)"
OWN = int((2 << 30) * 0.2)  # of DERIVED: a fifth of MemFree


@pytest.mark.parametrize(("wanted", "ranks", "shared", "sync", "answer"), [
    (WANTED, 1, True, True, WANTED),
    (WANTED, 1, False, True, WANTED),
    (8 << 30, 1, False, True, OWN),             # the device's own memory: only ever lowered
    (8 << 30, 1, True, True, 2 << 30),          # a fifth of the 10 GiB that are available
    (8 << 30, 2, True, True, 1 << 30),          # two ranks share the host
    (8 << 30, 1, True, False, 4 << 30),         # under capture: without free memory
    (WANTED, 1, True, False, WANTED),
])
def test_a_derived_budget_is_bounded_and_counts_available_memory_where_the_device_shares_the_hosts(
        stand: Stand, wanted: int, ranks: int, shared: bool, sync: bool, answer: int) -> None:
    stand.settings(budget_bytes=wanted, ranks=ranks)
    stand.write(UTILS, DERIVED)
    stand.write(ATTENTION + "dsa.dsa_indexer", CLASS)
    found, hello = stand.start([UTILS, ATTENTION + "dsa.dsa_indexer"], first=MEMORY % (10 << 30, shared),
                               last=CALL % (ATTENTION + "dsa.dsa_indexer", sync))
    assert abs(found - answer) <= 1
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE
    assert hello.facts["indexer"] == {f"{UTILS}.{name}": wanted
                                      for name in ("mqa_logits_budget_bytes", "mqa_logits_static_budget_bytes")}


@pytest.mark.parametrize(("text", "kept"), [(CLASS, WANTED), (CLASS_ALONE % (1 << 30), WANTED), (CLASS_ALONE % MIB, MIB)])
def test_the_dictionary_of_the_class_holds_no_more_than_was_asked_for(stand: Stand, text: str, kept: int) -> None:
    """CLASS_ALONE as in 0.5.20, which has no mqa_logits_utils: its class derives by itself, and is only ever lowered."""
    module = ATTENTION + "dsa.dsa_indexer"
    if text == CLASS:
        stand.write(UTILS, DERIVED)
    stand.write(module, text)
    found, hello = stand.start([module], first=MEMORY % (10 << 30, True) + "; memory.device = lambda: 1",
                               last=f"print(json.dumps(value('{module}.Indexer')._mqa_logits_budget_bytes))")
    assert found == {"0": kept}
    assert hello.facts["indexer"][f"{module}.Indexer._mqa_logits_budget_bytes[0]"] == kept
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE


def test_a_function_that_was_taken_over_before_the_hook_is_named(stand: Stand) -> None:
    stand.write(UTILS, DERIVED)
    stand.write(ATTENTION + "dsv4.metadata", "import sys; mqa_logits_budget_bytes = print\n")
    _, hello = stand.start([UTILS, ATTENTION + "dsv4.metadata"])
    assert hello.hooks["indexer"] == {"state": wire.FAILED, "found": "taken over before it",
                                      "wanted": f"{ATTENTION}dsv4.metadata.mqa_logits_budget_bytes with the hook"}


def test_functions_that_were_taken_over_before_a_late_start_get_the_hook_too(stand: Stand) -> None:
    """As by SGLang's plugin door, which opens in a scheduler whose modules are loaded."""
    stand.write(UTILS, DERIVED)
    stand.write(ATTENTION + "dsa.dsa_indexer", CLASS)
    first = f"""
from tightrank_adapter import imports
from tightrank_adapter.sglang import indexer
imports._waiting.pop({UTILS!r})
import {ATTENTION}dsa.dsa_indexer
rank.settings()
indexer.derived(sys.modules[{UTILS!r}])
"""
    found, hello = stand.start(first=first + MEMORY % (10 << 30, True), last=CALL % (ATTENTION + "dsa.dsa_indexer", True))
    assert found == WANTED
    assert hello.hooks["indexer"]["state"] == wire.IN_FORCE


FUNCTIONS = ("derived", "_wrap", "_lowered", "install", "_set_globals", "_set", "_finish", "_pin", "_class_budgets", "budgets",
             "_derived_budgets", "_tell", "_wanted_bytes", "arithmetic.has_indexer")
RAISES = """
from tightrank_adapter.sglang import indexer
def raising(*args, **kwargs): raise ZeroDivisionError("ours")
"""


@pytest.mark.parametrize("function", FUNCTIONS)
def test_whichever_of_our_functions_raises_the_engine_goes_on_and_it_is_told(stand: Stand, function: str) -> None:
    path = stand.budget(HIP)
    stand.write(UTILS, DERIVED)
    first = f"{RAISES}\nindexer.{function} = raising\n" + MEMORY % (10 << 30, True)
    found, hello = stand.start([UTILS, HIP], first=first,
                               last=f"print(json.dumps([value({path!r}), {(CALL % (UTILS, True))[6:-1]}]))")
    assert found[0] in (WANTED // 4, BUDGETS[HIP][1]) and found[1] in (WANTED, OWN)
    assert hello.hooks["indexer"]["state"] == wire.FAILED
    assert {fault["error"] for fault in hello.facts["faults"]} == {"ZeroDivisionError: ours"}


@pytest.mark.parametrize("where", [HIP, "indexer.finish", f"{UTILS}.mqa_logits_budget_bytes", "reading"])
def test_a_drill_leaves_the_engine_its_own_value(stand: Stand, where: str) -> None:
    path = stand.budget(HIP)
    stand.write(UTILS, DERIVED)
    stand.settings({"where": where}, budget_bytes=8 << 30)
    first = MEMORY % (10 << 30, True) + ("; memory.rank_memory = None" if where == "reading" else "")
    found, hello = stand.start([UTILS, HIP], first=first,
                               last=f"print(json.dumps([value({path!r}), {(CALL % (UTILS, True))[6:-1]}]))")
    runtime = where not in (HIP, "indexer.finish")
    assert found == [BUDGETS[HIP][1] if where == HIP else 2 << 30, OWN if runtime else 2 << 30]
    assert hello.hooks["indexer"]["state"] == (wire.IN_FORCE if runtime else wire.FAILED)
    assert len(hello.facts["faults"]) == 1
