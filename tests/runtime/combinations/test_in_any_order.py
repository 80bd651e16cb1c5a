"""Merging and another feature both act whichever came first, and each goes when it is removed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import hosts
import pytest
import torch
from tests.models.tiny import FAMILIES, seeded
from tests.runtime.combinations import features
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import ToMeConfig, apply_token_merging

UNET, FLUX, WAN = HOSTS = ("UNet2DConditionModel", "FluxTransformer2DModel", "WanTransformer3DModel")
CONFIG = ToMeConfig(ratio=0.5)
TIMESTEPS = (900, 700, 400, 350, 100)

FEATURES: list[tuple[Callable[[Any], features.Remove], tuple[str, ...]]] = [
    (features.lora, (UNET, FLUX)),
    (features.fused_lora, (UNET, FLUX)),
    (features.fused_projections, (UNET, FLUX)),
    (features.sliced_attention, (UNET,)),
    (features.other_processors, (UNET,)),
    (features.attention_backend, (FLUX, WAN)),
    (features.free_u, (UNET,)),
    (features.perturbed_attention, (UNET,)),
    (features.group_offload_by_block, HOSTS),
    (features.group_offload_by_leaf, HOSTS),
    (features.layerwise_casting, HOSTS),
    (features.cpu_offload, HOSTS),
    (features.pyramid_attention_broadcast, HOSTS),
    (features.faster_cache, (FLUX,)),
    (features.first_block_cache, (FLUX, WAN)),
    (features.taylor_seer, (FLUX,)),
    (features.mag_cache, (FLUX, WAN)),
    (features.skipped_layer, (WAN,)),
    (features.skipped_attention_scores, (UNET,)),
    (features.quantised, HOSTS),
]
CASES = [
    pytest.param(feature, host, id=f"{feature.__name__}-{host}") for feature, on in FEATURES for host in on
]
# These change how a result is computed and not what it is.
SAME_RESULT = {
    features.fused_projections,
    features.sliced_attention,
    features.other_processors,
    features.attention_backend,
    features.group_offload_by_block,
    features.group_offload_by_leaf,
    features.cpu_offload,
}
# Weights that were rounded, or to which a matrix was added and taken away, are not what they were.
STAYS = {features.layerwise_casting, features.quantised}
ROUNDS = {
    features.fused_lora,
    features.fused_projections,
    features.other_processors,
    features.sliced_attention,
}


def model_of(name: str) -> nn.Module:
    return hosts.unet() if name == UNET else seeded(FAMILIES[name].build())


def inputs(name: str) -> dict[str, Any]:
    return hosts.inputs() if name == UNET else FAMILIES[name].inputs(2, 8, 8)


@torch.no_grad()
def run(model: nn.Module, name: str, steps: int = len(TIMESTEPS)) -> Tensor:
    """The results of the first few steps, each on a slightly different sample."""
    features.new_generation(model)
    results = []
    for i, timestep in enumerate(TIMESTEPS[:steps]):
        arguments = dict(inputs(name))
        sample = next(iter(arguments))
        arguments[sample] = arguments[sample] * (1 - 0.05 * i)
        arguments["timestep"] = torch.full((2,), timestep / (1000 if name == FLUX else 1))
        with features.step_of(model, timestep):
            results.append(model(**arguments)[0])
    return torch.stack(results)


@pytest.mark.parametrize(("feature", "name"), CASES)
def test_merging_with(feature, name):
    pytest.importorskip("torchao" if feature is features.quantised else "peft")
    exact = feature not in ROUNDS

    def same(a: Tensor, b: Tensor) -> None:
        # Sums in another order: float32 rounding, 1e-5 of the largest value over the blocks.
        scale = b.abs().max().item()
        assert_close(a, b, rtol=0, atol=0 if exact else 1e-5 * scale)

    fresh = model_of(name)
    dense = run(copy.deepcopy(fresh), name)
    alone = copy.deepcopy(fresh)
    apply_token_merging(alone, CONFIG)
    merged = run(alone, name)
    other = copy.deepcopy(fresh)
    feature(other)
    featured = run(other, name)
    assert not torch.equal(merged, dense)
    if feature in SAME_RESULT:
        assert_close(featured, dense, rtol=0, atol=1e-5 * dense.abs().max().item())
    else:
        assert not torch.allclose(featured, dense, rtol=0, atol=1e-5 * dense.abs().max().item())

    results = []
    for merging_first, merging_goes_first in itertools.product((True, False), repeat=2):
        model = copy.deepcopy(fresh)
        if merging_first:
            patch = apply_token_merging(model, CONFIG)
            remove = feature(model)
        else:
            remove = feature(model)
            patch = apply_token_merging(model, CONFIG)
        results.append(run(model, name))
        if merging_goes_first:
            patch.remove()
            same(run(model, name), featured)
            remove()
        else:
            remove()
            if feature not in STAYS:
                same(run(model, name), merged)
            patch.remove()
        if feature not in STAYS:
            same(run(model, name, 3), dense[:3])
        assert not any("_tokenmerge" in module.__dict__ for module in model.modules())
    for result in results[1:]:
        same(result, results[0])
    assert not torch.allclose(results[0], featured, rtol=0, atol=1e-5 * featured.abs().max().item())
    if feature in SAME_RESULT:
        same(results[0], merged)
    else:
        assert not torch.allclose(results[0], merged, rtol=0, atol=1e-5 * merged.abs().max().item())
