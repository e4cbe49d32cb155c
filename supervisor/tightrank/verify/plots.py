"""Three small plots as SVG text: rate and chunk over the prefix, memory over time. A report needs no library for them."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10
from xml.sax.saxutils import escape

from tightrank.verify.ramp import Chunk, Ramp, Size, short

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 64, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")   # Okabe-Ito: told apart by all
MOST_POINTS = 400              # a line of more is no finer on the screen
RATE_POINTS = 48               # ... and rates of single chunks are noise


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot with its name in the legend. `dashed`: a limit, not a measurement."""
    name: str
    points: Points
    dashed: bool = False


def rate_plot(ramp: Ramp) -> str:
    """The end of a prompt is short and says little, here and below."""
    lines = [Line(short(size.tokens), _rates(size.chunks[:-1] or size.chunks)) for size in ramp.sizes]
    return plot("Prefill rate over the prefix", "prefix, tokens", "tokens a second", lines)


def chunk_plot(ramp: Ramp) -> str:
    lines = [Line(short(size.tokens), _stairs(size.chunks[:-1])) for size in ramp.sizes]
    return plot("Chunk over the prefix", "prefix, tokens", "new tokens of a step", lines)


def memory_plot(ramp: Ramp) -> str:
    """All sizes behind each other; the time between them is left out."""
    lines, start = [], 0.0
    for size in ramp.sizes:
        lines.append(Line(short(size.tokens), _memory(size, start)))
        start += size.seconds
    limits = (("at least", ramp.floor_bytes), ("guard", ramp.guard_floor_bytes))
    lines += [Line(f"{name} {limit / 2**30:.2f}", _level(limit, start), dashed=True) for name, limit in limits]
    return plot("Available memory of the host", "seconds", "GiB", lines)


def _level(limit_bytes: int, end: float) -> Points:
    return [(0.0, limit_bytes / 2**30), (end or 1.0, limit_bytes / 2**30)]


def _memory(size: Size, start: float) -> Points:
    return [(start + at, free / 2**30) for at, free in size.memory]


def _rates(chunks: Sequence[Chunk]) -> Points:
    """Of runs of neighbours that share the prompt evenly."""
    if not chunks:
        return []
    span = max(1, (chunks[-1].prefix + chunks[-1].tokens) // RATE_POINTS)
    runs: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        runs.setdefault(chunk.prefix // span, []).append(chunk)
    return [(run[0].prefix, sum(each.tokens for each in run) / seconds) for run in runs.values()
            if (seconds := sum(each.seconds for each in run)) > 0]


def _stairs(chunks: Sequence[Chunk]) -> Points:
    """A step at each change."""
    runs = [list(run) for _, run in groupby(chunks, key=lambda chunk: chunk.tokens)]
    return [point for run in runs
            for point in ((run[0].prefix, run[0].tokens), (run[-1].prefix + run[-1].tokens, run[0].tokens))]


# --- drawing ----------------------------------------------------------------------------------------------------------

def plot(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """An SVG of `lines` from 0 to their largest values. Lines without points are left out; none at all: it says so."""
    shown = [line for line in lines if line.points]
    scale = _Scale(max((x for line in shown for x, _ in line.points), default=1.0) or 1.0,
                   max((y for line in shown for _, y in line.points), default=1.0) * 1.05 or 1.0)
    body = [f'<text x="{LEFT}" y="22" font-size="16" font-weight="bold">{escape(title)}</text>',
            *_grid(scale), *_names(x_name, y_name)]
    if not any(not line.dashed for line in shown):
        body.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">nothing was measured</text>')
    left = float(LEFT)
    for index, line in enumerate(shown):
        colour = "#666666" if line.dashed else COLOURS[index % len(COLOURS)]
        body += [_path(line, colour, scale), *_entry(line, colour, left)]
        left += 46 + 7.5 * len(line.name)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join(body) + "\n</svg>\n")


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values (0 to `most_x`, 0 to `most_y`) to the picture's own units."""
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most_x

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.most_y


def ticks(most: float, about: int = 6) -> list[float]:
    """From 0 up to `most`, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** floor(log10(most / about))
    step = next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= about)
    return [step * number for number in range(int(most / step) + 1)]


def _label(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def _grid(scale: _Scale) -> Iterator[str]:
    for value in ticks(scale.most_y):
        y = scale.y(value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_label(value)}</text>'
    for value in ticks(scale.most_x):
        x = scale.x(value)
        yield f'<line x1="{x:.1f}" y1="{HEIGHT - BOTTOM}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM + 5}" stroke="black"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{_label(value)}</text>'
    yield f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="black"/>'


def _names(x_name: str, y_name: str) -> Iterator[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>'
    yield f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">{escape(y_name)}</text>'


def _path(line: Line, colour: str, scale: _Scale) -> str:
    points = _thinned(line.points)
    data = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    if len(points) == 1:
        x, _, y = data.partition(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
    return f'<polyline points="{data}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'


def _thinned(points: Points) -> Points:
    """At most about MOST_POINTS, of each run of neighbours the lowest: it is what a limit is held against."""
    size = -(-len(points) // MOST_POINTS)
    return [min(points[start:start + size], key=lambda point: point[1]) for start in range(0, len(points), size)]


def _entry(line: Line, colour: str, left: float) -> Iterator[str]:
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    yield f'<line x1="{left}" y1="42" x2="{left + 22}" y2="42" stroke="{colour}" stroke-width="3"{dash}/>'
    yield f'<text x="{left + 28}" y="46">{escape(line.name)}</text>'
