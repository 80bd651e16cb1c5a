"""What is learned of the estimates on one model."""

from __future__ import annotations

import dataclasses

import pytest
from tests.tuned import ERRORS

from tokenmerge.plans.learned import (
    Measured,
    corrected,
    learn,
    margin_of,
    nine_of_ten,
    nine_of_ten_between,
    off_at,
)
from tokenmerge.plans.policy import ESTIMATE


def images(errors, speedups=(1.5, 3.0)):
    """Return images whose estimates are off by ``errors`` after the run, and by twice as much before."""
    return [
        Measured(prompt, speedup, psnr=30.0, before=30.0 - 2 * error, after=30.0 - error)
        for speedup in speedups
        for prompt, error in enumerate(errors)
    ]


def test_the_mean_error_at_each_speed_is_learned():
    learned = learn(images([1.0, 2.0, 3.0, 2.0]))
    assert learned.prompts == 4
    assert [(one.speedup, one.before, one.after) for one in learned.off] == [(1.5, 4.0, 2.0), (3.0, 4.0, 2.0)]


def test_few_prompts_do_not_make_one_sure():
    alike = learn(images([2.0] * 4))
    assert alike.spread_after > 1.0  # that of small models counts too
    assert learn(images([2.0] * 40)).spread_after < alike.spread_after
    assert learn(images([-4.0, 8.0] * 20)).spread_after == pytest.approx(6.0, abs=0.3)
    assert margin_of(learn(images([2.0] * 40))) < margin_of(alike)


def test_an_estimate_is_corrected_by_the_error_at_its_speed():
    assert off_at(ERRORS, 1.2, after=True) == off_at(ERRORS, 1.5, after=True) == pytest.approx(3.0)
    assert off_at(ERRORS, 4.0, after=True) == off_at(ERRORS, 3.0, after=True) == pytest.approx(1.0)
    assert off_at(ERRORS, (1.5 * 3.0) ** 0.5, after=True) == pytest.approx(2.0)  # in between, by ratio
    assert off_at(ERRORS, 1.5, after=False) == pytest.approx(4.0)
    found = corrected(ERRORS, 32.0, 1.5, after=True)
    assert found.psnr == pytest.approx(35.0)
    assert found.prompts == 6
    assert corrected(ERRORS, 32.0, 1.5, after=False).within > found.within


def test_the_margin_follows_from_the_spread():
    assert margin_of(None) == ESTIMATE["margin"]
    wider = dataclasses.replace(ERRORS, spread_before=2 * ERRORS.spread_before)
    assert margin_of(wider) == pytest.approx(2 * margin_of(ERRORS))


@pytest.mark.parametrize(
    ("freedom", "one_sided", "two_sided"), [(3, 1.638, 2.353), (5, 1.476, 2.015), (9, 1.383, 1.833)]
)
def test_the_bounds_are_those_of_students_distribution(freedom, one_sided, two_sided):
    many = 10**9  # prompts, of which the mean is certain
    assert nine_of_ten(1.0, many, freedom) == pytest.approx(one_sided, rel=0.003)
    assert nine_of_ten_between(1.0, many, freedom) == pytest.approx(two_sided, rel=0.003)
