"""The preflight of the engine: which Python runs it, what that has, which architectures and flags its sources know.

The packages are made here, in the shapes of vLLM 0.32.0 and SGLang 0.5.23; real ones: tests/engines/test_preflight.py.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from deployment import gone
from helpers import wait_until
from preflight import make_spec
from tightrank.check import architecture, flags, program, quantization
from tightrank.check.flags import FlagFacts
from tightrank.check.program import ProgramFacts

ENVIRONMENT = {"PATH": os.environ["PATH"]}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a package vllm and Transformers."""
    files = {
        "vllm/__init__.py": "print('imported')",
        "vllm/model_executor/models/registry.py": "_TEXT_GENERATION_MODELS = {'LlamaForCausalLM': ('llama', 'L'), **{}}\n"
        "_PREVIOUSLY_SUPPORTED_MODELS = {'OldForCausalLM': '0.1'}\n_TEST: dict = {'No': 1}\n",
        "vllm/engine/arg_utils.py": "def add(parser, kwargs):\n    parser.add_argument('--max-model-len', **kwargs)\n"
        "    parser.add_argument('--compilation-config', '-cc')\n    parser.add_argument('--enforce-eager')\n",
        "vllm/entrypoints/launchers/cli_args.py": "class FrontendArgs:\n    host: str\n    port: int = 1\n    api_key: list\n"
        "def make_arg_parser(parser):\n    for flag in ('--max-model-len', '--host', '--port', '--api-key'):\n"
        "        parser.add_argument(flag)\n    parser.add_argument('model', nargs='?')\n    return parser\n",
        "vllm/entrypoints/__init__.py": "", "vllm/entrypoints/launchers/__init__.py": "", "vllm/utils/__init__.py": "",
        "vllm/utils/argparse_utils.py": "import argparse\nprint('noise of an import')\n"
        "class FlexibleArgumentParser(argparse.ArgumentParser): pass\n",
        "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
        "transformers/__init__.py": "", "transformers/models/odd/modeling_odd.py": "class OddForCausalLM(Base): pass\n"}
    return write(tmp_path / "site", files)


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def script(path: Path, head: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + "\nimport vllm\n")
    path.chmod(0o755)
    return str(path)


def found(folder: Path, tmp_path: Path, args: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Any:
    command = (script(tmp_path / "bin" / "vllm", f"#!{sys.executable}"), "serve", "/m")
    return make_spec(args, command=command, env={"PYTHONPATH": str(folder), **(env or {})})


# --- program ----------------------------------------------------------------------------------------------------------


def test_the_python_of_a_command_line(tmp_path: Path) -> None:
    path = f"{tmp_path}/bin:{ENVIRONMENT['PATH']}"
    python = sys.executable
    vllm = script(tmp_path / "bin" / "vllm", f"#!{python}")
    long = script(tmp_path / "long" / "vllm", f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''")
    other = script(tmp_path / "other" / "vllm", f"#!/bin/sh\nexec {python} wrapper.py")
    gone = script(tmp_path / "gone" / "vllm", "#!/nowhere/bin/python3")
    table = [((vllm, "serve", "m"), python), (("vllm", "serve", "m"), python), ((long, "serve", "m"), python),
             ((other, "serve", "m"), None), ((gone, "serve", "m"), None), (("no-such/vllm", "serve", "m"), None),
             ((python, "-m", "sglang.launch_server"), python), ((python, "engine.py", "--engine", "vllm"), None),
             (("env", "A=1", python, "-I", "-m", "sglang.launch_server"), python),
             (("no-such-python3", "-m", "sglang.launch_server"), None)]
    assert [program.interpreter(argv, path) for argv, _ in table] == [wanted for _, wanted in table]


def test_what_the_engines_python_says(vllm: Path, tmp_path: Path) -> None:
    facts = program.read(found(vllm, tmp_path), ENVIRONMENT)
    assert (facts.release, facts.package, facts.transformers) == ("0.32.0", vllm / "vllm", vllm / "transformers")
    assert [item.status for item in program.items(facts, make_spec())] == ["pass"]


def test_an_engine_that_is_not_in_its_python(tmp_path: Path) -> None:
    facts = program.read(found(tmp_path / "empty", tmp_path), ENVIRONMENT)
    (item,) = program.items(facts, make_spec())
    assert (item.status, item.cause) == ("fail", "engine-binary-missing")
    assert f"{sys.executable} has no package vllm" in item.sentence


@pytest.mark.parametrize(("site", "why"), [("import time\ntime.sleep(60)", "no answer within"),
                                           ("import os\nos._exit(3)", "exit code 3"),
                                           ("print('{')", "did not say what it has")])
def test_a_python_that_does_not_answer_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str, why: str) -> None:
    monkeypatch.setattr(program, "PROBE_SECONDS", 1.0)
    write(tmp_path / "site", {"sitecustomize.py": site})
    facts = program.read(found(tmp_path / "site", tmp_path), ENVIRONMENT)
    assert facts.package is None and why in facts.why
    assert [item.status for item in program.items(facts, make_spec())] == ["unknown"]
    assert judged(facts, LLAMA)[0] == "unknown"
    unasked = flags.read(facts, make_spec(), {}, True, True)
    assert [item.status for item in flags.items(unasked, facts, make_spec())] == ["unknown"]


def test_a_python_that_does_not_answer_is_ended_with_all_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PROBE_SECONDS", 2.0)
    site = "import subprocess, time\nchild = subprocess.Popen(['sleep', '300'])\n" \
           f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(300)"
    write(tmp_path / "site", {"sitecustomize.py": site})
    program.read(found(tmp_path / "site", tmp_path), ENVIRONMENT)
    wait_until(gone([int((tmp_path / "pid").read_text())]), 5)


def test_the_engines_python_gets_nothing_of_ours(vllm: Path, tmp_path: Path) -> None:
    spec = found(vllm, tmp_path, env={"A": "1"})
    assert program.engine_environment(spec, {"TIGHTRANK_TOKEN": "s", "A": "0", "B": "2"}) == {
        "PYTHONPATH": str(vllm), "A": "1", "B": "2"}


# --- architecture -----------------------------------------------------------------------------------------------------


def judged(facts: ProgramFacts, model: Mapping[str, Any], *args: str, engine: str = "vllm",
           env: Mapping[str, str] | None = None) -> tuple[str, str]:
    spec = make_spec(args, engine=engine)
    (item,) = architecture.items(architecture.read(facts, spec, model, env or {}), model, spec)
    return item.status, item.text


def facts_of(vllm: Path, **more: Any) -> ProgramFacts:
    return ProgramFacts(vllm / "vllm", "0.32.0", sys.executable, vllm / "transformers", **more)


@pytest.mark.parametrize(("model", "status", "said"), [
    (LLAMA, "pass", "LlamaForCausalLM is one of 1 that vllm 0.32.0 knows"),
    ({"architectures": ["Unheard", "LlamaForCausalLM"]}, "pass", "LlamaForCausalLM"),
    ({"architectures": ["LamaForCausalLM"]}, "fail", "the nearest is LlamaForCausalLM"),
    ({"architectures": ["OldForCausalLM"]}, "fail", "OldForCausalLM is none of 1"),
    ({"architectures": ["OddForCausalLM"], "model_type": "odd"}, "warn", "Transformers has it"),
    ({"architectures": ["OddForCausalLM"], "model_type": "../odd"}, "fail", "none of 1"),
    ({"architectures": ["MineForCausalLM"], "auto_map": {"AutoModel": "x"}}, "unknown", "code of its own"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "unknown", "by another name"),
    ({}, "unknown", "names no architectures"), ({"architectures": "Llama"}, "unknown", "names no architectures"),
    ({"architectures": [1, None]}, "unknown", "names no architectures")])
def test_architectures_of_vllm(vllm: Path, model: dict[str, Any], status: str, said: str) -> None:
    got, text = judged(facts_of(vllm), model)
    assert got == status and said in text, text


def test_what_else_may_bring_an_architecture_makes_it_unknown(vllm: Path) -> None:
    mine = {"architectures": ["MineForCausalLM"]}
    assert judged(facts_of(vllm, plugins=("mine (their-package)",)), mine)[0] == "unknown"
    assert judged(facts_of(vllm), mine, "--model-impl", "transformers")[0] == "unknown"
    assert judged(facts_of(vllm), mine)[0] == "fail"


def test_a_registry_that_is_elsewhere_or_garbage_is_unknown(vllm: Path) -> None:
    registry = vllm / "vllm" / "model_executor" / "models" / "registry.py"
    registry.write_text("_TEXT_GENERATION_MODELS = {")
    assert judged(facts_of(vllm), LLAMA) == ("unknown", "the registry of vllm 0.32.0 is not where it is known to be")
    registry.unlink()
    assert "cannot be read" in judged(facts_of(vllm), LLAMA)[1]
    assert judged(ProgramFacts(vllm / "vllm", "0.1.6"), LLAMA, engine="atom")[0] == "unknown"


def test_architectures_of_sglang(tmp_path: Path) -> None:
    write(tmp_path / "sglang", {
        "srt/models/llama.py": "class A: pass\nEntryClass = [\n    LlamaForCausalLM,  # the first\n    Phi3ForCausalLM,\n]\n",
        "srt/models/qwen.py": "EntryClass = QwenForCausalLM\n",
        "srt/models/typed.py": "EntryClass: list = [TypedForCausalLM]\n", "srt/models/registry.py": "EntryClasses = None\n"})
    facts = ProgramFacts(tmp_path / "sglang", "0.5.23")
    assert architecture.known("sglang", tmp_path / "sglang") == {
        "LlamaForCausalLM", "Phi3ForCausalLM", "QwenForCausalLM", "TypedForCausalLM"}
    assert judged(facts, LLAMA, engine="sglang")[0] == "pass"
    mine = {"architectures": ["MineForCausalLM"]}
    assert judged(facts, mine, engine="sglang")[0] == "fail"
    assert judged(facts, mine, engine="sglang", env={"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"})[0] == "unknown"


# --- quantization -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "args", "capability", "status", "said"), [
    ({}, (), None, None, ""), ({"quantization_config": {"quant_method": "fp8"}}, (), None, "pass", "knows fp8, from compute"),
    ({"quantization_config": {"quant_method": "fp8"}}, (), (7, 5), "fail", "fp8 needs compute capability 8.9"),
    ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, (), (8, 9), "pass", ""),
    ({}, ("--quantization", "compressed_tensors"), (1, 0), "pass", "knows compressed_tensors"),
    ({}, ("-q", "gguf"), None, "pass", ""),
    ({}, ("--quantization", "pf8"), None, "fail", "does not know the quantization pf8")])
def test_quantizations(tmp_path: Path, model: dict[str, Any], args: tuple[str, ...], capability: tuple[int, int] | None,
                       status: str | None, said: str) -> None:
    folder = "vllm/model_executor/layers/quantization/"
    write(tmp_path, {
        folder + "__init__.py": "M = ['gguf']\ndef get():\n    t: dict = {'fp8': Fp8, 'compressed-tensors': Tensors, **{}}\n",
        folder + "fp8.py": "class Fp8(Base):\n    @classmethod\n    def get_min_capability(cls) -> int:\n        return 89\n",
        folder + "x/tensors.py": "class Tensors(Base):\n    def get_min_capability(cls):\n        if npu(): return 0\n"
                                 "        return 80\n"})
    known = ProgramFacts(tmp_path / "vllm", "0.32.0")
    spec = make_spec(args)
    facts = quantization.read(known, spec, model)
    found = list(quantization.items(facts, known, spec, model, capability))
    assert [item.status for item in found] == ([status] if status else [])
    assert all(said in item.text for item in found)


def test_a_quantization_of_which_nothing_can_be_told(tmp_path: Path) -> None:
    spec = make_spec(("--quantization", "fp8"))
    for known in (ProgramFacts(tmp_path / "vllm", "0.32.0"), ProgramFacts(why="no answer")):
        (item,) = quantization.items(quantization.read(known, spec, {}), known, spec, {}, None)
        assert item.status == "unknown"


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "odd"), [
    (("--max-model-len", "1", "--host", "x", "--enforce_eager"), []),
    (("--max-model", "1", "--no-enforce-eager", "--compilation-config.mode", "3", "-cc", "3", "-tp", "2"), []),
    (("--max-modle-len=1", "--shm", "1"), ["--max-modle-len", "--shm"])])
def test_flags_by_the_sources(vllm: Path, tmp_path: Path, args: tuple[str, ...], odd: list[str]) -> None:
    spec = found(vllm, tmp_path, args)
    facts = flags.read(program.read(spec, ENVIRONMENT), spec, ENVIRONMENT, thorough=False, may_ask=True)
    assert flags.strange(facts.may_be, spec) == odd
    assert facts.asked == bool(odd), "the parser is asked only where something is odd"


def test_the_engines_own_parser_decides(vllm: Path, tmp_path: Path) -> None:
    spec = found(vllm, tmp_path, ("--max-modle-len", "1", "--api-key", "s3cret-s3cret"))
    known = program.read(spec, ENVIRONMENT)
    (item,) = flags.items(flags.read(known, spec, ENVIRONMENT, thorough=False, may_ask=True), known, spec)
    assert (item.status, item.cause) == ("fail", "arguments-invalid")
    assert "unrecognized arguments: --max-modle-len" in item.sentence and item.change == "did you mean --max-model-len?"
    good = found(vllm, tmp_path, ("--max-model-len", "1"))
    (item,) = flags.items(flags.read(known, good, ENVIRONMENT, thorough=True, may_ask=True), known, good)
    assert item.status == "pass" and "the parser of vllm 0.32.0 takes the command line" in item.sentence


def test_a_secret_in_the_parsers_answer_is_masked(vllm: Path, tmp_path: Path) -> None:
    spec = found(vllm, tmp_path, ("--api-key=s3cret-s3cret", "--hf-token", "t0ken-t0ken"))
    facts = FlagFacts(frozenset({"--api-key"}), True, "unrecognized arguments: s3cret-s3cret t0ken-t0ken")
    (item,) = flags.items(facts, ProgramFacts(), spec)
    assert "s3cret" not in item.text and "t0ken" not in item.text and "***" in item.text


@pytest.mark.parametrize("text", ["raise ImportError('no torch here')", "import time\ntime.sleep(60)",
                                  "import os\nos._exit(0)"])
def test_a_parser_that_does_not_answer_only_warns(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  text: str) -> None:
    monkeypatch.setattr(flags, "ODD_SECONDS", 1.0)
    (vllm / "vllm" / "__init__.py").write_text(text)
    spec = found(vllm, tmp_path, ("--max-modle-len", "1"))
    known = program.read(spec, ENVIRONMENT)
    (item,) = flags.items(flags.read(known, spec, ENVIRONMENT, thorough=False, may_ask=True), known, spec)
    assert item.status == "warn" and "did you mean --max-model-len?" in item.text and "did not answer" in item.text


def test_without_memory_for_it_the_parser_is_not_asked(vllm: Path, tmp_path: Path) -> None:
    spec = found(vllm, tmp_path, ("--max-modle-len", "1"))
    known = program.read(spec, ENVIRONMENT)
    (item,) = flags.items(flags.read(known, spec, ENVIRONMENT, thorough=True, may_ask=False), known, spec)
    assert item.status == "warn" and "too little memory" in item.text


def test_sources_that_are_elsewhere_are_unknown(tmp_path: Path) -> None:
    write(tmp_path, {"vllm/engine/arg_utils.py": "("})
    known = ProgramFacts(tmp_path / "vllm", "9.9", sys.executable)
    (item,) = flags.items(flags.read(known, make_spec(), {}, True, True), known, make_spec())
    assert item.status == "unknown" and "9.9" in item.sentence
