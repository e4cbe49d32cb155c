"""The memory plan as a picture: chunk over prefix, and the memory of each rank. Needs the extra `plots`, imported late.

matplotlib and not SVG by hand: a PNG is wanted too, and axes, legends and text sizes would be ours to keep.
"""
from __future__ import annotations

import importlib
import io
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightrank.errors import ConfigError
from tightrank.plan.terms import MemoryPlan, RankPlan

GIB = 2**30
KINDS = (".svg", ".png")
_PANEL_INCHES, _DOTS, _TITLE_LETTERS = (6.4, 4.2), 130, 84
# Okabe and Ito's, which the colour-blind tell apart; what a thing is has the same colour in every picture.
_COLOURS = {"weights": "#0072B2", "KV pool": "#56B4E9", "peak of a chunk": "#D55E00", "process": "#999999",
            "server of rank 0": "#CC79A7", "device context": "#BBBBBB", "communicator": "#E69F00", "graphs": "#F0E442",
            "guard": "#000000", "to spare": "#FFFFFF"}
_OTHER_COLOUR = "#009E73"
_SAID = {"maximum": "the maximum", "line": "the line", "memory": "memory", "minimum": "the minimum"}
_BY = {"maximum": "#0072B2", "line": "#E69F00", "memory": "#D55E00", "minimum": "#999999"}


def check(path: Path) -> None:
    """Raises ConfigError for what cannot be made, before any work is done."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--picture {path}: must end in {' or '.join(KINDS)}")
    _figure_module(path)


def _figure_module(path: Path) -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(f"--picture {path}: matplotlib is not installed; pip install 'tightrank[plots]'") from None


def write(path: Path, plans: Sequence[MemoryPlan], titles: Sequence[str]) -> None:
    """One row for each plan: left its chunks, right its ranks. Written whole or not at all. Raises ConfigError."""
    image = draw(path, plans, titles)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(image)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"--picture {path}: cannot be written ({error.strerror}); name another file") from None


def draw(path: Path, plans: Sequence[MemoryPlan], titles: Sequence[str]) -> bytes:
    """The file's content, of the kind that its name ends in."""
    width, height = _PANEL_INCHES
    figure = _figure_module(path).Figure(figsize=(2 * width, height * len(plans)), layout="constrained")
    panels = figure.subplots(len(plans), 2, squeeze=False)
    for (left, right), plan, title in zip(panels, plans, titles, strict=True):
        _chunks(left, plan, title)
        _ranks(right, plan)
    found = io.BytesIO()
    figure.savefig(found, format=path.suffix[1:], dpi=_DOTS)
    return found.getvalue()


def _chunks(axes: Any, plan: MemoryPlan, title: str) -> None:
    """A step for each band, in the colour of what keeps it there."""
    labelled: set[str] = set()
    for band in plan.bands:
        axes.fill_between([band.from_tokens, band.to_tokens + 1], band.chunk_tokens, color=_BY[band.by], alpha=0.85,
                          linewidth=0, label=f"bound by {_SAID[band.by]}" if band.by not in labelled else None)
        labelled.add(band.by)
    axes.set_title(f"{title}: largest chunk", loc="left", fontsize=10)
    axes.set_xlabel("prefix (thousand tokens)")
    axes.set_ylabel("new tokens")
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:,.0f}")
    axes.yaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes.set_xlim(0, plan.bands[-1].to_tokens + 1)
    axes.set_ylim(0, 1.15 * max(band.chunk_tokens for band in plan.bands) or 1)
    axes.legend(fontsize=8, loc="upper right")
    _quiet(axes)


def _ranks(axes: Any, plan: MemoryPlan) -> None:
    """A stack for each rank; the stroke on top is its memory."""
    axes.set_title(textwrap.fill(f"memory of each rank; binds: {plan.binds}", _TITLE_LETTERS), loc="left", fontsize=10)
    if not plan.ranks:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    places = range(len(plan.ranks))
    below = [0.0] * len(plan.ranks)
    for name in _parts(plan.ranks):
        sizes = [_size(rank, name) / GIB for rank in plan.ranks]
        axes.bar(places, sizes, 0.6, bottom=below, label=name, color=_COLOURS.get(name, _OTHER_COLOUR), edgecolor="#444444",
                 linewidth=0.5, hatch="//" if name == "guard" else None, alpha=0.35 if name == "guard" else 1)
        below = [start + size for start, size in zip(below, sizes, strict=True)]
    axes.hlines([rank.memory.value / GIB for rank in plan.ranks], [place - 0.36 for place in places],
                [place + 0.36 for place in places], colors="#B00000", linewidth=2, label="memory")
    names = [f"rank {rank.rank}" + ("\ntightest" if plan.is_tightest(rank) else "") for rank in plan.ranks]
    axes.set_xticks(places, names, fontsize=8, rotation=0 if len(plan.ranks) <= 8 else 90)
    beside = 0.7 + max(0.0, (3 - len(plan.ranks)) / 2)           # one bar alone would fill the panel
    axes.set_xlim(-beside, len(plan.ranks) - 1 + beside)
    axes.set_ylabel("GiB")
    axes.set_ylim(0, 1.08 * max(*below, *(rank.memory.value / GIB for rank in plan.ranks)))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _quiet(axes)


def _parts(ranks: Sequence[RankPlan]) -> list[str]:
    """From the bottom to the top."""
    held = list(dict.fromkeys(term.name for rank in ranks for term in rank.rest))
    return [*held, "peak of a chunk", *(["guard"] if any(rank.guard.value for rank in ranks) else []), "to spare"]


def _size(rank: RankPlan, name: str) -> float:
    if name in ("peak of a chunk", "guard", "to spare"):
        return max({"peak of a chunk": rank.peak, "guard": rank.guard, "to spare": rank.spare}[name].value, 0)
    return rank.bytes_of(name)


def _quiet(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
