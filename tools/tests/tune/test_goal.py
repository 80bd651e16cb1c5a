from __future__ import annotations

import math
import re

import pytest

from tokenmerge.errors import ConfigError
from tokenmerge_tools.tune.goal import GOAL_METRICS, flag_of, parse_goal, parse_seconds


def test_some_metrics_can_be_a_goal() -> None:
    for metric in GOAL_METRICS:
        assert parse_goal(None, {metric: 0.5}, None).metric == metric
    assert [flag_of(metric) for metric in GOAL_METRICS] == ["min-psnr", "min-ssim", "max-lpips"]


def test_a_speed_is_at_the_best_closeness_by_psnr_or_another_metric() -> None:
    assert parse_goal(1.5, {"psnr": None}, None).metric == "psnr"
    assert parse_goal(1.5, {}, "dino").metric == "dino"


@pytest.mark.parametrize(
    ("speedup", "bounds", "metric", "words"),
    [
        (None, {}, None, "expected one of --min-speedup, --min-psnr, .*got none"),
        (None, {"psnr": None}, None, "got none"),
        (1.5, {"psnr": 35.0}, None, r"got 2 of them \(min-speedup, min-psnr\)"),
        (1.0, {}, None, "min-speedup: expected a number above 1, .*got 1; 1 is the speed of dense"),
        (0.5, {}, None, "above 1"),
        (-2.0, {}, None, "above 1"),
        (math.inf, {}, None, "above 1"),
        (math.nan, {}, None, "above 1"),
        (None, {"psnr": 0.0}, None, "min-psnr: expected a number above 0, got 0"),
        (None, {"psnr": math.inf}, None, "above 0"),
        (None, {"ssim": 1.5}, None, "min-ssim: expected a number above 0 and at most 1, got 1.5"),
        (None, {"lpips": -0.1}, None, "max-lpips: expected a number above 0, got -0.1"),
        (1.5, {}, "fid", "metric: expected one of psnr, .*glyphs, which have a value .*got 'fid'"),
        (1.5, {}, "none", "got 'none'"),
        (None, {"psnr": 35.0}, "dino", "--min-psnr measures psnr, got 'dino'"),
    ],
)
def test_wrong_goals_are_refused(speedup, bounds, metric, words) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_goal(speedup, bounds, metric)


@pytest.mark.parametrize("text", ["", "10", "-1min", "0s", "ten minutes", "10 minutes", "infh", "1e3s"])
def test_a_duration_has_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"such as 90s, 10min or 1h, got {text!r}")):
        parse_seconds(text)
