"""Draws charts as SVG with matplotlib."""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

from tokenmerge.errors import MissingExtraError
from tokenmerge.measure.reporting.curves import Chart

# Colours that the colour-blind can tell apart (Okabe and Ito), and markers for print without colour.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MARKERS = "osD^vPX"
_GREY = "#767676"
_DASHED = {"oracle": "--", "fewer-steps": ":"}
_RATIO = re.compile(r" ratio=[\d.]+")
_STYLE: Any = {
    "svg.hashsalt": "tokenmerge",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
}
_SIZE = (5.2, 4.4)
_TITLE_WIDTH = 60
_ROOM = 0.08
# Methods that have the same colour in every chart.
_FIXED = {"tome": 0, "tomesd": 1}


def draw(chart: Chart) -> str:
    """Draw a chart as an SVG document. Equal charts give equal bytes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plots", needed_by="the plots of tokenmerge report") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        _fill(axes, chart)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _fill(axes: Any, chart: Chart) -> None:
    colours = _colours(chart)
    for number, line in enumerate(chart.lines):
        axes.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            label=_plain(line.name),
            color=colours[line.name],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle=next((style for start, style in _DASHED.items() if line.name.startswith(start)), "-"),
            markersize=4.5,
        )
        for (x, y), label in zip(line.points, line.labels, strict=False):
            axes.annotate(label, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    if chart.level is not None:
        name, y = chart.level
        axes.axhline(y, color="black", linewidth=1, label=_plain(name))
    axes.set_title(_plain(textwrap.fill(chart.title, _TITLE_WIDTH)), loc="left")
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.margins(x=_ROOM, y=_ROOM)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=2)


def _colours(chart: Chart) -> dict[str, str]:
    """One colour for each method, and grey for the oracle and fewer steps."""
    families: dict[str, str] = {}
    free = (colour for number, colour in enumerate(_COLOURS) if number not in _FIXED.values())
    found = {}
    for line in chart.lines:
        family = _RATIO.sub("", line.name)
        if family not in families:
            bound = family.startswith(tuple(_DASHED))
            fixed = _COLOURS[_FIXED[family]] if family in _FIXED else None
            families[family] = _GREY if bound else fixed or next(free, _GREY)
        found[line.name] = families[family]
    return found


def _plain(text: str) -> str:
    """Escape text so that matplotlib does not read it as a formula."""
    return text.replace("$", r"\$")
