"""Draws charts as SVG with matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from tokenmerge.errors import MissingExtraError
from tokenmerge_tools.reporting.curves import Chart

# Colours that the colour-blind can tell apart (Okabe and Ito, then Tol), and markers for print in black.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"),
    *("#882255", "#999933", "#332288", "#44aa99", "#aa4499", "#661100"),
)
_MARKERS = "osD^vPX"
_FEWER_STEPS = "fewer-steps"
_NORMAL = 9.5  # points
_STYLE: Any = {
    "svg.hashsalt": "tokenmerge",
    "svg.fonttype": "none",  # text is not turned into paths, so that it is small and searchable
    "font.size": _NORMAL,
    "axes.titlesize": _NORMAL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
}
# The width and the height in inches. The title and the legend add the height that they need.
_WIDTH = 6.4
_HEIGHT = 3.5
_POINTS_PER_INCH = 72
# Characters per line.
_TITLE_WIDTH = 75
_NAME_WIDTH = 36
_ROOM = 0.08  # between the points and the axes, as a fraction of an axis
_SMALL = 8.0  # points
_LINE_HEIGHT = 1.45 * _SMALL / _POINTS_PER_INCH
_CHARACTER_WIDTH = 0.65  # as a fraction of the font size; most characters are narrower
_BEFORE_NAME = 5  # characters that the sample line before a name in the legend takes
_MOST_COLUMNS = 4
_MARKER_SIZE = 4.5  # points
# Places of a label beside its data point: offsets in points, and alignments. The first free place is taken.
_PLACES = (
    *((4, 4, "left", "bottom"), (4, -4, "left", "top"), (-4, 4, "right", "bottom"), (-4, -4, "right", "top")),
    *(
        (0, 6, "center", "bottom"),
        (0, -6, "center", "top"),
        (7, 0, "left", "center"),
        (-7, 0, "right", "center"),
    ),
)
# Lines that have the same colour in every chart.
_FIXED = {"tome": COLOURS[0], "tomesd": COLOURS[1], _FEWER_STEPS: "#767676"}


def draw(chart: Chart) -> str:
    """Draw a chart as an SVG document. Equal charts give equal bytes."""
    try:
        import matplotlib
    except ImportError as error:
        needed_by = "the plots of tokenmerge report: they need matplotlib"
        raise MissingExtraError("tokenmerge-tools[plots]", needed_by) from error
    with matplotlib.rc_context(_STYLE):
        text = io.StringIO()
        figure_of(chart).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def figure_of(chart: Chart) -> Any:
    """Draw a chart as a matplotlib figure, with room for its title and legend."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [line.name for line in chart.lines] + ([] if chart.level is None else [chart.level[0]])
    columns = _legend_columns(names)
    title = textwrap.wrap(chart.title, _TITLE_WIDTH)
    wrapped = sum(_in_legend(name).count("\n") for name in names)
    lines = len(title) + -(-len(names) // columns) + wrapped + 1
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT + lines * _LINE_HEIGHT), layout="constrained")
        axes = figure.subplots()
        _fill(axes, chart)
        axes.set_title(_plain("\n".join(title)), loc="left")
        figure.legend(loc="outside lower left", frameon=False, fontsize=_SMALL, ncols=columns)
        figure.draw_without_rendering()  # this fixes the positions of all points
        figure.set_layout_engine("none")
        _label_points(axes, chart)
    return figure


def _legend_columns(names: Sequence[str]) -> int:
    longest = max((min(len(name), _NAME_WIDTH) for name in names), default=1)
    column = _CHARACTER_WIDTH * _SMALL * (longest + _BEFORE_NAME)
    return max(1, min(_MOST_COLUMNS, int(_WIDTH * _POINTS_PER_INCH / column)))


def _in_legend(name: str) -> str:
    return _plain(textwrap.fill(name, _NAME_WIDTH))


def _fill(axes: Any, chart: Chart) -> None:
    colours = cycle(COLOURS[2:])
    for number, line in enumerate(chart.lines):
        axes.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            label=_in_legend(line.name),
            color=_FIXED.get(line.name) or next(colours),
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=":" if line.name == _FEWER_STEPS else "-",
            markersize=_MARKER_SIZE,
        )
    if chart.level is not None:
        name, y = chart.level
        axes.axhline(y, color="black", linewidth=1, label=_in_legend(name))
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.margins(x=_ROOM, y=_ROOM)


def _label_points(axes: Any, chart: Chart) -> None:
    """Label the points that have room beside them. No label covers another one or a point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    figure = axes.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    size = 3 * figure.dpi / _POINTS_PER_INCH  # half a marker, with some room
    taken = []
    for line in chart.lines:
        for x, y in map(axes.transData.transform, line.points):
            taken.append(Bbox.from_extents(x - size, y - size, x + size, y + size))
    for line in chart.lines:
        for point, label in zip(line.points, line.labels, strict=False):
            for dx, dy, horizontal, vertical in _PLACES if label else ():
                text = axes.annotate(
                    _plain(label),
                    point,
                    xytext=(dx, dy),
                    textcoords="offset points",
                    fontsize=_SMALL,
                    ha=horizontal,
                    va=vertical,
                )
                box = text.get_window_extent(renderer)
                page = figure.bbox
                inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
                if inside and not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    break
                text.remove()


def _plain(text: str) -> str:
    return text.replace("$", r"\$")
