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


def files_passed(run):
    """Files of this package that are entered, but for planners and the operations that they are made of."""
    found = set()

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            found.add(Path(file).relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sorted(name for name in found if not name.startswith(("planners/", "ops/")))


# 862 and 552 as this was written, with Python 3.11; later ones have no frames for comprehensions.
@pytest.mark.parametrize(("name", "most"), [("UNet2DConditionModel", 880), ("FluxTransformer2DModel", 565)])
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


@pytest.mark.parametrize(("scope", "most"), [("layers", 8), ("block", 9)])
@torch.no_grad()
def test_a_merged_block_passes_few_files_beside_those_that_plan(scope, most):
    """From its ``forward`` to the gather and back; a reader follows a token through these."""
    family = FAMILIES["UNet2DConditionModel"]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, settings(family, scope=scope))
    call(model, arguments)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    given = {}
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: given.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    call(model, arguments)
    hook.remove()
    found = files_passed(lambda: block(*given["args"], **given["kwargs"]))
    assert "runtime/merged_call.py" in found
    assert 0 < len(found) <= most, found
