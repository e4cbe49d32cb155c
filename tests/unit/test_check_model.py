"""The preflight of the model's directory: what is whole, cut off, missing, empty, a pointer, garbage. Headers are real."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preflight import item_of, make_spec, write_safetensors
from tightrank.check import model
from tightrank.plan import safetensors

Change = Callable[[Path], object]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two whole shards with their index, and a tokenizer."""
    for name, tensor in zip(SHARDS, ("a.weight", "b.weight"), strict=True):
        write_safetensors(tmp_path / name, {tensor: ("BF16", [4, 8])})
    (tmp_path / model.INDEX).write_text(json.dumps({"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def look(directory: Path, *args: str, surely: bool = True, engine: str = "vllm") -> dict[str, tuple[str, str | None, str]]:
    return {found.item: (found.status, found.cause, found.text)
            for found in model.items(model.read(directory), make_spec(args, engine=engine), surely)}


def test_a_whole_model(directory: Path) -> None:
    status, _, text = look(directory)["model weights"]
    assert status == "pass" and "2 tensors" in text
    assert look(directory)["tokenizer"][0] == "pass"
    assert model.read(directory).total_bytes == 2 * 4 * 8 * 2


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: (d / SHARDS[1]).unlink(), f"lacks {SHARDS[1]}"),
    (lambda d: ((d / SHARDS[1]).unlink(), (d / SHARDS[1]).symlink_to("/nowhere")), f"lacks {SHARDS[1]}"),
    (lambda d: ((d / SHARDS[1]).unlink(), (d / model.INDEX).unlink()), f"lacks {SHARDS[1]}"),
    (lambda d: cut(d / SHARDS[0]), f"{SHARDS[0]} is cut off: "),
    (lambda d: os.truncate(d / SHARDS[0], 20), "cut off in its header (20 bytes"),
    (lambda d: os.truncate(d / SHARDS[0], 3), "cut off in its header (3 bytes"),
    (lambda d: os.truncate(d / SHARDS[0], 0), f"{SHARDS[0]} is empty (0 bytes)"),
    (lambda d: (d / SHARDS[0]).write_bytes((d / SHARDS[0]).read_bytes() + b"x"), "does not end where its header says"),
    (lambda d: (d / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
     "git-lfs pointer of 63 bytes"),
    (lambda d: (d / SHARDS[0]).write_bytes(b"\x02\0\0\0\0\0\0\0[]"), "has a header that holds no object"),
    (lambda d: (d / SHARDS[0]).write_bytes(b"\x02\0\0\0\0\0\0\0{x"), "has a header that cannot be read"),
    (lambda d: (d / SHARDS[0]).write_bytes(b'\x07\0\0\0\0\0\0\0{"a":1}'), "has a header that cannot be read"),
    (lambda d: (d / model.INDEX).write_text("[]"), f"{model.INDEX} cannot be understood"),
    (lambda d: (d / model.INDEX).write_text('{"weight_map": {"a": "../../etc/passwd"}}'), "cannot be understood"),
    (lambda d: [each.unlink() for each in d.glob("model*")], "has no weights (*.safetensors)"),
    (lambda d: ([each.unlink() for each in d.glob("model*")], (d / "pytorch_model.bin").touch()), "pytorch_model.bin is empty"),
])
def test_weights_that_cannot_be_loaded(directory: Path, change: Change, said: str) -> None:
    change(directory)
    status, cause, text = look(directory)["model weights"]
    assert (status, cause) == ("fail", "model-unreadable") and said in text and "hf download" in text


def test_an_index_that_names_more_than_the_files_have_is_no_failure(directory: Path) -> None:
    """Tied weights are written so: the engine takes the index for the names of files alone."""
    (directory / SHARDS[0]).write_bytes((directory / SHARDS[1]).read_bytes())
    status, _, text = look(directory)["model weights"]
    assert status == "warn" and "names 1 tensors that no file has (a.weight)" in text


def test_what_another_program_reads_is_its_own_affair(directory: Path) -> None:
    for path in (*directory.glob("model*"), directory / "tokenizer.json"):
        path.unlink()
    found = look(directory, surely=False)
    assert found["model weights"][0] == found["tokenizer"][0] == "warn"


@pytest.mark.parametrize(("change", "args", "status"), [
    (lambda d: [each.unlink() for each in d.glob("model*")], ("--load-format", "dummy"), "unknown"),
    (lambda d: ([each.unlink() for each in d.glob("model*")], (d / "model.gguf").write_text("GGUF")), (), "unknown"),
    (lambda d: write_safetensors(d / "consolidated.safetensors", {"x": ("BF16", [1])}), (), "pass"),
    (lambda d: [each.rename(d / "closed") for each in d.glob("model*")], (), "fail")])
def test_weights_of_other_kinds(directory: Path, change: Change, args: tuple[str, ...], status: str) -> None:
    change(directory)
    assert look(directory, *args)["model weights"][0] == status


def test_mistrals_own_format_counts_where_there_is_no_other(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "consolidated.safetensors", {"x": ("BF16", [8])})
    assert model.read(tmp_path).total_bytes == 16


@pytest.mark.parametrize(("change", "args", "status"), [
    (lambda d: (d / "tokenizer.json").unlink(), (), "fail"),
    (lambda d: os.truncate(d / "tokenizer.json", 0), (), "fail"),
    (lambda d: (d / "tokenizer.json").rename(d / "tekken.json"), (), "pass"),
    (lambda d: (d / "tokenizer.json").rename(d / "tokenization_mine.py"), (), "unknown"),
    (lambda d: (d / "tokenizer.json").unlink(), ("--tokenizer", "/elsewhere"), "pass"),
    (lambda d: (d / "tokenizer.json").unlink(), ("--skip-tokenizer-init",), "pass")])
def test_the_tokenizer(directory: Path, change: Change, args: tuple[str, ...], status: str) -> None:
    change(directory)
    assert look(directory, *args)["tokenizer"][0] == status


def test_a_directory_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    found = look(tmp_path / "nothing")
    assert {status for status, _, _ in found.values()} == {"unknown"} and "cannot be read" in found["tokenizer"][2]


def test_a_file_that_cannot_be_opened_is_named(directory: Path) -> None:
    (directory / SHARDS[0]).unlink()
    (directory / SHARDS[0]).mkdir()
    assert f"{SHARDS[0]} cannot be read (Is a directory)" in look(directory)["model weights"][2]


@given(st.binary(max_size=200))
def test_garbage_is_broken_and_never_raises_otherwise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "x.safetensors"
    for text in (data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(text)
        try:
            safetensors.read(path)
        except safetensors.Broken:
            pass


@given(st.dictionaries(st.text(max_size=4), st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner:
       st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=3))))
def test_headers_of_garbage(tmp_path_factory: pytest.TempPathFactory, header: dict[str, object]) -> None:
    path = tmp_path_factory.mktemp("garbage") / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        safetensors.read(path)
    except safetensors.Broken:
        pass


def test_the_name_of_the_flag_is_the_engines(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    assert "--tokenizer-path" in look(directory, engine="sglang")["tokenizer"][2]
    assert item_of("tokenizer", model.items(model.read(directory), make_spec(), True)).change.endswith("--tokenizer")
