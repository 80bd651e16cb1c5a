"""Draws what each step of a run did, as SVG with matplotlib."""

from __future__ import annotations

from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge.report import RunSteps
from tokenmerge_tools.reporting.plots import COLOURS, svg_of

_KINDS = dict(zip(("full", "reused", "dense"), COLOURS, strict=False))
_WIDTH, _HEIGHT = 6.4, 4.4  # inches


def draw_steps(steps: RunSteps) -> str:
    """Draw seconds, removed tokens and change of each step as an SVG document. Equal steps give equal bytes.

    Args:
        steps: the steps of a run, from :attr:`tokenmerge.Patch.steps`.
    """
    if not steps.rows:
        raise ConfigError("steps: there is no step to draw; generate first")
    return svg_of(lambda: figure_of_steps(steps), needed_by="the picture of the steps")


def figure_of_steps(steps: RunSteps) -> Any:
    """Draw a matplotlib figure with three charts in a column: seconds, removed tokens, change."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    seconds, tokens, change = figure.subplots(3, sharex=True)
    for kind, colour in _KINDS.items():
        rows = [row for row in steps if row.kind == kind]
        if rows:
            places = [row.step for row in rows]
            seconds.bar(places, [row.seconds for row in rows], color=colour, label=f"{len(rows)} {kind}")
            tokens.bar(places, [_removed(row.tokens, row.merged_tokens) for row in rows], color=colour)
    compared = [(row.step, 100 * row.change) for row in steps if row.change is not None]
    change.plot([step for step, _ in compared], [y for _, y in compared], color="black", marker=".")
    for axes, name in ((seconds, "seconds"), (tokens, "tokens\nremoved, %"), (change, "change, %")):
        axes.set_ylabel(name)
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0)
    change.set_xlabel("denoising step")
    change.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    figure.legend(loc="outside upper left", frameon=False, ncols=len(_KINDS))
    return figure


def _removed(tokens: int | None, merged_tokens: int | None) -> float:
    return 0.0 if tokens is None or merged_tokens is None else 100 * (1 - merged_tokens / tokens)
