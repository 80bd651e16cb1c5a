"""Pipelines of diffusion transformers: all of their denoisers and ControlNets are found and patched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.models.tiny import FAMILIES, noise, seeded
from tests.models.undescribed import build
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging, remove_token_merging
from tokenmerge.models.base import Grid
from tokenmerge.models.find import find_hosts
from tokenmerge.models.grids import grids_of_ids
from tokenmerge.models.undescribed import SKIPPING
from tokenmerge.runtime.memory.state import STATE


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


def test_a_pipeline_that_edits_a_picture_merges_it_and_its_reference():
    """Every step, and the report of the handle after the run, has the two sizes that the pipeline made."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline

    family = FAMILIES["FluxTransformer2DModel, Kontext"]
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=1,
        norm_num_groups=4,
        shift_factor=0.0,
    )
    pipe = FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=seeded(family.build()),
    )
    pipe.set_progress_bar_config(disable=True)
    words = {"prompt_embeds": noise(1, 7, 16), "pooled_prompt_embeds": noise(1, 16)}

    def edited() -> Tensor:
        return pipe(
            image=torch.rand(1, 3, 48, 24, generator=torch.Generator().manual_seed(0)),
            height=32,
            width=40,
            num_inference_steps=6,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            max_area=32 * 40,
            _auto_resize=False,
            **words,
        ).images

    dense = edited()
    handle = apply_token_merging(
        pipe, ToMeConfig(scope="block", ratio=0, reference_ratio=0.75, reuse=StepReuse(every=2))
    )
    with handle.record() as recorded:
        merged = edited()
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)
    assert {(found.grid, found.references) for found in recorded.values()} == {((1, 8, 10), ((1, 12, 6),))}
    assert {(row.tokens, row.merged_tokens) for row in handle.report().rows} == {(80 + 72, 80 + 18)}
    handle.remove()
    assert torch.equal(edited(), dense)


def test_a_controlnet_that_runs_blocks_of_its_transformer_is_skipped_with_it():
    """The outputs of both are extrapolated, as the table of supported models says of the ControlNet."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageControlNetPipeline

    transformer, controlnet = FAMILIES["ZImageTransformer2DModel"].build(), build("ZImageControlNetModel")
    vae = AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        shift_factor=0.0,
    )
    pipe = ZImageControlNetPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
        controlnet=controlnet,
    )
    pipe.set_progress_bar_config(disable=True)
    words = noise(2, 7, 16)

    def drawn() -> tuple[Tensor, list[int]]:
        ran = [0, 0]
        inner = [transformer.layers[0].attention, controlnet.control_layers[0].attention]

        def note(module: nn.Module, _: object) -> None:
            if module in inner:
                ran[inner.index(module)] += 1

        hook = register_module_forward_pre_hook(note)
        (latents,) = pipe(
            prompt_embeds=[words[0]],
            negative_prompt_embeds=[words[1]],
            control_image=torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
            height=32,
            width=32,
            num_inference_steps=10,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
            return_dict=False,
        )
        hook.remove()
        return latents, ran

    assert [(host.root, host.controlnet) for host in find_hosts(pipe)] == [
        (transformer, False),
        (controlnet, True),
    ]
    dense, ran = drawn()
    assert ran == [10, 10]
    patch = apply_token_merging(pipe, speedup=2.0)
    latents, ran = drawn()
    assert ran == [5, 5]
    assert torch.isfinite(latents).all()
    shown = str(patch)
    assert "tokenmerge in ZImageTransformer2DModel + ZImageControlNetModel: " in shown
    assert "10 steps, guidance 3" in shown
    assert "counted by operations: 2.00×" in shown
    assert "skipped: the whole model, whose output is extrapolated" in shown
    assert SKIPPING["ZImageControlNetModel"].way == "whole output"
    patch.remove()
    assert torch.equal(drawn()[0], dense)


def test_the_pictures_of_a_sequence_are_read_from_the_positions_of_pipelines():
    from diffusers import Flux2Pipeline
    from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import prepare_pos_ids

    latents = [torch.zeros(1, 4, *size) for size in ((6, 5), (6, 5), (4, 9))]
    flux_2 = torch.cat(
        [Flux2Pipeline._prepare_latent_ids(latents[0]), Flux2Pipeline._prepare_image_ids(latents[1:])], dim=1
    )
    longcat = torch.cat(
        [prepare_pos_ids(i + 1, "image", (512, 512), height=6, width=5 + i) for i in range(2)]
    )
    for ids, others in ((flux_2, ((1, 6, 5), (1, 4, 9))), (longcat, ((1, 6, 6),))):
        call = {"img_ids": ids, "hidden_states": torch.zeros(1, ids.shape[-2], 4)}
        assert grids_of_ids(None, call, Grid()) == ((1, 6, 5), *others)
