"""How many of this package's functions run in a call of a merged model: its cost in Python."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import tokenmerge
from tests.models.test_every_family import call, model_of, settings
from tests.models.tiny import FAMILIES
from tokenmerge import apply_token_merging

PACKAGE = str(Path(tokenmerge.__file__).parent)


def functions_called(run):
    """By (file, function) of this package: how often it was called."""
    found = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[Path(code.co_filename).name, code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


# 981 and 620 as this was written, with Python 3.11; later ones have no frames for comprehensions.
@pytest.mark.parametrize(("name", "most"), [("UNet2DConditionModel", 1_000), ("FluxTransformer2DModel", 640)])
@torch.no_grad()
def test_a_merged_call_runs_few_functions(name, most):
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, settings(family))

    def step(number):
        call(model, {**arguments, "timestep": arguments["timestep"] * (1 - 0.1 * number)})

    for number in range(2):
        step(number)
    found = functions_called(lambda: step(2))
    assert 0 < sum(found.values()) <= most, found.most_common(10)
