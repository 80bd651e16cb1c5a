"""Models that merge only in part, or not at all, and the messages about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.basic_dits import FAMILIES as DITS
from tests.models.family import seeded
from tests.models.test_every_family import call
from tests.models.unets import FAMILIES as UNETS

from tokenmerge import NothingToMergeError, ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.report import predict
from tokenmerge.runtime.patching.patch import state_of


def is_patched(module: torch.nn.Module) -> bool:
    return "_tokenmerge" in module.__dict__


@pytest.mark.parametrize(
    ("name", "temporal"),
    [
        ("UNetMotionModel", "AnimateDiffTransformer3D"),
        ("UNetMotionModel, FreeNoise", "AnimateDiffTransformer3D"),
        ("SparseControlNetModel", "AnimateDiffTransformer3D"),
        ("UNet3DConditionModel", "TransformerTemporalModel"),
        ("I2VGenXLUNet", "TransformerTemporalModel"),
        ("UNetSpatioTemporalConditionModel", "TemporalBasicTransformerBlock"),
    ],
)
def test_attention_over_time_is_left_alone(name, temporal):
    model = UNETS[name].build()
    apply_token_merging(model, ToMeConfig(ratio=0.5, max_downsample=2, merge_crossattn=True, merge_mlp=True))
    over_time = [m for m in model.modules() if type(m).__name__ == temporal]
    assert over_time
    assert not any(is_patched(part) for module in over_time for part in module.modules())


def test_the_temporal_blocks_of_latte_are_left_alone():
    model = DITS["LatteTransformer3DModel"].build()
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    assert all(is_patched(block) for block in model.transformer_blocks)
    assert not any(is_patched(part) for part in model.temporal_transformer_blocks.modules())


def test_the_mlp_of_sana_stays_dense_and_little_is_gained():
    model = DITS["SanaTransformer2DModel"].build()
    notes = predict(model, ToMeConfig(ratio=0.5, merge_mlp=True)).notes
    assert sum("the MLP of Sana convolves" in note for note in notes) == 1
    assert sum("merging gains little" in note for note in notes) == 1
    with pytest.raises(NothingToMergeError, match=r"has MLP that can merge; .* \(the MLP of Sana conv"):
        apply_token_merging(model, ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True))


def test_blocks_without_self_attention_are_counted_and_merge_at_cross_attention():
    model = DITS["UVit2DModel"].build()
    (note,) = predict(model, ToMeConfig(ratio=0.5)).notes
    assert note == "2 blocks do not merge: they have no self-attention"
    both = predict(model, ToMeConfig(ratio=0.5, merge_crossattn=True))
    assert [row.merged for row in both.rows] == ["attn1+attn2"] * 4


def test_a_level_without_self_attention_does_not_count_when_it_is_asked_for():
    patch = apply_token_merging(UNETS["DreamLiteUNetModel"].build(), ToMeConfig(ratio=0.5))
    assert [row.level for row in patch.report().rows] == [2] * 4


def test_the_draw_of_a_masked_image_model_follows_the_number_of_masked_tokens():
    family = DITS["UVit2DModel"]
    model, arguments = seeded(family.build()), family.inputs(1, 8, 8)
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    state = state_of(model)
    steps = set()
    for masked in range(3):
        ids = arguments["input_ids"] % 31
        ids.view(-1)[:masked] = 31
        call(model, {**arguments, "input_ids": ids})
        steps.add(int(state.context.seed))
    assert len(steps) == 3


def test_masks_of_an_ip_adapter_keep_cross_attention_dense_and_self_attention_merging():
    family = UNETS["UNet2DConditionModel, IP-Adapter"]
    model, arguments = seeded(family.build()), family.inputs(1, 8, 8)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    lengths: dict[str, int] = {}
    for name in ("attn1", "attn2"):
        getattr(block, name).to_q.register_forward_hook(
            lambda module, args, out, name=name: lengths.update({name: args[0].shape[1]})
        )
    apply_token_merging(model, ToMeConfig(ratio=0.5, merge_crossattn=True))
    call(model, arguments)
    assert lengths == {"attn1": 32, "attn2": 32}
    call(model, {**arguments, "cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 8, 8)]}})
    assert lengths == {"attn1": 32, "attn2": 64}


def _simple_cross_attention() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "UpBlock2D"),
    )


def test_unets_with_other_attention_name_it():
    with pytest.raises(
        UnsupportedModelError,
        match=r"its attention is in SimpleCrossAttnDownBlock2D, UNetMidBlock2DSimpleCrossAttn, Simple.*; "
        r"run it without token merging",
    ):
        apply_token_merging(_simple_cross_attention(), ToMeConfig(ratio=0.5, max_downsample=8))


def test_pipelines_with_a_transformer_and_with_controlnets():
    from diffusers import ControlNetXSAdapter, HunyuanDiT2DMultiControlNetModel

    config = ToMeConfig(ratio=0.5)
    nets = [DITS["HunyuanDiT2DControlNetModel"].build() for _ in range(2)]
    pipe = SimpleNamespace(
        transformer=DITS["HunyuanDiT2DModel"].build(), controlnet=HunyuanDiT2DMultiControlNetModel(nets)
    )
    patch = apply_token_merging(pipe, config)
    assert all(is_patched(model) for model in (pipe.transformer, *nets))
    patch.remove()
    assert not any(is_patched(model) for model in (pipe.transformer, *nets))

    adapter = ControlNetXSAdapter(
        base_block_out_channels=(16, 32), block_out_channels=(8, 16), down_block_types=("DownBlock2D",) * 2
    )
    pipe = SimpleNamespace(unet=UNETS["UNetControlNetXSModel"].build(), controlnet=adapter)
    apply_token_merging(pipe, config)
    assert is_patched(pipe.unet)
    assert not is_patched(adapter)  # it holds weights and is never called


def test_blocks_without_text_attend_to_the_sound_twice_and_merge_both():
    rows = predict(UNETS["AudioLDM2UNet2DConditionModel"].build(), ToMeConfig(ratio=0.5)).rows
    assert [row.merged for row in rows[:3]] == ["attn1+attn2", "attn1", "attn1"]


def test_models_whose_attention_takes_pictures_are_refused_by_name():
    from diffusers import Kandinsky3UNet

    with pytest.raises(UnsupportedModelError, match="in Kandinsky3UNet yet: its attention takes an image"):
        apply_token_merging(torch.nn.Module.__new__(Kandinsky3UNet), ToMeConfig(ratio=0.5))
