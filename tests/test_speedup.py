"""A wanted speed-up determines the ratio of the default method."""

from typing import Any

import hosts
import pytest
import torch
from torch import nn

from tokenmerge import ConfigError, apply_token_merging
from tokenmerge.auto import choose
from tokenmerge.planners import calibration
from tokenmerge.report import counted_speedup, predict
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.speedup import ratio_for


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which merging is faster on every grid."""
    monkeypatch.setattr(calibration, "calibrated", lambda *_: 16, raising=False)
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 16)


class Pipeline:
    """A pipeline with a default number of steps."""

    scheduler = None

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet
        self.scheduler = object()

    def __call__(self, prompt: str, num_inference_steps: int = 30) -> Any:
        raise NotImplementedError


@pytest.fixture
def pipe(tmp_path, monkeypatch) -> Pipeline:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Pipeline(hosts.unet(block_out_channels=(32, 64)))


def counted(pipe: Pipeline, ratio: float, steps: int = 30) -> float:
    report = predict(pipe, choose(pipe, ratio), steps=steps)
    return report.flops_dense / (report.flops_mean or report.flops_merged)


def test_a_higher_ratio_never_counts_more_operations(pipe):
    found = [counted_speedup(pipe, choose(pipe, ratio), steps=30) for ratio in (0.05, 0.2, 0.35, 0.5, 0.75)]
    assert found == sorted(found)
    assert found[-1] > 1.5 * found[0]


def test_it_is_what_the_report_counts(pipe):
    assert counted_speedup(pipe, choose(pipe, 0.5), steps=30) == pytest.approx(counted(pipe, 0.5), rel=1e-9)


def test_steps_that_are_alike_are_counted_once(pipe):
    """Counting each step separately gives the same mean."""
    from tokenmerge.report import steps as module

    config = choose(pipe, 0.4)
    wanted = counted_speedup(pipe, config, steps=12)
    numbers = iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_kind_of_call", lambda state: (next(numbers),))
        assert counted_speedup(pipe, config, steps=12) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
def test_the_lowest_ratio_that_promises_the_speed(pipe):
    ratio = ratio_for(pipe, 1.6)

    def by_guidance(ratio: float) -> list[float]:
        return [counted_speedup(pipe, one, steps=30) for one in choose(pipe, ratio).variants()]

    assert min(by_guidance(ratio)) >= 1.6 > min(by_guidance(round(ratio - 0.05, 2)))
    # Strong guidance skips less of a UNet, and the speed is promised there too.
    assert by_guidance(ratio)[0] > by_guidance(ratio)[1]
    assert ratio_for(pipe, 1) == 0
    # A short generation has more full steps, and a higher ratio makes up for them.
    assert ratio_for(pipe, 1.2, steps=10) > ratio_for(pipe, 1.2)


def test_it_is_applied(pipe):
    patch = apply_token_merging(pipe, speedup=1.6)
    assert state_of(pipe.unet).config == choose(pipe, ratio_for(pipe, 1.6))
    patch.remove()
    with pytest.raises(ConfigError, match=r"expected one of them, got config=0\.5, speedup=2"):
        apply_token_merging(pipe, speedup=2.0, speedup=2)


@pytest.mark.parametrize("speedup", [0.9, True, "2", float("nan"), float("inf"), torch.ones(2)])
def test_no_speed(pipe, speedup):
    with pytest.raises(ConfigError, match="speedup: expected a number ≥ 1"):
        apply_token_merging(pipe, speedup=speedup)


@pytest.mark.slow
def test_a_speed_out_of_reach_says_what_is_in_reach(pipe):
    with pytest.raises(ConfigError, match=r"expected at most \d+\.\d\d×, .* at a ratio of 0\.75, got 50"):
        apply_token_merging(pipe, speedup=50)
