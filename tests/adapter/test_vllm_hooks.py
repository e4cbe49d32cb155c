"""What vLLM's hooks do where an engine lacks what they need, and what a step record reads. Stand-ins for vLLM's classes;
the real ones are in tests/engines."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import INJECT
from tightrank_adapter import pages, wire
from tightrank_adapter.vllm import steps

LINE = {"budget": 1_000_000, "minimum": 128, "maximum": 1024, "granule": 64, "rule": "span", "step": "granule"}
PROGRAM = """
import json, os, sys
from types import SimpleNamespace as Bag
from tightrank_adapter import pages, rank, wire
from tightrank_adapter.vllm import line
import tightrank_adapter.fault
rank.settings(sys.argv[1])
more = json.loads(sys.argv[2])

class Scheduler:
    num_spec_tokens = 0
    def __init__(self):
        self.scheduler_config = Bag(enable_chunked_prefill=more.get("chunked", True))
        self.cache_config = Bag(block_size=more.get("block", 16))
        self.block_size = more.get("block", 16)
        self.max_num_scheduled_tokens = more.get("most", 1024)
        self.need_mamba_block_aligned_split = more.get("mamba", False)
    def _reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens):
        return num_new_tokens
    def schedule(self):
        return Bag(granted=[self._reserve_prefill_lookahead(*row) for row in more.get("rows", [])])

class Config:
    def get_scheduler_cls(self):
        return Scheduler

if more.get("without"):
    delattr(Scheduler, "_reserve_prefill_lookahead")
if more.get("renamed"):
    Scheduler._reserve_prefill_lookahead = lambda self, request, tokens: tokens
for name in more.get("raises", []):
    owner, _, function = name.rpartition(".")
    setattr(getattr(line, owner) if owner else line, function, lambda *args, **kwargs: 1 // 0)
line.install(Bag(SchedulerConfig=Config))
scheduler = Config().get_scheduler_cls()()
rank.hello("engine-core")
more["rows"] = [(Bag(num_prompt_tokens=prompt, num_tokens=total), prefix, offered)
                for prompt, total, prefix, offered in more.get("rows", [])]
output = scheduler.schedule()
print(json.dumps({"output": vars(output), "name": type(scheduler).__qualname__}))
"""


def drive(directory: Path, page: int | None = None, **more: Any) -> tuple[wire.Hello, dict[str, Any]]:
    """Runs PROGRAM as an engine core: its hello, and what its scheduler put out."""
    directory.chmod(0o700)
    wire.write_settings(str(directory), wire.Settings("w", 1, "vllm", {"line": {**LINE, **more.pop("values", {})}},
                                                      {"where": more.pop("drill", "")}))
    if page is not None:
        pages.ControlWriter(str(directory)).publish(page)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(directory), json.dumps(more)], capture_output=True,
                          text=True, timeout=60, env={"PYTHONPATH": str(INJECT)}, check=False)
    assert done.returncode == 0, done.stderr
    [path] = directory.glob("hello-*.json")
    return wire.read_json(str(path), wire.Hello), json.loads(done.stdout)


@pytest.mark.parametrize(("more", "wanted", "found"), [
    ({"without": True}, "Scheduler._reserve_prefill_lookahead", "no such attribute"),
    ({"renamed": True}, "num_computed_tokens", "('self', 'request', 'tokens')"),
    ({"chunked": False}, "enable_chunked_prefill=True", "enable_chunked_prefill=False"),
    ({"most": 100}, "at least 128 tokens", "--max-num-batched-tokens 100"),
    ({"mamba": True, "block": 2048}, "granules of 2048", "line.maximum 1024"),
])
def test_an_engine_that_cannot_keep_the_line_fails_the_hook_and_runs(
        tmp_path: Path, more: dict[str, Any], wanted: str, found: str) -> None:
    rows = [] if more.keys() & {"without", "renamed"} else [(900, 900, 0, 900)]
    hello, answer = drive(tmp_path, **more, rows=rows)
    state = hello.hooks["line"]
    assert state["state"] == wire.FAILED
    assert wanted in state["wanted"]
    assert found in state["found"]
    assert answer["output"]["granted"] == [900][:len(rows)]


def test_decode_rows_stay_and_prefill_rows_share_the_budget(tmp_path: Path) -> None:
    hello, answer = drive(tmp_path, page=600_000, rows=[
        (100, 120, 119, 1),        # decode
        (5000, 5000, 1024, 1024),  # a continuation: 384 x 1408 <= B < 448 x 1472
        (40, 40, 0, 40),           # (384 + 40) x 1408 <= B
        (300, 300, 0, 300),        # left out
        (1, 9000, 8999, 1),        # decode after a long output
    ])
    assert hello.hooks["line"]["state"] == wire.IN_FORCE
    assert hello.facts["granule_tokens"] == 64
    assert answer["output"] == {"granted": [1, 384, 40, 0, 1], "tightrank_budget": 600_000}
    assert answer["name"] == "Scheduler"


def test_without_a_control_page_the_budget_of_the_settings_stands(tmp_path: Path) -> None:
    _, answer = drive(tmp_path, rows=[(5000, 5000, 1024, 1024)])
    assert answer["output"] == {"granted": [576], "tightrank_budget": 1_000_000}


def test_an_unreadable_control_page_keeps_the_last_budget_and_is_told(tmp_path: Path) -> None:
    (tmp_path / wire.CONTROL).write_bytes(b"\0" * 4096)
    hello, answer = drive(tmp_path, rows=[(5000, 5000, 1024, 1024)])
    assert answer["output"]["tightrank_budget"] == 1_000_000
    assert [(fault["where"], "not written yet" in fault["error"]) for fault in hello.facts["faults"]] == [
        (wire.CONTROL, True)]


def output(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int, int]],
           drafts: dict[str, list[int]] | None = None) -> SimpleNamespace:
    """A SchedulerOutput: new {name: (prefix, tokens)}, cached {name: (prefix, tokens, outputs so far)}."""
    counts = {name: row[1] for name, row in {**new, **cached}.items()}
    return SimpleNamespace(
        num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=row[0]) for name, row in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[row[0] for row in cached.values()],
            num_output_tokens=[row[2] for row in cached.values()]))


@pytest.mark.parametrize(("given", "chunks"), [
    (output({}, {}), []),
    (output({}, {"a": (10, 1, 3), "b": (99, 1, 1)}), []),
    (output({"a": (0, 500)}, {"b": (99, 1, 1)}), [[0, 500]]),
    (output({"a": (4096, 1)}, {}), [[4096, 1]]),
    (output({"a": (0, 5)}, {"b": (512, 256, 0), "c": (99, 1, 7)}), [[0, 5], [512, 256]]),
    (output({}, {"b": (511, 1, 0)}), [[511, 1]]),
    (output({}, {"a": (99, 4, 7)}, {"a": [1, 2, 3]}), []),          # drafts are no prefill
    (output({}, {"a": (0, 300, 7), "b": (5, 1, 1)}), [[0, 300]]),   # preempted, computed anew
])
def test_prefill_chunks_of_a_step(given: SimpleNamespace, chunks: list[list[int]]) -> None:
    assert steps.prefill_chunks(given) == chunks


def test_when_the_decision_fails_a_step_holds_one_chunk_of_the_minimum(tmp_path: Path) -> None:
    """Law 7: one request over the line may be needed to end it; all of them at once never are."""
    hello, answer = drive(tmp_path, drill="Steering.grant", rows=[
        (100, 120, 119, 1), (5000, 5000, 1024, 1024), (5000, 5000, 1024, 1024), (5000, 5000, 4999, 1)])
    assert answer["output"]["granted"] == [1, 128, 0, 1]
    assert hello.facts["fault_count"] == 3


def test_observed_it_lowers_nothing_and_the_step_knows_the_budget(tmp_path: Path) -> None:
    hello, answer = drive(tmp_path, values={wire.OBSERVE: True}, rows=[(5000, 5000, 1024, 1024), (5000, 5000, 4096, 904)])
    assert answer["output"]["granted"] == [1024, 904] and answer["output"]["tightrank_budget"] == LINE["budget"]
    assert hello.hooks["line"]["state"] == wire.OBSERVING


ROWS = [(100, 120, 119, 1), (5000, 5000, 1024, 1024), (5000, 5000, 1024, 1024), (5000, 5000, 4999, 1)]


@pytest.mark.parametrize(("raises", "granted", "state"), [
    (["Steering.decide"], [1, 128, 0, 1], wire.DEGRADED),
    (["chunk.grant"], [1, 128, 0, 1], wire.DEGRADED),
    (["Steering.least"], None, wire.IN_FORCE),
    (["Steering.begin"], None, wire.IN_FORCE), (["_step_begins"], None, wire.IN_FORCE), (["_step_made"], None, wire.IN_FORCE),
    (["_step_is_bare"], None, wire.IN_FORCE),
    (["Steering.begin", "_step_is_bare"], None, wire.FAILED),
    (["Steering.decide", "Steering.least"], [1, 1024, 1024, 1], wire.FAILED),
    (["_steer"], [1, 1024, 1024, 1], wire.FAILED), (["_rules"], [1, 1024, 1024, 1], wire.FAILED),
    (["_make_class"], [1, 1024, 1024, 1], wire.FAILED), (["_lowered"], [1, 1024, 1024, 1], wire.FAILED)])
def test_whichever_of_our_functions_raises_the_engine_goes_on(tmp_path: Path, raises: list[str], granted: list[int] | None,
                                                              state: str) -> None:
    """Law 7. None: what is granted where nothing raises. What leaves the engine unsteered is a hook that is not in force."""
    hello, answer = drive(tmp_path, raises=raises, rows=ROWS)
    (tmp_path / "usual").mkdir()
    usual = drive(tmp_path / "usual", rows=ROWS)[1]["output"]["granted"]
    assert answer["output"]["granted"] == (usual if granted is None else granted)
    assert hello.hooks["line"]["state"] == state, hello.hooks


def test_a_worker_says_which_device_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[int] = []
    monkeypatch.setattr(steps.rank, "locate", located.append)
    for device in (SimpleNamespace(type="cuda", index=3), SimpleNamespace(type="cpu", index=None)):
        steps._bound(None, None, SimpleNamespace(device=device))
    assert located == [3]
