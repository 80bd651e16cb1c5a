"""Images drawn in tiles, of several sizes: each tile merges as it does alone."""

from typing import Any

import hosts
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionUpscalePipeline,
    UNet2DConditionModel,
)
from tiny_pipeline import UNET

from tokenmerge import (
    Correction,
    MergeSharing,
    NothingToMergeError,
    StepReuse,
    ToMeConfig,
    apply_patch,
    apply_token_merging,
)

# The arithmetic of some schedulers of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

HALF: dict[str, Any] = {"ratio": 0.5, "max_downsample": 2}
SETTINGS = {
    "merging": ToMeConfig(**HALF),
    "blocks": ToMeConfig(**HALF, scope="block", planner="tiled"),
    "plans kept": ToMeConfig(**HALF, merge_sharing=MergeSharing(every=3, blocks=True)),
    "corrected": ToMeConfig(**HALF, correction=Correction(every=2)),
    "reused": ToMeConfig(**HALF, reuse=StepReuse(every=2)),
}
ALL = pytest.mark.parametrize("name", SETTINGS)
# Those in the middle, and what is left at the right, at the bottom and in the corner; rows and columns.
TILES = ((16, 16), (16, 10), (6, 16), (6, 10))


@pytest.fixture
def upscaler(pipe) -> StableDiffusionUpscalePipeline:
    torch.manual_seed(0)
    pipe.vae.register_to_config(scaling_factor=0.08333)  # that of the real upscaler, which it insists on
    made = StableDiffusionUpscalePipeline(
        vae=pipe.vae,
        text_encoder=pipe.text_encoder,
        tokenizer=pipe.tokenizer,
        unet=UNet2DConditionModel(**{**UNET, "in_channels": 7, "num_class_embeds": 1000}),
        low_res_scheduler=DDPMScheduler(beta_schedule="scaled_linear"),
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear"),
    )
    made.set_progress_bar_config(disable=True)
    return made


def upscaled(pipe: StableDiffusionUpscalePipeline, tile: tuple[int, int]) -> torch.Tensor:
    """One tile of an image, as latents."""
    picture = torch.linspace(0, 1, 3 * tile[0] * tile[1]).view(1, 3, *tile)
    seeded = torch.Generator().manual_seed(tile[0] * tile[1])
    given = {"generator": seeded, "num_inference_steps": 4, "noise_level": 20, "output_type": "latent"}
    return pipe("a cat", image=picture, **given).images


@ALL
def test_tiles_of_an_upscaler_are_those_that_each_is_alone(upscaler, name):
    """A generation for each tile, one after the other, as programs upscale large images."""
    dense = [upscaled(upscaler, tile) for tile in TILES]
    alone = []
    for tile in TILES:
        apply_token_merging(upscaler, SETTINGS[name])
        alone.append(upscaled(upscaler, tile))
    assert [tuple(found.shape[-2:]) for found in alone] == list(TILES)
    assert not any(torch.equal(a, b) for a, b in zip(alone, dense, strict=True))
    apply_token_merging(upscaler, SETTINGS[name])
    for _ in range(2):
        for tile, expected in zip(TILES, alone, strict=True):
            assert torch.equal(upscaled(upscaler, tile), expected)


@ALL
def test_tiles_within_a_step_are_those_that_each_is_alone(name):
    """One generation that calls the model for each tile in each step, as MultiDiffusion does."""
    unet, steps = hosts.unet(), 5
    given = [hosts.inputs(1, *tile, seed=seed) for seed, tile in enumerate(TILES)]

    def loop(tiles: list[dict[str, Any]]) -> list[torch.Tensor]:
        patch = apply_token_merging(unet, SETTINGS[name])
        found = []
        for index in range(steps):
            patch.at_step(index, steps)
            for tile in tiles:
                sample = (1 + index) * tile["sample"]
                found.append(hosts.call(unet, **{**tile, "sample": sample}))
        return found

    together = loop(given)
    for place, tile in enumerate(given):
        for found, expected in zip(together[place :: len(given)], loop([tile]), strict=True):
            assert torch.equal(found, expected)


def test_a_tile_that_is_too_small_is_an_error_that_apply_patch_turns_into_a_warning(upscaler):
    small = (2, 2)
    dense = upscaled(upscaler, small)
    apply_token_merging(upscaler.unet, ToMeConfig(ratio=0.2))
    with pytest.raises(NothingToMergeError, match="the sample gives 2 × 2 tokens"):
        upscaled(upscaler, small)
    expected = upscaled(upscaler, TILES[0])  # nothing of the call that was refused is left
    apply_patch(upscaler, ratio=0.2)
    with pytest.warns(UserWarning, match="until then a call with a sample of this size runs dense"):
        found = upscaled(upscaler, small)
    assert torch.equal(found, dense)
    assert torch.equal(upscaled(upscaler, TILES[0]), expected)
