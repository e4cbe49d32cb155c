"""Hook `heads` on vLLM's own released sources: the ROCm AITER MLA backend driven on a CPU (vllm_heads_program.py).

Exact is bit for bit, head for head, against a reference that computes each head alone. What no CPU can show: the real
kernels' numbers, and the gate on gfx950.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT, run_command
from raw_engine import CACHE, interpreter
from tightrank_adapter import heads, wire

PROGRAM = Path(__file__).with_name("vllm_heads_program.py")
COUNTS = [*range(1, 65), 96, 128]
SOME = [8, 12, 16]
RELEASES = ("0.28.0", "0.29.0", "0.32.0", "0.33.0")
# Functions of ours in the order in which an engine meets them.
PLACES = ("AiterMLAImpl.__init__", "AiterMLAMetadataBuilder.__init__", "AiterMLAMetadataBuilder._init_fp8_prefill_ps_buffers",
          "AiterMLAMetadataBuilder.build", "AiterMLAImpl.forward_mha", "Worker.initialize_from_config", "padding.seen",
          "aiter.get_ps_metadata_info_v1")
Answers = dict[str, dict[str, Any]]


class Release:
    """The answers of one release to all scenarios, and the hellos of those with the hook."""

    def __init__(self, version: str, directory: Path) -> None:
        self.version, self.directory, self.asked = version, directory, {}  # type: ignore[var-annotated]
        self.answers: Answers = {}

    def ask(self, name: str, hooked: bool = True, observe: bool = False, drill: str = "", **options: Any) -> None:
        self.asked[name] = options
        if hooked:
            run = self.directory / name
            run.mkdir(mode=0o700)
            options["directory"] = str(run)
            wire.write_settings(str(run), wire.Settings("w", 1, "vllm", {"heads": {"observe": True} if observe else {}},
                                                        {"where": drill} if drill else None))

    def run(self) -> Release:
        unpacked = CACHE / "releases" / f"vllm-{self.version}"
        paths = [str(unpacked)] if unpacked.is_dir() else []  # 0.32.0 is the environment's own
        done = run_command([interpreter("vllm"), str(PROGRAM)], input=json.dumps(self.asked), timeout=240,
                           env={"PYTHONPATH": os.pathsep.join(paths), "TIGHTRANK_INJECT": str(INJECT)})
        assert done.returncode == 0, done.stderr[-4000:]
        print(done.stderr[-5000:])
        self.answers = json.loads(done.stdout.rpartition("\n")[2])
        return self

    def hello(self, name: str) -> wire.Hello:
        [path] = (self.directory / name).glob("hello-*.json")
        hello: wire.Hello = wire.read_json(str(path), wire.Hello)
        return hello

    def state(self, name: str) -> dict[str, str]:
        return self.hello(name).hooks["heads"]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    found = Release(request.param, tmp_path_factory.mktemp("heads"))
    found.ask("plain", hooked=False, counts=COUNTS)
    found.ask("plain-fused", hooked=False, counts=SOME, fused=True)
    found.ask("lifted", counts=COUNTS, lift=True)  # 0.28 refuses 17, 24 ... altogether: its decode cannot take them
    found.ask("as-it-is", counts=COUNTS)
    found.ask("fused", counts=COUNTS, lift=True, fused=True)
    found.ask("observe", observe=True, counts=SOME)
    found.ask("bf16-cache", counts=SOME, cache="auto")
    found.ask("fp16-model", counts=SOME, dtype="float16")
    found.ask("no-gfx950", counts=SOME, no_gfx950=True)
    found.ask("another-backend", counts=[], layers=["TRITON_MLA"])
    found.ask("renamed", counts=SOME, without=["AiterMLAHelper", "is_valid_num_heads"], no_gfx950=True)
    for place in PLACES:
        found.ask("drill-" + place, counts=SOME, drill=place)
        found.ask("drill-fused-" + place, counts=SOME, drill=place, fused=True)
    found.ask("sizes", hooked=False, what="sizes", counts=[12, 16, 24])
    yield found.run()


def test_x(release):
    for name, a in release.answers.items():
        print(release.version, name, json.dumps(a)[:1500])
        try:
            h = release.hello(name); print("   ", h.hooks, h.facts)
        except Exception as e: print("   ", e)
