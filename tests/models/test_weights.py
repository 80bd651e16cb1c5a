"""The fingerprint of a model's weights."""

from __future__ import annotations

import copy

import torch
from hosts import unet

from tokenmerge.models.weights import fingerprint


def test_equal_weights_have_one_fingerprint_in_any_type():
    model = unet()
    assert fingerprint(copy.deepcopy(model)) == fingerprint(model)
    assert fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == fingerprint(model)


def test_other_weights_have_another_one():
    model = unet()
    before = fingerprint(model)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    assert fingerprint(model) != before


def test_weights_that_are_not_in_memory_have_none():
    assert fingerprint(unet().to("meta")) is None
