"""Configuration -> worker specs: command lines, environment, the line, the schedule, and what does not go together."""
from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank import plan
from tightrank.adapter import line
from tightrank.config import load
from tightrank.config.command import from_command
from tightrank.errors import ConfigError
from tightrank.host import HostFacts
from tightrank.inputs import Inputs
from tightrank.plan.line import grouped, schedule
from tightrank.records import LineSpec, WorkerSpec

HOST = HostFacts(mem_total_bytes=64 * 2**30, cgroup_limit_bytes=None)
LONG: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 2**20}
SHORT: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 8192}


def build(tmp_path: Path, text: str = "", engine: str = "vllm", model: dict[str, Any] | None = None,
          environment: dict[str, str] | None = None, keys: dict[str, str] | None = None) -> tuple[WorkerSpec, ...]:
    """Specs of a file with one worker `a`; `text` is YAML after `workers:` (indented) or before it (not)."""
    inside = "\n".join(line for line in text.splitlines() if line.startswith(" "))
    outside = "\n".join(line for line in text.splitlines() if not line.startswith(" "))
    path = tmp_path / "t.yaml"
    path.write_text(f"model: /m\nengine: {engine}\n{outside}\nworkers:\n  - name: a\n    port: 9001\n{inside}\n")
    config = load(path, {}).config
    return plan.build(config, HOST, Inputs(environment or {}, model or LONG, keys or {}))


def refusal(tmp_path: Path, text: str, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, text, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}/")


def run(command: str, *settings: str, model: dict[str, Any] | None = None) -> WorkerSpec:
    config = from_command(command.split(), {}, settings).config
    return plan.build(config, HOST, Inputs({}, model or LONG, {}))[0]


def test_vllm_command_line(tmp_path: Path) -> None:
    spec, = build(tmp_path, "served_model: tiny\n    tensor_parallel: 2\n    args: [--dtype, float32]")
    assert " ".join(spec.argv) == (
        "vllm serve /m --host 127.0.0.1 --port 9001 --tensor-parallel-size 2 --served-model-name tiny --dtype float32 "
        "--max-num-batched-tokens 2048 --enable-chunked-prefill --max-model-len 781250 --shutdown-timeout 30")
    assert (spec.served_model, spec.context_tokens) == ("tiny", 781_250)


def test_sglang_command_line(tmp_path: Path) -> None:
    spec, = build(tmp_path, "    role: prefill\n    pipeline_parallel: 2", engine="sglang")
    assert " ".join(spec.argv) == (
        "python3 -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 9001 --pp-size 2 --disaggregation-mode "
        "prefill --chunked-prefill-size 2048 --context-length 781250 --disaggregation-transfer-backend mooncake "
        "--disaggregation-bootstrap-port 8998")
    assert spec.env["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == spec.env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"


def test_a_command_without_serve_takes_the_model_by_flag(tmp_path: Path) -> None:
    spec, = build(tmp_path, "command: [python, -m, vllm.entrypoints.openai.api_server]")
    assert spec.argv[3:5] == ("--model", "/m")


def test_a_command_line_of_the_user_only_grows(tmp_path: Path) -> None:
    written = "vllm serve /m --max-num-batched-tokens 4096 --shutdown-timeout 5 --enable-chunked-prefill"
    spec = run(written)
    assert " ".join(spec.argv) == f"{written} --max-model-len 781250"
    assert spec.line is not None
    assert spec.line.maximum == 4096
    assert spec.served_model == "/m"


def test_without_the_line_the_engine_keeps_its_own_sizes(tmp_path: Path) -> None:
    spec, = build(tmp_path, "hooks: [ranks]", engine="sglang")
    assert spec.line is None
    assert spec.schedule == ()
    assert spec.context_tokens is None
    assert "--chunked-prefill-size" not in spec.argv
    assert "--context-length" not in spec.argv


def test_a_short_model_is_left_as_it_is(tmp_path: Path) -> None:
    spec, = build(tmp_path, model=SHORT)
    assert "--max-model-len" not in spec.argv
    assert spec.context_tokens == 8192
    assert spec.line is not None
    assert spec.line.floor_budget == 256 * 8192


@pytest.mark.parametrize(("args", "context"), [("[--max-model-len, '4096']", 4096), ("[--max-model-len=4k]", 4000),
                                               ("[--max_model_len, 4K]", 4096), ("[--max-model-len, auto]", 8192)])
def test_a_length_of_the_user_holds(tmp_path: Path, args: str, context: int) -> None:
    spec, = build(tmp_path, f"    args: {args}", model=SHORT)
    assert spec.context_tokens == context
    assert sum(word.startswith(("--max-model-len", "--max_model_len")) for word in spec.argv) == 1


def test_line_context_is_told_to_the_engine(tmp_path: Path) -> None:
    spec, = build(tmp_path, "line: {context: 4096}")
    assert spec.argv[spec.argv.index("--max-model-len") + 1] == "4096"


def test_deepseek_v4_has_its_own_granule(tmp_path: Path) -> None:
    spec, = build(tmp_path, model={"model_type": "deepseek_v4", "max_position_embeddings": 262144})
    assert spec.line is not None
    assert spec.line.granule == 256


@pytest.mark.parametrize(("text", "keywords", "message"), [
    ("line: {minimum: 200}", {}, "t.yaml:3: line.minimum: 200 is no multiple of the granule 64; use 192 or 256"),
    ("line: {maximum: 2000}", {}, "t.yaml:3: line.maximum: line.maximum 2000 is no multiple of the granule 64; use 1984 or "
     "2048"),
    ("    args: [--max-num-batched-tokens, '2000']", {}, "t.yaml:7: workers[0].args: --max-num-batched-tokens 2000 is no "
     "multiple of the granule 64; use 1984 or 2048"),
    ("    args: [--chunked-prefill-size, '64']", {"engine": "sglang"},
     "default: line.minimum: 256 is over --chunked-prefill-size 64; lower line.minimum to 64 or less"),
    ("line: {maximum: 1024}\n    args: [--max-num-batched-tokens, '2048']", {},
     "t.yaml:7: workers[0].args: --max-num-batched-tokens 2048 is not line.maximum 1024; name one of them only"),
    ("    args: [--chunked-prefill-size, '-1']", {"engine": "sglang"}, "t.yaml:7: workers[0].args: --chunked-prefill-size -1 "
     "switches chunks off and the hook line needs them; set a size, or take line out of hooks"),
    ("    args: [--max-num-batched-tokens, many]", {},
     "t.yaml:7: workers[0].args: --max-num-batched-tokens is no whole number; correct it"),
    ("line: {budget: 60000}", {},
     "t.yaml:3: line.budget: 60000 does not hold one chunk of line.minimum 256; use at least 65536"),
    ("    args: [--max-model-len, '900000']", {}, "t.yaml:7: workers[0].args: --max-model-len 900000 is more than the line "
     "allows, 781250 (line.budget 200000000 at line.minimum 256); set 781250 or less, or line.budget to 230400000 or more"),
    ("    args: [--max-model-len, auto]", {}, "t.yaml:7: workers[0].args: --max-model-len 1048576 is more than the line "
     "allows, 781250 (line.budget 200000000 at line.minimum 256); set 781250 or less, or line.budget to 268435456 or more"),
    ("line: {context: 900000}", {}, "t.yaml:3: line.context: 900000 is more than the line allows, 781250 (line.budget "
     "200000000 at line.minimum 256); set 781250 or less, or line.budget to 230400000 or more"),
    ("line: {context: 4096}\n    args: [--max-model-len, '8192']", {},
     "t.yaml:7: workers[0].args: --max-model-len 8192 is not line.context 4096; name one of them only"),
    ("line: {step: pow2, minimum: 192}", {}, "t.yaml:3: line.minimum: 192 is no power of two times the granule 64, as "
     "line.step pow2 needs; use 128 or 256"),
    ("guard: {floor: 63.5GiB}", {}, "t.yaml:3: guard.floor: floor and margin are 64GiB, and all the memory there is (host or "
     "cgroup) is 64.00 GiB; lower them"),
    ("    args: [--port, '1']", {}, "t.yaml:7: workers[0].args: --port has a key of its own; use workers[0].port"),
    ("    args: [--api-key=hush]", {}, "t.yaml:7: workers[0].args: --api-key has a key of its own; use "
     "workers[0].api_key_file"),
    ("    args: [--tp, '2']", {"engine": "sglang"}, "t.yaml:7: workers[0].args: --tensor-parallel-size has a key of its own; "
     "use workers[0].tensor_parallel"),
    ("    args: [--no-enable-chunked-prefill]", {}, "t.yaml:7: workers[0].args: --no-enable-chunked-prefill leaves the hook "
     "line without chunks; drop one of the two"),
    ("    args: [--dp, '2']", {"engine": "sglang"}, "t.yaml:7: workers[0].args: data parallelism is not supported inside one "
     "worker; name one worker per replica"),
])
def test_what_does_not_go_together(tmp_path: Path, text: str, keywords: dict[str, Any], message: str) -> None:
    assert refusal(tmp_path, text, **keywords) == message


def test_the_refused_length_and_the_named_way_out_are_right(tmp_path: Path) -> None:
    spec, = build(tmp_path, "line: {budget: 230400000}\n    args: [--max-model-len, '900000']")
    assert spec.context_tokens == 900_000
    assert refusal(tmp_path, "line: {budget: 230399999}\n    args: [--max-model-len, '900000']")


def test_environment(tmp_path: Path) -> None:
    environment = {"VLLM_PLUGINS": "mine", "PYTHONPATH": "/theirs"}
    spec, = build(tmp_path, "    devices: ['1']\n    env: {A: b}", environment=environment)
    assert spec.env == {"A": "b", "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "1",
                        "VLLM_PLUGINS": "mine,tightrank"}
    assert "VLLM_PLUGINS is set; tightrank is appended to it" in spec.notes


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    spec, = build(tmp_path, "    env: {SGLANG_PYSPY_DUMP_BEFORE_CRASH: 1, SGLANG_PLUGINS: 'x,tightrank'}", engine="sglang")
    assert spec.env["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "1"
    assert spec.env["SGLANG_PLUGINS"] == "x,tightrank"


def test_a_key_goes_to_vllm_by_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    spec, = build(tmp_path, "    api_key_file: /key", keys={"a": "hush"})
    assert spec.env["VLLM_API_KEY"] == spec.api_key == "hush"
    assert "hush" not in " ".join(spec.argv)
    assert "hush" not in json.dumps(plan.to_json([spec]))
    assert "hush" not in str(plan.masked(run("vllm serve /m --api-key hush --api-key=hush")))


def test_a_generation_adds_its_directory_and_its_mark(tmp_path: Path) -> None:
    spec, = build(tmp_path)
    started = plan.for_generation(spec, 7, tmp_path)
    assert (started.generation, started.run_directory) == (7, str(tmp_path / "run" / "a-7"))
    assert started.env["TIGHTRANK_ADAPTER"] == started.run_directory
    assert started.env["TIGHTRANK_RUN"] == f"{plan.mark(tmp_path)}:a:7"
    assert dataclasses.replace(started, generation=0, run_directory="", env=spec.env) == spec
    (tmp_path / "other").mkdir()
    assert plan.mark(tmp_path) != plan.mark(tmp_path / "other")


@given(st.integers(4_096, 10**7), st.sampled_from(line.RULES), st.sampled_from(line.STEPS), st.integers(1, 300))
def test_the_schedule_is_the_line_at_every_prefix(budget: int, rule: str, step: str, context: int) -> None:
    spec = LineSpec(budget=budget, floor_budget=budget, minimum=16, maximum=256, granule=16, rule=rule, step=step)
    bands = schedule(spec, context)
    told = [band.chunk_tokens for band in bands for _ in range(band.from_tokens, band.to_tokens + 1)]
    assert told == [line.chunk_tokens(budget, prefix, **spec.keywords()) for prefix in range(context)]
    assert all(one.chunk_tokens != two.chunk_tokens for one, two in pairwise(bands))
    groups = list(grouped(bands))
    assert len(groups) <= 16
    assert [band for group in groups for band in group] == list(bands)


def test_the_published_table_is_the_plan(tmp_path: Path) -> None:
    text = "line: {rule: prefix, step: pow2, granule: 256}"
    spec, = build(tmp_path, text)
    assert [(band.to_tokens, band.chunk_tokens) for band in spec.schedule] == [
        (97_656, 2048), (195_312, 1024), (390_625, 512), (781_250, 256), (781_505, 0)]


@pytest.mark.parametrize(("engine", "args", "message"), [
    ("vllm", "[--data-parallel-size, two]", "--data-parallel-size is no whole number; correct it"),
    ("vllm", "[--block-size, abc]", "--block-size is no whole number; correct it"),
    ("vllm", "[--max-model-len]", "--max-model-len is no whole number; correct it"),
    ("sglang", "[--page-size=x]", "--page-size is no whole number; correct it"),
    ("vllm", "[--max_num_batched, 4096]", "--max-num-batched is short for --max-num-batched-tokens; write it in full"),
    ("sglang", "[--chunked=512]", "--chunked is short for --chunked-prefill-size; write it in full")])
def test_arguments_that_cannot_be_read_here_are_refused(tmp_path: Path, engine: str, args: str, message: str) -> None:
    assert refusal(tmp_path, f"    args: {args}", engine=engine) == f"t.yaml:7: workers[0].args: {message}"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", [
    {"max_position_embeddings": "long"}, {"max_position_embeddings": [1]}, {"max_position_embeddings": -5},
    {"max_position_embeddings": float("inf")}, {"max_position_embeddings": 8192, "rope_scaling": "yarn"}])
def test_a_model_whose_length_makes_no_sense_is_refused(tmp_path: Path, engine: str, model: dict[str, Any]) -> None:
    assert "/m/config.json: its length or rope values make no sense (" in refusal(tmp_path, "", engine=engine, model=model)


def test_more_secrets_are_masked(tmp_path: Path) -> None:
    spec, = build(tmp_path, "    env: {HTTPS_PROXY: 'http://me:pw@proxy:1', DB_PASSWD: pw, X_AUTH: pw, PLAIN: a@b}")
    shown = plan.masked(spec)[1]
    assert "pw" not in str(shown)
    assert (shown["HTTPS_PROXY"], shown["PLAIN"]) == ("http://***@proxy:1", "a@b")
