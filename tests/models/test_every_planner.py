"""What must hold in models for every planner that plans without knowing the denoising step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.config import GUIDED_PLANNERS
from tokenmerge.planners import PLANNERS

EVERY = pytest.mark.parametrize("name", [name for name in PLANNERS if name not in GUIDED_PLANNERS])
SCOPES = pytest.mark.parametrize("scope", ["layers", "block"])


def alone(inputs: dict[str, Any], index: int) -> dict[str, Any]:
    """The inputs of one image of a batch."""
    return {name: value[index : index + 1] for name, value in inputs.items()}


def difference(batch: Tensor, others: list[Tensor]) -> float:
    return float((batch - torch.cat(others)).abs().max() / batch.abs().max())


@EVERY
@SCOPES
def test_a_video_is_the_same_alone_and_in_a_batch(name, scope):
    """The dense model rounds differently in a batch. A soft plan takes cosines times 1000 as logits."""
    model, inputs = (
        model_of(FAMILIES["WanTransformer3DModel"]),
        FAMILIES["WanTransformer3DModel"].inputs(3, 8, 8),
    )
    rounding = difference(call(model, inputs), [call(model, alone(inputs, i)) for i in range(3)])
    apply_token_merging(model, ToMeConfig(ratio=0.5, planner=name, scope=scope))
    merged = difference(call(model, inputs), [call(model, alone(inputs, i)) for i in range(3)])
    assert merged <= (1000 if name == "toma" else 10) * max(rounding, 2**-23)


@EVERY
@SCOPES
@pytest.mark.parametrize("family", ["WanTransformer3DModel", "FluxTransformer2DModel"])
def test_what_is_no_number_in_one_picture_stays_there(name, scope, family):
    """The images of a batch share a plan in FLUX, and have plans of their own in Wan."""
    model, inputs = model_of(FAMILIES[family]), FAMILIES[family].inputs(3, 8, 8)
    inputs["hidden_states"][1].view(-1)[7] = math.nan
    apply_token_merging(model, ToMeConfig(ratio=0.5, planner=name, scope=scope))
    assert call(model, inputs).isnan().flatten(1).any(dim=1).tolist() == [False, True, False]
