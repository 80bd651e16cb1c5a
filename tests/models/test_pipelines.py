"""Pipelines of diffusion transformers: all of their denoisers and ControlNets are found and patched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.models.tiny import FAMILIES
from tokenmerge import ToMeConfig, apply_token_merging, remove_token_merging
from tokenmerge.models.find import find_hosts
from tokenmerge.runtime.state import STATE


@pytest.mark.parametrize(
    ("denoiser", "controlnet", "several"),
    [
        ("FluxTransformer2DModel", "FluxControlNetModel", "FluxMultiControlNetModel"),
        ("SD3Transformer2DModel", "SD3ControlNetModel", "SD3MultiControlNetModel"),
        ("QwenImageTransformer2DModel", "QwenImageControlNetModel", "QwenImageMultiControlNetModel"),
    ],
)
def test_controlnets_are_patched_beside_the_transformer(denoiser, controlnet, several):
    from diffusers.models import controlnets

    transformer, *nets = (FAMILIES[name].build() for name in (denoiser, controlnet, controlnet))
    multi = getattr(controlnets, several)(nets)
    pipe = SimpleNamespace(transformer=transformer, controlnet=multi, vae=None)
    assert [(host.root, host.controlnet) for host in find_hosts(pipe)] == [
        (transformer, False),
        *((net, True) for net in nets),
    ]
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    assert all(STATE in model.__dict__ for model in (transformer, *nets))
    assert patch.report().model == f"{denoiser} + {controlnet} 1 + {controlnet} 2"
    remove_token_merging(pipe)
    assert not any(STATE in module.__dict__ for model in (transformer, *nets) for module in model.modules())


def test_both_transformers_of_a_pipeline_are_patched():
    first, second = (FAMILIES["WanTransformer3DModel"].build() for _ in range(2))
    pipe = SimpleNamespace(transformer=first, transformer_2=second)
    apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    assert STATE in first.__dict__
    assert STATE in second.__dict__
