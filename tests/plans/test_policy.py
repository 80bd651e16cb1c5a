"""The policy: few numbers, each class of model with the record that they come from."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tokenmerge.plans.policy import FEWEST_TOKENS, WHOLE_OUTPUT, Power, expected_errors_of, fewest_tokens

ROOT = Path(__file__).parents[2]


def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        resources.files("tokenmerge.plans").joinpath("policy.json").read_text()
    )
    return found


def numbers(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(numbers, value.values()))
    return sum(map(numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def test_the_policy_has_at_most_40_numbers():
    assert 0 < numbers(table()) <= 40


def test_each_class_names_the_records_of_its_numbers():
    for name in ("unet", "transformer", "output", "spacing", "estimate", "made good"):
        assert all((ROOT / record).is_file() for record in table()[name]["record"].split(" and "))


def test_guidance_is_strong_from_5_on():
    strong, weak = expected_errors_of("unet", 7.5), expected_errors_of("unet", 1.0)
    assert strong != weak
    assert [expected_errors_of("unet", scale) for scale in (None, 4.9, 5.0)] == [strong, weak, strong]


@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize("model", ["unet", "transformer", "output", "other"])
def test_harms_are_positive_and_grow(model, guidance):
    expected_errors = expected_errors_of(model, guidance)
    for expected_error in (*expected_errors.skip.values(), *expected_errors.merge.values()):
        assert expected_error.size > 0
        assert expected_error.growth > 0
        assert expected_error.at(2) > expected_error.at(1)


@pytest.mark.parametrize(
    ("model", "guidance", "times"), [("transformer", 7.0, 4), ("transformer", 1.0, 2), ("unet", 7.5, 2)]
)
def test_errors_of_skipped_steps_add_before_they_are_squared_where_they_have_one_direction(
    model, guidance, times
):
    expected_errors = expected_errors_of(model, guidance)
    part = "blocks" if model == "transformer" else "deep"
    one, two = (expected_errors.of_skipping(part, [1.5] * skipped, 20) for skipped in (1, 2))
    assert two == pytest.approx(times * one)
    assert expected_errors.of_skipping("no part of it", [1.5], 20) == 0


@pytest.mark.parametrize(("model", "times"), [("output", WHOLE_OUTPUT), ("other", 1)])
@pytest.mark.parametrize("guidance", [1.0, 7.0])
def test_undescribed_models_have_the_expected_errors_of_a_transformers_blocks(model, times, guidance):
    reaches = [1.0, 1.5, 2.0]
    of_blocks = expected_errors_of("transformer", guidance).of_skipping("blocks", reaches, 20)
    found = expected_errors_of(model, guidance).of_skipping("blocks", reaches, 20)
    assert found == pytest.approx(times * of_blocks)


def test_merging_without_its_counts_loses_more():
    expected_errors = expected_errors_of("unet", 7.5)
    plain = expected_errors.of_merging("layers", 0.5, 0, proportional=False)
    weighted = expected_errors.of_merging("layers", 0.5, 0, proportional=True)
    assert plain == 10 * weighted


def test_what_does_not_merge_loses_nothing():
    assert expected_errors_of("unet", 7.5).of_merging("layers", 0.0, 2) == 0


def test_a_later_correction_leaves_more():
    expected_errors = expected_errors_of("transformer", 1.0)
    assert expected_errors.of_merging("block", 0.5, 2) < expected_errors.of_merging("block", 0.5, 4)


def test_a_correction_leaves_at_most_what_merging_loses():
    expected_errors = expected_errors_of("transformer", 7.5)
    plain = expected_errors.of_merging("block", 0.75, 0)
    assert expected_errors.of_merging("block", 0.75, 2) < plain
    assert expected_errors.of_merging("block", 0.75, 10**6) == plain


@pytest.mark.usefixtures("large_grids_alone")
def test_a_model_of_no_class_merges_on_the_fewest_grids():
    assert table()["fewest tokens"] == FEWEST_TOKENS
    assert fewest_tokens("other") == max(map(fewest_tokens, ("unet", "transformer")))


def test_a_power_grows():
    assert Power(3, 2).at(2) == 12
