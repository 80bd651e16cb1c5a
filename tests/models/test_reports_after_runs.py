"""After a call of any size, batch and number of frames, the report and the handle count that call."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from tests.models.test_every_family import EVERY, call, model_of, settings
from tests.models.tiny import FAMILIES

from tokenmerge import ConfigError, apply_token_merging
from tokenmerge.models.find import find_hosts

VIDEOS = [name for name, family in FAMILIES.items() if family.frames > 1]
PICTURES = 3


@EVERY
def test_the_report_after_a_call_counts_that_call(family):
    """Also a video of other frames than the model was made for, and another batch than it is called with."""
    model, (rows, columns) = model_of(family), family.fitting((12, 10))
    patch = apply_token_merging(model, settings(family))
    with patch.record() as recorded:
        call(model, family.inputs(PICTURES, rows, columns))
    report, shown = patch.report(), str(patch)
    assert report.batch == PICTURES
    ran = {path: (own.plan.inverse.shape[1], own.plan.keep.shape[1]) for path, own in recorded.items()}
    assert {row.path: (row.tokens, row.merged_tokens) for row in report.rows} == ran
    assert "not counted" not in shown
    assert f"merging: {max(tokens for tokens, _ in ran.values())} " in shown


@pytest.mark.parametrize("name", VIDEOS)
def test_a_report_of_a_video_takes_its_frames(name):
    family = FAMILIES[name]
    patch = apply_token_merging(model_of(family), settings(family))
    host = find_hosts(patch._denoiser.root)[0]
    side = 8 * host.patch
    counted = [patch.report(side, side, frames=frames * host.patch_frames) for frames in (4, 8)]
    assert [report.frames for report in counted] == [4, 8]
    assert [report.rows[0].grid for report in counted] == [(4, 8, 8), (8, 8, 8)]


def test_frames_are_refused_for_pictures():
    patch = apply_token_merging(model_of(FAMILIES["SD3Transformer2DModel"]), ratio=0.5)
    with pytest.raises(ConfigError, match="frames: SD3Transformer2DModel makes images"):
        patch.report(frames=3)


@pytest.mark.parametrize("frames", [0, 1.5, "9"])
def test_other_numbers_of_frames_are_refused(frames):
    patch = apply_token_merging(model_of(FAMILIES["WanTransformer3DModel"]), ratio=0.5)
    with pytest.raises(ConfigError, match="frames: expected an integer ≥ 1"):
        patch.report(frames=frames)


@pytest.mark.parametrize("way", [{"ratio": 0.5}, {"speedup": 2.0}])
def test_frames_are_those_of_a_call_of_the_pipeline(way):
    """As in f frames of video, of which the first one is a latent frame, and every four that follow."""
    model = model_of(FAMILIES["WanTransformer3DModel"])
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = WanPipeline(tokenizer=None, text_encoder=None, transformer=model, vae=vae, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    patch = apply_token_merging(pipe, **way)
    before = patch.report(128, 96, 3, batch=1, frames=9)
    words = {"prompt_embeds": torch.zeros(1, 7, 16), "negative_prompt_embeds": torch.ones(1, 7, 16)}
    pipe(height=128, width=96, num_frames=9, num_inference_steps=3, output_type="latent", **words)
    after = patch.report()
    assert before.frames == after.frames == 3
    assert before.rows == after.rows
    assert before.flops == after.flops
    assert "3 frames of tokens" in str(after)
