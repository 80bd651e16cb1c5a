"""What is special about single models: caches of keys, given frames, sound, roles of tokens, timesteps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import StepReuse, ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.models.families import hidream, ltx2, unidiffuser
from tokenmerge.models.find import find_hosts
from tokenmerge.models.work import work_of

HALF = ToMeConfig(ratio=0.5)
QWEN = "QwenImage21Transformer2DModel"


def with_cache(model: nn.Module, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """The results of two steps, of which the first fills a cache of keys, and those keys."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    cache = QwenImage21KVCache(3)
    inputs = FAMILIES[QWEN].inputs(batch, 8, 8)
    results = [
        call(model, {**inputs, "kv_cache": cache, "kv_cache_mode": mode}) for mode in ("extract", "cached")
    ]
    return results, [cache.get_layer(place).k for place in range(3)]


def test_what_precedes_an_image_does_not_see_that_it_merges():
    """So its keys can be cached, and merged tokens attend to them."""
    model = model_of(FAMILIES[QWEN])
    dense, keys = with_cache(model, 1)
    apply_token_merging(model, HALF)
    merged, same_keys = with_cache(model, 1)
    assert_close(same_keys, keys)
    # The second call returns the image alone.
    assert_close(merged[0][:, -64:], merged[1][:, -64:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged[1], dense[1], rtol=1e-4)


def test_a_step_that_fills_a_cache_of_keys_is_counted_as_a_dense_one():
    """The plan is for the steps after it."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    model, inputs = model_of(FAMILIES[QWEN]), FAMILIES[QWEN].inputs(1, 8, 8)
    patch = apply_token_merging(model, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    cache = QwenImage21KVCache(3)
    ran: list[int] = []
    model.transformer_blocks[0].attn.to_q.register_forward_hook(lambda *_: ran.append(index))
    for index in range(6):
        patch.at_step(index, 6)
        call(model, {**inputs, "kv_cache": cache, "kv_cache_mode": "cached" if index else "extract"})
    assert ran == [0, 1, 2, 5]
    report = patch.report()
    assert report.step_signs == "DDD··D"
    assert [flops < report.flops_dense for flops in report.flops_of_steps] == [
        step not in ran for step in range(6)
    ]
    assert report.flops_mean == round(sum(report.flops_of_steps) / 6)
    assert "6 steps, of which 1 fills a cache" in str(patch)
    assert patch.report(steps=10).step_signs[0] == "D"
    assert patch.report(steps=10).steps == 10


def test_a_cache_of_keys_for_several_images_keeps_them_dense():
    """Attention would have to be called for one image after the other, and the cache holds all of them."""
    model = model_of(FAMILIES[QWEN])
    dense, _ = with_cache(model, 3)
    apply_token_merging(model, HALF)
    merged, _ = with_cache(model, 3)
    for one, other in zip(merged, dense, strict=True):
        assert torch.equal(one, other)


def test_a_mask_of_flex_attention_keeps_a_call_dense():
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor

    model: Any = model_of(FAMILIES[QWEN])
    model.set_attn_processor(QwenImage21FlexAttnProcessor())
    block = find_hosts(model)[0].blocks[0]
    assert block.block_layout is not None
    assert block.block_layout.dense_if == ("attention_mask",)


def places(times: list[float], rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Times, rows and columns of the tokens of frames: ``[3, n]``."""
    sides = [torch.tensor(times), torch.arange(rows) * scale, torch.arange(columns) * scale]
    return torch.cartesian_prod(*sides).T


@pytest.mark.parametrize(
    ("given", "frames"),
    [
        ([], 3),
        ([places([1.0], 4, 6)], 3),  # a keyframe
        ([places([0.0, 2.0], 4, 6)], 3),  # a reference video of the same size
        ([places([0.0, 1.0, 3.0], 2, 3, 2.0)], 3),  # and of half the size
    ],
)
@pytest.mark.parametrize("bounds", [False, True])
def test_frames_that_were_given_are_no_part_of_the_video(given, frames, bounds):
    found = torch.cat([places([0.0, 1.0, 3.0], 4, 6), *given], dim=1)
    found = torch.stack([found, found + 1], dim=-1) if bounds else found
    assert ltx2._read(found) == ((frames, 4, 6),)


def test_a_single_frame_is_read():
    assert ltx2._read(places([0.0], 4, 6)) == ((1, 4, 6),)


def test_a_part_of_a_video_is_read_from_its_places():
    """A pipeline that draws a video in tiles gives the sides of the whole video."""
    model = model_of(FAMILIES["LTX2VideoTransformer3DModel"])
    inputs = FAMILIES["LTX2VideoTransformer3DModel"].inputs(1, 8, 8)
    found = places([0.0, 1.0, 3.0], 8, 8)
    tile = {**inputs, "video_coords": found.repeat(1, 1, 1), "num_frames": 9}
    patch = apply_token_merging(model, HALF)
    with patch.record() as recorded:
        call(model, tile)
    assert {own.grid for own in recorded.values()} == {(3, 8, 8)}
    with pytest.raises(UnsupportedModelError, match="num_frames, height, width, video_coords: expected"):
        call(model, {**inputs, "height": None})


def test_sound_is_extrapolated_beside_the_video():
    name = "LTX2VideoTransformer3DModel"
    model, inputs = model_of(FAMILIES[name]), FAMILIES[name].inputs(2, 8, 8)
    patch = apply_token_merging(model, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    results = []
    ran: list[int] = []
    model.transformer_blocks[0].audio_ff.register_forward_hook(lambda *_: ran.append(len(results)))
    for index in range(3):
        patch.at_step(index, 6)
        with torch.no_grad():
            results.append(model(**inputs))
    assert ran == [0, 1]
    for one, other in zip(results[1].to_tuple(), results[2].to_tuple(), strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


def test_images_of_several_sizes_in_a_batch_are_refused():
    name = "HiDreamImageTransformer2DModel, padded"
    model, inputs = model_of(FAMILIES[name]), FAMILIES[name].inputs(2, 8, 8)
    apply_token_merging(model, HALF)
    with pytest.raises(UnsupportedModelError, match=r"img_sizes: expected images of one size, got \[\(4, 16"):
        call(model, {**inputs, "img_sizes": [(8, 8), (4, 16)]})
    sizes = torch.tensor([[8, 8], [8, 8]])
    assert hidream._grids(model, {**inputs, "img_sizes": sizes}, find_hosts(model)[0]) == ((1, 8, 8),)


def test_an_expert_works_on_its_share_of_the_tokens():
    """Half of the four experts see each token."""
    host = find_hosts(FAMILIES["HiDreamImageTransformer2DModel"].build())[0]
    assert host.shares == {".experts.": 0.5}
    whole = sum(share.amount.at(64) for share in work_of(host).shares)
    object.__setattr__(host, "shares", {})
    assert sum(share.amount.at(64) for share in work_of(host).shares) > whole


@pytest.mark.parametrize("wrong", ["first", "other sample", "no image"])
def test_tokens_of_an_image_that_are_not_at_the_end_are_refused(wrong):
    name = "Ideogram4Transformer2DModel"
    model, inputs = model_of(FAMILIES[name]), FAMILIES[name].inputs(2, 8, 8)
    apply_token_merging(model, HALF)
    roles = inputs["indicator"]
    roles = {
        "first": roles.flip(1),
        "other sample": torch.stack([roles[0], roles[1].flip(0)]),
        "no image": torch.full_like(roles, 3),
    }[wrong]
    with pytest.raises(UnsupportedModelError, match="position_ids, indicator: expected the tokens of one"):
        call(model, {**inputs, "indicator": roles})


@pytest.mark.parametrize(
    ("image", "text", "step"),
    [(500, 0, 500), (500, 1000, 500), (0, 500, 500), (1000, 500, 500), (500, 500, 500)],
)
def test_the_step_is_that_of_what_is_denoised(image, text, step):
    """A pipeline gives 0 for what is known, and the largest timestep for what guidance leaves out."""
    arguments = {"timestep_img": torch.tensor([image, image]), "timestep_text": text}
    assert unidiffuser._time(None, arguments) == step
