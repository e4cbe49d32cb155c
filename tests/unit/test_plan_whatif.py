"""`tightrank plan`: of a model that is there or not, with `--what-if` and `--memory`, and what it refuses."""
from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tightrank
from preflight import make_config, write_safetensors
from tightrank import breaker, host, inputs, survey
from tightrank.calibration.store import Calibration
from tightrank.config import Config, load
from tightrank.engines import installed
from tightrank.errors import ConfigError
from tightrank.inputs import Inputs
from tightrank.plan import build, whatif
from tightrank.records import WorkerSpec

V41: dict[str, Any] = {
    "model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 512, "vocab_size": 1024, "compress_ratios": [1, 2, 4, 128],
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "sliding_window": 128, "intermediate_size": 4096,
    "max_position_embeddings": 1048576, "tie_word_embeddings": False}


def changed(*texts: str, config: Config | None = None) -> Config:
    return whatif.changed(config or make_config(), whatif.parse(texts))


def test_our_own_keys_go_the_way_of_set() -> None:
    found = whatif.parse(["max_chunk=4096", "guard=1GiB", "max_chunk=8192"])
    assert found.settings == ("line.maximum=8192", "guard.floor=1GiB") and found.dropped == ("chunk",)
    assert set(whatif.SETTINGS.values()) <= set(whatif.KEYS)


def test_sizes_and_flags_change_the_workers() -> None:
    config = make_config(engine="sglang")
    worker = replace(config.workers[0], devices=("0",), args=("--chunked-prefill-size", "512", "--x"))
    config = replace(config, workers=(worker,))
    found = changed("attn_cp_size=3", "tensor_parallel=3", "max_chunk=4096", config=config).workers[0]
    assert found.args == ("--x", "--attn-cp-size", "3") and found.tensor_parallel == 3 and found.devices == ()
    assert changed("kv_cache_dtype=fp8", config=config).workers[0].devices == ("0",)


def test_a_command_line_of_the_user_is_changed_too() -> None:
    command = ("vllm", "serve", "/m", "--max-num-batched-tokens=512")
    config = replace(make_config(), as_written=True, command=command)
    assert changed("max_chunk=4096", "dtype=float32", config=config).command == ("vllm", "serve", "/m", "--dtype", "float32")


@pytest.mark.parametrize(("text", "said"), [
    ("chunk=4", "--what-if chunk=4: unknown key 'chunk'; known are max_chunk, min_chunk, budget, context"),
    ("max_chunk", "--what-if max_chunk: must be KEY=VALUE"), ("=3", "unknown key ''"),
    ("max_chunk=many", "--what-if max_chunk=many: must be a whole number"), ("guard=1", "must be a number with one of"),
    ("tensor_parallel=0", "must be between 1 and 1024"), ("dtype=int3", "must be one of auto"), ("memory=lots", "must be"),
    ("attn_cp_size=3", "--what-if attn_cp_size=3: vllm has no --attn-cp-size; it is of sglang"),
    ("kv_cache_dtype=a b", "must be one word")])
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(V41))
    (tmp_path / "tightrank.yaml").write_text(
        "model: model\nengine: sglang\nstate_directory: state\nline: {context: 512000, granule: 256}\n"
        "workers: [{name: w0, tensor_parallel: 3, args: [--max-total-tokens, '600000', --mem-fraction-static, '0.9']}]\n")
    return tmp_path


def plan(directory: Path, *words: str) -> str:
    done = tightrank("plan", *words, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_that_is_not_there(deployment: Path) -> None:
    text = plan(deployment, "--memory", "13GiB+11GiB+11GiB", "--unified")
    assert "estimated from the shape in config.json: the files are not there" in text
    for word in ("binds:", "rank 0 ", "rank 1*", "server of rank 0", "KV tokens", "longest prompt", "pairs that memory allows"):
        assert word in text, text
    assert not (deployment / "state").exists()


def test_one_that_is_there_is_read(deployment: Path) -> None:
    write_safetensors(deployment / "model" / "model.safetensors", {"model.embed_tokens.weight": ("BF16", (1024, 1024)),
                                                                   "model.layers.0.mlp.up_proj.weight": ("BF16", (768, 1024))})
    memory = json.loads(plan(deployment, "--memory", "12GiB", "--json"))["workers"][0]["memory"]
    weights, = [term for term in memory["ranks"][0]["rest"] if term["name"] == "weights"]
    assert weights["value"] == (1024 + 768) * 1024 * 2 // 3 and weights["origin"] == "read"


def test_the_difference(deployment: Path) -> None:
    words = ["--memory", "8GiB", "--unified"]
    for change in ("max_chunk=4096", "attn_cp_size=3", "guard=1GiB"):
        words += ["--what-if", change]
    text = plan(deployment, *words)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "largest chunk 2,048 tokens 4,096 tokens +100.0%" in rows
    assert "rank 0, guard 2.00 GiB 1.50 GiB -25.0%" in rows, "floor and margin"
    assert "before" in text and "binds after:" in text and "chunks after:" in text
    both = json.loads(plan(deployment, *words, "--json"))
    before, after = both["workers"][0], both["what_if"]["workers"][0]
    assert (before["line"]["maximum"], after["line"]["maximum"]) == (2048, 4096)
    name = "pairs that memory allows"
    pairs = [next(term["value"] for term in each["memory"]["numbers"] if term["name"] == name) for each in (before, after)]
    assert pairs[1] > 3 * pairs[0], "three ranks share the rows, and the guard leaves more"


def test_more_memory_is_a_what_if_too(deployment: Path) -> None:
    text = plan(deployment, "--memory", "8GiB", "--what-if", "memory=16GiB")
    assert "rank 0, memory" in text and "+100.0%" in text


@pytest.mark.parametrize(("words", "said"), [
    (("--what-if", "chunks=1"), "unknown key 'chunks'; known are max_chunk"),
    (("--what-if", "max_chunk=100"), "line.maximum: line.maximum 100 is no multiple of the granule 256"),
    (("--memory", "much"), "--memory much: must be a size for each rank (80GiB), or 3 joined by +"),
    (("--memory", "1GiB+2GiB"), "--memory 1GiB+2GiB: must be a size for each rank (80GiB), or 3 joined by +")])
def test_bad_input_is_one_line(deployment: Path, words: tuple[str, ...], said: str) -> None:
    done = tightrank("plan", *words, cwd=deployment)
    assert done.returncode == 78 and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1


def specs_of(directory: Path) -> tuple[Config, Inputs, tuple[WorkerSpec, ...]]:
    config = load(directory / "tightrank.yaml", {}).config
    read = inputs.read(config, {"PATH": os.environ["PATH"]})
    return config, read, build(config, host.read(), read)


def test_what_was_measured_here_goes_before_what_is_assumed(deployment: Path) -> None:
    config, read, (spec,) = specs_of(deployment)
    (deployment / "state").mkdir()
    facts = breaker.facts(host.read(), installed.release(spec.argv, "sglang", os.environ["PATH"]))
    store = Calibration(deployment / "state" / "calibration.json", facts)
    store.keep(store.identity(spec, "another configuration"), {
        "0": {"pair_bytes": 2.0, "row_bytes": 30_000.0},
        "worker": {"row_seconds": 4e-4, "pair_seconds": 8e-11, "step_seconds": 0.2, "pace_samples": 99.0, "pace_tokens": 4e5}})
    case, = survey.cases(config, [spec], read, survey.read(config), None)
    assert (case.peak.free, case.peak.row_bytes) == (2.0, 30_000.0) and case.pace is not None
    text = plan(deployment, "--memory", "12GiB")
    assert "rows and pairs as measured; at its most" in text and "not known: the time" not in text
    rows = {line.split("  ")[0]: line for line in map(str.strip, text.splitlines()) if line.startswith("first token of")}
    assert "the pace of 99 steps" in rows["first token of 256,000"] and "extrapolated" in rows["first token of 500,000"]


def test_a_start_is_told_what_is_certain(deployment: Path) -> None:
    config, read, specs = specs_of(deployment)
    assert survey.expecting(config, specs, read)[0].predicted == {}, "estimated weights, and a pool of what is left"
    write_safetensors(deployment / "model" / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": ("BF16", (768, 1024))})
    assert survey.expecting(config, specs, read)[0].predicted == {"weights_bytes": 768 * 1024 * 2 // 3}


def test_a_config_that_says_nothing_is_planned_all_the_same(deployment: Path) -> None:
    (deployment / "model" / "config.json").write_text('{"model_type": "new", "max_position_embeddings": 1000000}')
    text = plan(deployment, "--memory", "8GiB")
    assert "not known: the weights" in text and "not known: KV: config.json does not say" in text
