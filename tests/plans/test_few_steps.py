"""Where fewer steps can be as close as the default method."""

from __future__ import annotations

import dataclasses

import pytest
from tests.plans.test_choose import facts

from tokenmerge.plans.few_steps import MANY_TOKENS, MOST, MOST_ON_MANY_TOKENS, can_be_as_close

FEW, MANY = (1, 32, 32), (1, 64, MANY_TOKENS // 64)


@pytest.mark.parametrize(
    ("model", "grid", "merges", "most"),
    [
        ("unet", FEW, False, MOST),
        ("unet", FEW, True, MOST),
        ("unet", MANY, False, MOST_ON_MANY_TOKENS),
        ("unet", MANY, True, 0),
        ("transformer", FEW, False, MOST),
        ("transformer", FEW, True, 0),
        ("transformer", MANY, False, MOST),
        ("transformer", MANY, True, 0),
    ],
)
def test_it_depends_on_the_steps_on_merging_and_on_the_tokens_of_a_unet(model, grid, merges, most):
    of_generation = dataclasses.replace(facts(model), grid=grid)
    as_close = [
        steps
        for steps in range(1, 50)
        if can_be_as_close(dataclasses.replace(of_generation, steps=steps), merges)
    ]
    assert as_close == list(range(1, most + 1))
