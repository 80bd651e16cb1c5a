"""A patch of another package on a model is seen in either order, and the error says how to take it off."""

from __future__ import annotations

import hosts
import pytest
import tomesd
import torch
from tests.models.tiny import FAMILIES
from torch import nn

from tokenmerge import StepReuse, ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.runtime.patching import other_patches

# Merging alone, and with step reuse.
CONFIGS = [ToMeConfig(ratio=0.5), ToMeConfig(ratio=0.5, reuse=StepReuse(every=2))]
REMOVE = r"tomesd.patch .* ToMeBlock .*: tomesd.remove_patch\(pipe\)"


def run(unet: nn.Module) -> None:
    with torch.no_grad():
        unet(**hosts.inputs())


@pytest.mark.parametrize("config", CONFIGS)
def test_tomesd_is_refused_before_and_after(config):
    unet = hosts.unet()
    refused = pytest.raises(UnsupportedModelError, match=REMOVE)
    tomesd.apply_patch(unet, ratio=0.5)
    classes = [type(module) for module in unet.modules()]
    with refused:
        apply_token_merging(unet, config)
    assert [type(module) for module in unet.modules()] == classes
    tomesd.remove_patch(unet)
    patch = apply_token_merging(unet, config)
    tomesd.apply_patch(unet, ratio=0.5)
    patch.at_step(0, 4)
    with refused:
        run(unet)
    tomesd.remove_patch(unet)
    run(unet)
    patch.remove()


def test_tomesd_on_a_model_alone_is_seen_at_the_next_call():
    """Nothing tells when a generation begins."""
    unet = hosts.unet()
    apply_token_merging(unet, ratio=0.5)
    run(unet)
    for _ in range(2):  # and when it is put on again
        tomesd.apply_patch(unet, ratio=0.5)
        for _ in range(2):  # until it is taken off
            with pytest.raises(UnsupportedModelError, match=REMOVE):
                run(unet)
        tomesd.remove_patch(unet)
        run(unet)


def test_a_call_looks_for_other_patches_only_after_a_class_was_derived(monkeypatch):
    unet = hosts.unet()
    other = hosts.unet()
    for model in (unet, other):
        apply_token_merging(model, ratio=0.5)
        run(model)
    looks = []
    monkeypatch.setattr(other_patches, "refuse_other_patches", looks.append)
    for _ in range(3):
        run(unet)
    assert not looks
    tomesd.apply_patch(other, ratio=0.5)
    for _ in range(3):
        run(unet)
    assert looks == [unet]


def test_a_swapped_class_that_keeps_the_one_before_is_refused_in_any_model():
    model = FAMILIES["FluxTransformer2DModel"].build()
    block = model.transformer_blocks[1]
    block.__class__ = type(
        "Faster", (type(block),), {"_parent": type(block), "__module__": "faster.patching"}
    )
    with pytest.raises(
        UnsupportedModelError, match=r"transformer_blocks.1: faster.patching .* Faster .*to its _parent"
    ):
        apply_token_merging(model, ToMeConfig(ratio=0.5))
