"""Copying and training merged models of every family."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.models.test_every_family import DISTINCT, as_tensor, call, model_of, settings, state
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import apply_token_merging, remove_token_merging


@DISTINCT
@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_copy_merges_too_and_is_restored_alone(family, make_copy):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    before, dense = state(model), call(model, arguments)
    apply_token_merging(model, settings(family))
    merged = call(model, arguments)
    copied = make_copy(model)
    assert torch.equal(call(copied, arguments), merged)
    remove_token_merging(copied)
    assert state(copied) == before
    assert torch.equal(call(copied, arguments), dense)
    assert torch.equal(call(model, arguments), merged)


def gradients(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # DiT drops class labels at random
    as_tensor(model, model(**arguments)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _checkpointing_works(model: nn.Module, arguments: dict[str, Any]) -> bool:
    plain = gradients(model, arguments)
    model.enable_gradient_checkpointing()
    try:
        again = gradients(model, arguments)
    except TypeError:
        return False
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())
        for a, b in zip(again, plain, strict=True)
    )


@DISTINCT
@pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated:FutureWarning")
def test_gradients_are_those_without_checkpointing(family):
    """Up to rounding: some hosts compute their position tables anew."""
    model, arguments = model_of(family).train(), family.inputs(2, 8, 8)
    if not getattr(model, "_supports_gradient_checkpointing", False) or not family.checkpoints:
        pytest.skip("the model has no gradient checkpointing")
    if not _checkpointing_works(model_of(family).train(), arguments):
        pytest.skip("of the host alone, the call fails or the gradients differ with gradient checkpointing")
    apply_token_merging(model, settings(family))
    plain = gradients(model, arguments)
    model.enable_gradient_checkpointing()
    for a, b in zip(gradients(model, arguments), plain, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())
