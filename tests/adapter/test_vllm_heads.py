"""Hook `heads` on vLLM's own released sources: the ROCm AITER MLA backend driven on a CPU (vllm_heads_program.py).

Exact is bit for bit, head for head, against a reference that computes each head alone. What no CPU can show: the real
kernels' numbers, and the gate on gfx950.
"""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import INJECT, Proves, run_command
from raw_engine import CACHE, interpreter
from tightrank_adapter import heads, wire

PROGRAM = Path(__file__).with_name("vllm_heads_program.py")
COUNTS = [*range(1, 65), 96, 128]
SOME = [8, 12, 16]
RELEASES = ("0.28.0", "0.29.0", "0.32.0", "0.33.0")  # before the change, the first with it, our environment's, the newest
# Functions of ours, by where fault drills find them.
PLACES = ("AiterMLAImpl.__init__", "AiterMLAMetadataBuilder.__init__", "AiterMLAMetadataBuilder._init_fp8_prefill_ps_buffers",
          "AiterMLAMetadataBuilder.build", "AiterMLAImpl.forward_mha", "Worker.initialize_from_config",
          "padding.seen", "padding.ours", "aiter.get_ps_metadata_info_v1")
SMALL = heads.Shape(heads=3, nope_dim=16, rope_dim=8, value_dim=16, latent_dim=32)  # the program's dimensions
CASES = {"no context": (40, []), "one chunk": (40, [64]), "two": (40, [64, 64]), "with a rest": (40, [64, 64, 64, 10]),
         "more rows than keys": (400, [64, 64, 10])}


class Release:
    """The answers of one release to all scenarios, and the hellos of those with the hook."""

    def __init__(self, version: str, directory: Path) -> None:
        self.version, self.directory = version, directory
        self.asked: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, hooked: bool = True, observe: bool = False, drill: str = "", **options: Any) -> None:
        self.asked[name] = options
        if hooked:
            run = self.directory / name
            run.mkdir(mode=0o700)
            options["directory"] = str(run)
            values = {"observe": True} if observe else {}
            wire.write_settings(str(run), wire.Settings("w", 1, "vllm", {"heads": values}, {"where": drill} if drill else None))

    def run(self) -> Release:
        unpacked = CACHE / "releases" / f"vllm-{self.version}"
        paths = [str(unpacked)] if unpacked.is_dir() else []  # 0.32.0 is the environment's own
        done = run_command([interpreter("vllm"), str(PROGRAM)], input=json.dumps(self.asked), timeout=280,
                           env={"PYTHONPATH": os.pathsep.join(paths), "TIGHTRANK_INJECT": str(INJECT)})
        assert done.returncode == 0, done.stderr[-4000:]
        self.answers = json.loads(done.stdout.rpartition("\n")[2])
        assert self.answers.keys() == self.asked.keys()
        return self

    def hello(self, name: str) -> wire.Hello:
        [path] = (self.directory / name).glob("hello-*.json")
        hello: wire.Hello = wire.read_json(str(path), wire.Hello)
        return hello

    def state(self, name: str) -> dict[str, str]:
        return self.hello(name).hooks["heads"]

    def modes(self, name: str) -> dict[int, str]:
        return {int(count): found["mode"] for count, found in self.hello(name).facts["heads"].items()}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    found = Release(request.param, tmp_path_factory.mktemp("heads"))
    found.ask("bare", hooked=False, counts=[1, 2, 4, *SOME, 24])
    found.ask("bare-fused", hooked=False, counts=[1, 2, 4, *SOME, 24], fused=True)
    found.ask("bare-fp16", hooked=False, counts=[16], dtype="float16")
    found.ask("all", counts=COUNTS, lift=True)
    found.ask("all-fused", counts=COUNTS, lift=True, fused=True)
    found.ask("refused", counts=[24])
    found.ask("observed", observe=True, counts=SOME, fused=True)
    found.ask("bf16-cache", counts=SOME, cache="auto")
    found.ask("fp16-model", counts=SOME, dtype="float16")
    found.ask("no-gfx950", counts=SOME, no_gfx950=True)
    found.ask("another-backend", counts=[], backends=["TRITON_MLA"])
    found.ask("context", counts=SOME, context=True)
    found.ask("gated", counts=SOME, gated=True)
    found.ask("renamed", counts=[], without=["AiterMLAImpl", "_mla_fp8_prefill_attn"])
    for place in PLACES:
        found.ask("drill " + place, counts=SOME, drill=place, fused=True)
    found.ask("sizes", what="sizes", counts=[12, 16, 24])
    found.ask("fallback", hooked=False, what="fallback",
              cases={name: [SMALL.heads, *case] for name, case in CASES.items()})
    return found.run()


def wrong(answers: dict[str, Any]) -> dict[int, list[int]]:
    return {int(count): answer["wrong"] for count, answer in answers.items() if answer.get("wrong", True)}


@pytest.mark.parametrize("form", ["all", "all-fused"])
def test_every_head_is_exact_and_metadata_is_as_wide_as_the_forward_pass(release: Release, form: str, proves: Proves) -> None:
    answers = release.answers[form]
    assert sorted(map(int, answers)) == COUNTS
    for count, answer in answers.items():
        wide = heads.width(int(count))
        assert answer["path"] == "fp8", (count, answer)
        assert answer["wrong"] == [], count
        assert (answer["forward_width"], answer["metadata_width"], answer["plan_width"]) == (wide, wide, wide), count
    assert release.state(form)["state"] == wire.IN_FORCE
    proves("vllm", release.version, "heads", by="classes")


def test_what_a_release_does_without_the_hook(release: Release) -> None:
    """What the test above is worth. 0.33's own padding is right; AITER's fused form of it is tiled, and sliced by stride."""
    bare, fused = release.answers["bare"], release.answers["bare-fused"]
    if release.version == "0.28.0":
        assert [count for count, answer in bare.items() if answer.get("path") == "fp8"] == ["16"]
        assert {bare[count]["path"] for count in ("1", "2", "4", "8", "12")} == {"bf16"}
        return
    expected = {2: [1], 4: [1, 2, 3], 8: [1, 2, 3, 4, 5, 6, 7]}
    assert {answer["path"] for answer in (bare | fused).values()} == {"fp8"}
    assert wrong(bare) == ({} if release.version == "0.33.0" else expected)
    assert wrong(fused) == expected


def test_what_is_done_is_what_the_release_needs(release: Release) -> None:
    """Decided by what its functions do, for each count."""
    plain, fused = release.modes("all"), release.modes("all-fused")
    needed = {count for count, mode in plain.items() if mode != "not needed"}
    if release.version == "0.28.0":
        assert needed == {count for count in COUNTS if count % 16}
        assert set(plain.values()) == {"backport", "not needed"}
    else:
        assert needed == (set() if release.version == "0.33.0" else {2, 4, 8})
        assert {count: mode for count, mode in fused.items() if mode != "not needed"} == {2: "repair", 4: "repair", 8: "repair"}


def test_a_count_that_the_engine_refuses_stays_refused(release: Release) -> None:
    """0.28's decode cannot take 24 heads; that its prefill could is of no use."""
    [answer] = release.answers["refused"].values()
    assert ("24" in answer.get("error", "")) == (release.version == "0.28.0")


def test_observing_changes_nothing_and_says_what_it_would_do(release: Release) -> None:
    for count, answer in release.answers["observed"].items():
        bare = release.answers["bare-fused"][count]
        assert 0 <= answer.pop("reserved") - bare["reserved"] < 2**16  # the question's own scratch, where nothing else was
        assert answer.items() <= bare.items()
    assert release.state("observed")["state"] == wire.OBSERVING
    needed = {8: "backport", 12: "backport"} if release.version == "0.28.0" else {8: "repair"}
    assert release.modes("observed") == {**dict.fromkeys(SOME, "not needed"), **needed}


@pytest.mark.parametrize(("scenario", "found"), [("bf16-cache", "KV cache auto, model bfloat16"),
                                                 ("fp16-model", "KV cache fp8, model float16")])
def test_an_fp8_cache_and_a_bf16_model_are_the_gate(release: Release, scenario: str, found: str) -> None:
    """Else nothing is reserved, the bf16 path runs, and the hook that was asked for says that it is not in force."""
    for answer in release.answers[scenario].values():
        assert (answer["path"], answer["metadata_width"]) == ("bf16", None)
        assert answer["reserved"] < 2**20  # what the questions took of the workspace: one tile
    state = release.state(scenario)
    assert (state["state"], state["wanted"], state["found"]) == (wire.FAILED, "an FP8 KV cache and a bfloat16 model", found)


def test_without_the_gate_0_28_writes_bf16_into_fp16_outputs(release: Release) -> None:
    answer = release.answers["bare-fp16"]["16"]
    assert (answer["path"], len(answer["wrong"])) == (("fp8", 16) if release.version == "0.28.0" else ("bf16", 16))


@pytest.mark.parametrize(("scenario", "wanted", "found"), [
    ("no-gfx950", "gfx950", "attention backend ROCM_AITER_MLA on device cpu"),
    ("another-backend", "vLLM's ROCm AITER MLA backend with FP8 prefill", "attention backend TRITON_MLA on device cpu"),
    ("renamed", "AiterMLAImpl._mla_fp8_prefill_attn", "no such attribute in vLLM"),
])
def test_a_worker_that_has_no_use_for_it_says_so(release: Release, scenario: str, wanted: str, found: str) -> None:
    assert {answer["path"] for answer in release.answers[scenario].values()} <= {"bf16"}
    state = release.state(scenario)
    assert state["state"] == wire.FAILED
    assert wanted in state["wanted"]
    assert found in state["found"]


@pytest.mark.parametrize("place", PLACES)
def test_when_a_function_of_ours_raises_the_engine_answers(release: Release, place: str) -> None:
    """Law 7: exact heads, the engine's bf16 path, or the engine's own answer; the fault is told, nothing crashes."""
    answers, bare = release.answers["drill " + place], release.answers["bare-fused"]
    hello = release.hello("drill " + place)
    for count, answer in answers.items():
        own = (bare[count]["path"], bare[count]["wrong"])
        assert answer["path"] == "bf16" or answer["wrong"] == [] or (answer["path"], answer["wrong"]) == own, (count, answer)
        if answer["wrong"] and answer["path"] == "fp8":
            assert hello.hooks["heads"]["state"] == wire.FAILED
    assert {fault["error"] for fault in hello.facts["faults"]} == {f"Drill: a fault drill at {place}"}
    if hello.hooks["heads"]["state"] == wire.IN_FORCE:
        assert wrong(answers) == {}


@pytest.mark.parametrize("place", ["AiterMLAImpl.forward_mha", "AiterMLAMetadataBuilder.build"])
def test_where_the_release_is_wrong_or_cannot_the_bf16_path_stands_in_for_us(release: Release, place: str) -> None:
    """Its own path is off wherever ours is in its place: a fault while serving never brings wrong heads back."""
    answers = release.answers["drill " + place]
    if release.version == "0.28.0":
        assert [answers[count]["path"] for count in ("8", "12", "16")] == ["bf16", "bf16", "fp8"]
    elif place == "AiterMLAImpl.forward_mha":
        assert answers["8"]["path"] == "bf16"
    else:  # its own builder made the plan
        assert wrong(answers) == {}


def test_a_prompt_that_continues_takes_the_engines_bf16_path(release: Release) -> None:
    for answer in release.answers["context"].values():
        assert (answer["path"], answer["plan_width"]) == ("bf16", None)
    assert release.state("context")["state"] == wire.IN_FORCE


def test_a_gate_that_is_closed_for_another_reason_stays_closed(release: Release) -> None:
    answers = release.answers["gated"]
    padded = [] if release.version == "0.28.0" else ["8", "12"]  # 0.28 does not pad: there the reason is the count
    assert {answers[count]["path"] for count in [*padded, "16"]} == {"bf16"}
    state = release.state("gated")
    assert state["state"] == wire.FAILED
    assert "left off by the gate" in state["found"]


def test_bytes_are_those_that_the_release_reserves(release: Release) -> None:
    """The published setting: 256 compute units, 1 request, 512 queries, value dimension 128."""
    by_tokens = release.version in ("0.32.0", "0.33.0")
    for count, reserved in release.answers["sizes"].items():
        wide = heads.width(int(count))
        tiles = heads.tiles_by_tokens(512, 1, 256) if by_tokens else heads.tiles_by_heads(wide, 256, 1, 512)
        assert reserved == heads.workspace_bytes(int(count), tiles, 512, 128), count


def test_the_bf16_path_allocates_what_the_arithmetic_says(release: Release) -> None:
    assert release.answers["fallback"] == {
        name: heads.fallback_bytes(SMALL, tokens, sum(chunks), 64) for name, (tokens, chunks) in CASES.items()}
