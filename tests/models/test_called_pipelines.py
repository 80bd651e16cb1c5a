"""Pipelines that call their denoiser in a way of their own are accepted only if their calls merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.tiny import FAMILIES, noise, seeded
from torch import Tensor

from tokenmerge import ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.models.grids import grids_of_coordinates

diffusers = pytest.importorskip("diffusers")

LTX = "LTXVideoTransformer3DModel"


def ltx_pipeline(cls: type) -> Any:
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    vae = AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    pipe = cls(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=seeded(FAMILIES[LTX].build()),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, **arguments: Any) -> Tensor:
    words = {"prompt_embeds": noise(1, 7, 16), "prompt_attention_mask": torch.ones(1, 7, dtype=torch.bool)}
    return pipe(
        height=32,
        width=64,
        num_frames=9,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        guidance_scale=1.0,
        **words,
        **arguments,
    ).frames


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("frame", [None, 0, 8])
def test_a_video_with_given_frames_merges_the_tokens_of_the_video_alone(frame):
    """The pipeline passes no size, so the grid is read from coordinates; given frames may stand before it."""
    from diffusers import LTXConditionPipeline
    from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

    pipe = ltx_pipeline(LTXConditionPipeline)
    given = {}
    if frame is not None:
        picture = torch.rand(1, 3, 32, 64, generator=torch.Generator().manual_seed(1))
        given["conditions"] = [LTXVideoCondition(image=picture, frame_index=frame)]
    dense = draw(pipe, **given)
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    with patch.record() as recorded:
        merged = draw(pipe, **given)
    assert {found.grid for found in recorded.values()} == {(3, 8, 16)}
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)
    apply_token_merging(pipe, ToMeConfig(ratio=0))
    assert torch.equal(draw(pipe, **given), dense)


def coordinates(*times: float, rows: int = 2, columns: int = 3) -> Tensor:
    sides = torch.tensor(times), 32.0 * torch.arange(rows), 32.0 * torch.arange(columns)
    return torch.cartesian_prod(*sides).T.unsqueeze(0)


def test_a_long_video_merges_its_frames_and_the_given_ones_at_its_end():
    """The pipeline passes 1 for each side of the grid, beside coordinates."""
    from diffusers.pipelines.ltx import pipeline_ltx_i2v_long_multi_prompt as pipeline

    coordinates = pipeline.build_video_coords_for_window(torch.zeros(1, 4, 5, 8, 6), 1, 1, 1, (8, 32, 32), 25)
    family = FAMILIES[LTX]
    call = {**family.inputs(1, 8, 6), "hidden_states": noise(1, 5 * 8 * 6, 4), "video_coords": coordinates}
    model = seeded(family.build())
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5))
    with patch.record() as recorded, torch.no_grad():
        model(**{**call, "num_frames": 1, "height": 1, "width": 1})
    assert {found.grid for found in recorded.values()} == {(5, 8, 6)}


def test_the_video_begins_with_time_0():
    for times, frames in (((0, 1, 2), 3), ((5, 0, 1, 2), 3), ((5, 6, 0, 1), 2), ((0, 1, 2, 0, -1), 5)):
        frames_of_times = torch.stack([coordinates(time) for time in map(float, times)], dim=2).flatten(2)
        assert grids_of_coordinates(frames_of_times) == ((frames, 2, 3),)


def test_coordinates_of_no_video_are_refused():
    whole = coordinates(0.0, 1.0)
    for wrong in (whole[..., :-1], whole[:, [0, 2, 1]][..., torch.randperm(12)], whole.roll(1, dims=2)):
        with pytest.raises(UnsupportedModelError, match="video_coords: expected the times, rows and columns"):
            grids_of_coordinates(wrong)


def test_coordinates_without_values_are_refused():
    refused = (
        r"video_coords: expected .*, got coordinates without values, on the meta device, of shape "
        r"\(1, 3, 12\); call remove_token_merging"
    )
    with pytest.raises(UnsupportedModelError, match=refused):
        grids_of_coordinates(coordinates(0.0, 1.0).to("meta"))


# Models whose grid is read from the position ids. HiDream's is read from ``img_sizes``.
OF_IDS = [
    name
    for name, family in FAMILIES.items()
    if "img_ids" in family.inputs(1, 4, 4) and not name.startswith("HiDream")
]


@pytest.mark.parametrize("name", OF_IDS)
@pytest.mark.parametrize("planner", ["tiled", "tome"])
def test_position_ids_without_values_are_refused(name, planner):
    """A model on the meta device, as operations are counted by others."""
    family = FAMILIES[name]
    with torch.device("meta"):
        model = family.build()
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, planner=planner))
    rows, columns = family.fitting((8, 8))
    call = {
        key: value.to("meta") if isinstance(value, Tensor) else value
        for key, value in family.inputs(1, rows, columns).items()
    }
    refused = (
        r"img_ids: expected .*, got ids of shape \(.*\) without values, on the meta device; call "
        r"remove_token_merging\(pipe\) first, or patch.at_size"
    )
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=refused):
        model(**call)
    if name == "FluxTransformer2DModel":
        patch.at_size(2 * rows, 2 * columns)
        with torch.no_grad():
            assert model(**call).sample.is_meta
