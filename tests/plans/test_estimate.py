"""The estimate of the closeness of a picture, and what it is made from."""

from __future__ import annotations

import math

import pytest

from tokenmerge import StepReuse, ToMeConfig
from tokenmerge.plans import estimate_closeness
from tokenmerge.plans.policy import estimate_of

STEPS = 12
CONFIG = ToMeConfig(ratio=0, reuse=StepReuse(every=3, shallow_every=2))
RUNS = CONFIG.reuse.steps_of(STEPS)


def noted(error: float) -> dict[str, dict[int, float]]:
    return {
        "deep": dict.fromkeys(RUNS.full[2:], error),
        "finest": dict.fromkeys(RUNS.shallow[2:], error),
    }


def test_larger_errors_and_more_harm_expect_less_closeness():
    psnrs = [estimate_closeness(1e-4, CONFIG, STEPS, noted(error)).psnr for error in (0.0, 0.01, 0.1, 0.5)]
    assert psnrs == sorted(set(psnrs), reverse=True)
    harms = [estimate_closeness(harm, CONFIG, STEPS, noted(0.1)).psnr for harm in (0.0, 1e-6, 1e-4, 1e-2)]
    assert harms == sorted(set(harms), reverse=True)


def test_the_worst_step_is_the_one_farthest_from_a_run_with_a_large_error():
    errors = noted(0.01)
    errors["deep"][7] = 0.9
    assert RUNS.full == (0, 1, 5, 7, 11)
    assert estimate_closeness(1e-4, CONFIG, STEPS, errors).worst_step == 6
    assert estimate_closeness(1e-4, ToMeConfig(), STEPS, {}).worst_step is None


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_short_generations_have_an_estimate(steps):
    found = estimate_closeness(0.0, CONFIG, steps, {})
    assert math.isfinite(found.psnr)
    assert str(found).endswith("dB to the dense picture")


def test_its_numbers_name_their_record():
    assert estimate_of()["record"].startswith("benchmarks/")
