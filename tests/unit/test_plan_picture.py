"""The memory plan as a picture: a real SVG and a real PNG with what is planned in it, written whole or not at all."""
from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from preflight import make_config, make_spec
from tightrank.cli import picture
from tightrank.errors import ConfigError
from tightrank.plan.budget import memory_plan
from tightrank.plan.case import Case
from tightrank.plan.terms import READ, Memory, MemoryPlan

GIB = 2**30
MODEL: dict[str, Any] = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
                         "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000,
                         "max_position_embeddings": 65536}


def planned(ranks: int, known: bool = True) -> MemoryPlan:
    memory = Memory((9 * GIB,) * ranks, tuple((8 + number) * GIB for number in range(ranks)), 1, READ, "test")
    return memory_plan(Case(make_config(), make_spec(tensor_parallel=ranks), MODEL, memory=memory if known else None))


def test_an_svg_has_every_part_of_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    picture.write(path, [planned(2), planned(1, known=False)], ["one", "other"])
    text = path.read_text()
    assert text.count("<svg") == 1 and text.rstrip().endswith("</svg>")
    for word in ("one: largest chunk", "other: largest chunk", "rank 0", "rank 1", "weights", "KV pool", "guard", "to spare",
                 "not known"):
        assert f"<!-- {word}" in text, word
    assert [file.name for file in tmp_path.iterdir()] == ["plan.svg"]


@pytest.mark.parametrize("ranks", [1, 16])
def test_a_png_is_one(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "plan.png"
    picture.write(path, [planned(ranks)], ["w0"])
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 400


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.svg.gz"])
def test_other_kinds_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.svg or \.png"):
        picture.check(Path(name))


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"matplotlib is not installed; pip install 'tightrank\[plots\]'"):
        picture.check(Path("plan.svg"))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plan.svg").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        picture.write(tmp_path / "plan.svg", [planned(1)], ["w0"])
    with pytest.raises(ConfigError, match="No such file"):
        picture.write(tmp_path / "none" / "plan.svg", [planned(1)], ["w0"])
    assert [file.name for file in tmp_path.iterdir()] == ["plan.svg"], "nothing half is left"
