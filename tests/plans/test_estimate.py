"""The estimate of the closeness of an image, and what it is made from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from tests.plans.test_choose import facts

from tokenmerge import StepReuse, ToMeConfig
from tokenmerge.plans import Estimate, Schedule
from tokenmerge.plans.choose import merging_error_of, skipping_error_of
from tokenmerge.plans.estimate import (
    Observations,
    _errors,
    estimate_closeness,
    expected,
    influence_of,
    looks,
    noise_of,
    psnr_of,
)
from tokenmerge.plans.policy import ESTIMATE, LEFT_OF_MISSED, MADE_GOOD

STEPS = 12
CONFIG = ToMeConfig(ratio=0, reuse=StepReuse(every=3, shallow_every=2))
RUNS = CONFIG.reuse.steps_of(STEPS)
SIGMAS = (14.0, 9.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.0)
UNET = facts("unet", steps=STEPS)


def psnr(observed: Observations, config: ToMeConfig = CONFIG) -> float:
    return estimate_closeness(UNET, config, observed).psnr


def squared(observed: Observations, config: ToMeConfig = CONFIG) -> float:
    """Return the squared error that is expected, without the one that nobody sees."""
    return 10 ** (-psnr(observed, config) / 10) - 10 ** (-psnr_of(0) / 10)


def expected_error_of(config: ToMeConfig) -> float:
    """Return the squared error that the policy expects of step reuse."""
    return skipping_error_of(UNET, config.reuse.steps_of(STEPS))


def errors(size: float, part: str = "deep") -> dict[str, dict[int, float]]:
    return {part: dict.fromkeys((RUNS.full if part == "deep" else RUNS.finest)[2:], size)}


def test_larger_errors_of_either_part_expect_less_closeness():
    for part in ("deep", "finest"):
        found = [psnr(Observations(errors(size, part), SIGMAS)) for size in (0.001, 0.01, 0.1, 0.5)]
        assert found == sorted(set(found), reverse=True)


def test_what_is_shown_counts_by_its_share():
    """Twice the errors are twice the error of the image, in the geometric mean with the policy's."""
    one, two = (squared(Observations(errors(size), SIGMAS)) for size in (0.001, 0.002))
    assert two / one == pytest.approx(4 ** ESTIMATE["shown"], rel=0.01)


def test_what_the_policy_expects_counts_too(monkeypatch):
    before = squared(Observations(errors(0.1), SIGMAS))
    doubled = 2 * expected_error_of(CONFIG)
    monkeypatch.setattr("tokenmerge.plans.estimate.skipping_error_of", lambda *given: doubled)
    after = squared(Observations(errors(0.1), SIGMAS))
    assert after / before == pytest.approx(2 ** (1 - ESTIMATE["shown"]))


def test_what_is_made_good_counts_no_longer():
    plain = facts("transformer", steps=STEPS, guidance=1.0)
    made_good = dataclasses.replace(plain, schedule=Schedule(is_euler=True))
    config = ToMeConfig(ratio=0, reuse=StepReuse(every=3))
    for observed, shown in ((Observations(), 0.0), (Observations(errors(0.001), SIGMAS), ESTIMATE["shown"])):
        before, after = (
            10 ** (-estimate_closeness(one, config, observed).psnr / 10) - 10 ** (-psnr_of(0) / 10)
            for one in (plain, made_good)
        )
        assert after / before == pytest.approx(LEFT_OF_MISSED**shown * MADE_GOOD ** (1 - shown))


def test_a_large_error_of_a_step_counts_less():
    """Ten times a large error is hardly more, and ten times a small one is nearly ten times as much."""
    small, more, large, most = (
        psnr(Observations(errors(size), SIGMAS)) for size in (0.001, 0.01, 100.0, 1000.0)
    )
    assert small - more > 9 > 1 > large - most > 0


def test_what_merging_is_expected_to_lose_is_added():
    config = dataclasses.replace(CONFIG, ratio=0.5, max_downsample=8, scope="layers")
    found = psnr(Observations(errors(1e-6), SIGMAS), config)
    assert found == pytest.approx(-10 * math.log10(merging_error_of(UNET, config) + 1e-7), abs=0.01)


def test_before_anything_is_shown_the_policy_counts():
    assert psnr(Observations(sigmas=SIGMAS)) == pytest.approx(
        -10 * math.log10(expected_error_of(CONFIG) + 1e-7)
    )


def test_noise_makes_the_same_errors_count_more():
    plain, noisy = (psnr(Observations(errors(0.1), SIGMAS, noise)) for noise in (1.0, 2.0))
    assert noisy < plain - 1


def test_steps_between_two_complete_ones_err_together():
    """Two errors add up where they follow one another, and only their squares where they do not."""
    together, apart = (
        ToMeConfig(ratio=0, reuse=StepReuse(full_steps=tuple(i / 11 for i in range(12) if i not in skipped)))
        for skipped in ((5, 6), (3, 6))
    )
    # Over three steps from a run, errors of a third and of two thirds; over two, of a half. All are small.
    one = squared(Observations({"deep": {7: 0.004}}), together) / squared(
        Observations({"deep": {4: 0.002, 7: 0.002}}), apart
    )
    share, of_policy = ESTIMATE["shown"], expected_error_of(together) / expected_error_of(apart)
    ratio = (4.0 / (1.0 * 2**0.5)) ** 2
    assert one == pytest.approx(ratio**share * of_policy ** (1 - share), rel=0.01)


def test_errors_grow_with_the_distance_and_fall_with_the_noise():
    """Three steps after a run, an error is larger than after two, unless there is less noise by then."""
    config = ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 1 / 11, 4 / 11, 7 / 11, 1)))
    assert config.reuse.steps_of(STEPS).full == (0, 1, 4, 7, 11)
    observed = Observations({"deep": {4: 0.3, 7: 0.1, 11: 0.1}}, SIGMAS)

    def worst_step(observed):
        errors = _errors(config, STEPS, observed)
        return max(errors, key=errors.__getitem__)

    assert worst_step(observed) == 9
    assert worst_step(dataclasses.replace(observed, sigmas=())) == 3
    assert worst_step(Observations({"deep": {4: 0.3}})) == 10
    # The finest level is extrapolated too, and its own error takes the place of the other.
    finest = {"finest": {4: 0.001, 7: 0.3, 11: 0.001}}
    assert worst_step(Observations({**observed.errors, **finest}, SIGMAS)) == 6


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_short_generations_have_an_estimate(steps):
    found = estimate_closeness(dataclasses.replace(UNET, steps=steps), CONFIG, Observations())
    assert math.isfinite(found.psnr)
    assert "; on small models " in str(found)


def test_an_estimate_says_that_it_was_not_measured_on_this_model():
    unmeasured = "no estimate for this model; on small models"
    assert str(Estimate(36.0, 7.0)) == f"{unmeasured} 36 dB (29 to 43)"
    assert str(Estimate(10.4, 12.0)) == f"{unmeasured} 10 dB (0 to 22)"
    assert str(Estimate(9.9, 7.0)) == f"{unmeasured} below 10 dB"
    # Before a run it is said in the same way.
    assert str(expected(0.09)) == f"{unmeasured} 10 dB (0 to 22)"
    assert str(expected(0.11)) == f"{unmeasured} below 10 dB"


def test_an_estimate_that_was_measured_on_this_model_says_with_how_many_prompts():
    assert str(Estimate(35.0, 3.0, prompts=6)) == "35 dB (32 to 38), measured on this model with 6 prompts"
    assert str(Estimate(9.0, 3.0, prompts=1)) == "below 10 dB, measured on this model with 1 prompt"


@pytest.mark.parametrize("noise", [1.0, 2.0])
@pytest.mark.parametrize("sigmas", [SIGMAS, (1e4, 40.0, 5.0, 1.0, 0.004, 0.0)])
def test_the_influence_is_that_of_an_error_in_a_solver(sigmas, noise):
    """Its model takes an error for a part of the image as much as there is more image than noise."""
    found = [solved(sigmas, noise, wrong) for wrong in range(len(sigmas) - 1)]
    assert influence_of(sigmas, noise) == pytest.approx(found)


def solved(sigmas: Sequence[float], noise: float, wrong: int) -> float:
    """Return the error of the image where that which is predicted in one step errs by 1."""
    error = 0.0
    for step, (before, after) in enumerate(pairwise(sigmas)):
        kept = (after / before) ** noise
        error = kept * error + (1 - kept) * (error / (1 + before) + (step == wrong))
    return error


def test_a_solver_that_calls_twice_in_a_step_takes_the_mean():
    plain, twice = influence_of((4.0, 2.0, 1.0, 0.0)), influence_of((4.0, 2.0, 2.0, 1.0, 1.0, 0.0))
    assert twice[0] == twice[1] == pytest.approx(plain[0] / 2)
    assert twice[2] == twice[3] == pytest.approx(plain[1] / 2)
    assert sum(twice) == pytest.approx(sum(plain))


def test_noise_is_told_from_the_share_that_a_step_keeps():
    assert noise_of(0.5, 4.0, 2.0) == pytest.approx(1)
    assert noise_of(0.9, 4.0, 2.0) == 1  # measured imprecisely: no scheduler takes noise away
    assert noise_of(-0.01, 4.0, 2.0) > 10  # all of it is new
    assert noise_of(math.nan, 4.0, 2.0) == 1


def test_its_numbers_name_their_record():
    assert ESTIMATE["record"].startswith("benchmarks/")


@pytest.mark.parametrize(
    ("psnr", "words"),
    [
        (42, "hard to tell apart"),
        (36, "small details"),
        (29.6, "larger details"),
        (28, "many details"),
        (20, "different"),
    ],
)
def test_a_psnr_is_said_in_words_too(psnr, words):
    assert words in looks(psnr)
