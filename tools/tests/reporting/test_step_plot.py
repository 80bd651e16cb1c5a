"""The plot of what each step of a run did."""

from __future__ import annotations

import pytest

from tokenmerge.errors import ConfigError
from tokenmerge.report import RunSteps
from tokenmerge.runtime.step_log import StepRow
from tokenmerge_tools.reporting.plots import COLOURS
from tokenmerge_tools.reporting.step_plot import draw_steps, figure_of_steps

STEPS = RunSteps(
    (
        StepRow(2, "full", 5, 4096, 1024, None, 1.5),
        StepRow(3, "reused", 0, None, None, 0.25, 0.5),
        StepRow(4, "dense", 0, None, None, 0.5, 3.0),
        StepRow(5, "full", 5, 4096, 2048, 0.25, 2.0),
    )
)


def bars(axes):
    """Position, height and colour of each bar."""
    from matplotlib.colors import to_hex

    return {
        (round(b.get_x() + b.get_width() / 2), b.get_height(), to_hex(b.get_facecolor()))
        for b in axes.patches
    }


def test_each_step_has_its_bars_in_the_colour_of_its_kind():
    seconds, tokens, change = figure_of_steps(STEPS).axes
    full, reused, dense = COLOURS[:3]
    assert bars(seconds) == {(2, 1.5, full), (3, 0.5, reused), (4, 3.0, dense), (5, 2.0, full)}
    assert bars(tokens) == {(2, 75.0, full), (3, 0.0, reused), (4, 0.0, dense), (5, 50.0, full)}
    (line,) = change.lines
    assert list(zip(*line.get_data(), strict=True)) == [(3, 25.0), (4, 50.0), (5, 25.0)]


def test_the_legend_names_only_what_there_is():
    (legend,) = figure_of_steps(RunSteps(STEPS.rows[:2])).legends
    assert [text.get_text() for text in legend.get_texts()] == ["1 full", "1 reused"]


def test_equal_steps_give_equal_bytes():
    assert draw_steps(STEPS) == draw_steps(STEPS)
    assert draw_steps(STEPS).count("denoising step") == 1


def test_without_steps_there_is_no_picture():
    with pytest.raises(ConfigError, match="there is no step to draw; generate first"):
        draw_steps(RunSteps(()))
