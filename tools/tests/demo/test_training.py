"""Parts of the training: loading exported weights, positions of small images, merging."""

from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionPipeline
from tools.training.mmdit import EmojiMMDiT
from tools.training.text import encode
from tools.training.train import set_merging
from tools.training.unet import EmojiUNet

from tokenmerge import presets
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge_tools import demo

CAPTION = "a red apple on a light blue background"


@pytest.fixture(scope="module")
def mmdit() -> EmojiMMDiT:
    torch.manual_seed(0)
    return EmojiMMDiT([CAPTION])


def test_words_keep_their_meaning_in_another_vocabulary() -> None:
    pipe = StableDiffusionPipeline.from_pretrained(demo.path("emoji-unet"))
    model = EmojiUNet([CAPTION, "a zebra crossing"]).eval()
    assert len(model.tokenizer) != len(pipe.tokenizer)
    model.load_exported(demo.path("emoji-unet"))
    with torch.no_grad():
        found = encode(model.tokenizer, model.text_encoder, [CAPTION])
        expected = encode(pipe.tokenizer, pipe.text_encoder, [CAPTION])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [128, 256])
def test_a_whole_picture_has_the_positions_that_the_pipeline_gives_it(size: int, mmdit: EmojiMMDiT) -> None:
    embedding = mmdit.transformer.pos_embed
    latents = torch.randn(1, 4, size // 4, size // 4)
    expected = embedding(latents)
    with mmdit.standing_for(size, size // 4):
        assert torch.equal(embedding(latents), expected)
    assert torch.equal(embedding(latents), expected)


def test_a_small_picture_has_the_mean_positions_of_what_it_stands_for(mmdit: EmojiMMDiT) -> None:
    embedding = mmdit.transformer.pos_embed
    content = embedding.proj.bias.view(1, 1, -1)  # of empty latents
    whole = (embedding(torch.zeros(1, 4, 64, 64)) - content).view(64, 64, -1)
    with mmdit.standing_for(256, 16):
        part = (embedding(torch.zeros(1, 4, 16, 16)) - content).view(16, 16, -1)
    expected = whole.view(16, 4, 16, 4, -1).mean(dim=(1, 3))
    torch.testing.assert_close(
        part, expected, rtol=0, atol=2e-6
    )  # positions are at most 1 large: few roundings


def test_positions_come_back_after_an_error(mmdit: EmojiMMDiT) -> None:
    embedding = mmdit.transformer.pos_embed
    before = embedding.pos_embed, embedding.pos_embed_max_size
    with pytest.raises(RuntimeError, match="stop"), mmdit.standing_for(256, 16):
        raise RuntimeError("stop")
    assert embedding.pos_embed is before[0]
    assert embedding.pos_embed_max_size == before[1]


def test_tokens_merge_while_training_and_gradients_reach_every_weight() -> None:
    torch.manual_seed(0)
    model = EmojiUNet([CAPTION])
    latents = torch.randn(1, 4, 32, 32)

    def loss_and_gradients() -> tuple[float, list[bool]]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = model.loss(latents, [CAPTION])
        loss.backward()
        return loss.item(), [
            bool(weight.grad.any()) for weight in model.unet.parameters() if weight.grad is not None
        ]

    dense, reached = loss_and_gradients()
    assert len(reached) == len(list(model.unet.parameters()))
    set_merging(model, presets.todo())
    assert state_of(model.unet) is not None
    merged, reached_merged = loss_and_gradients()
    assert merged != dense
    assert reached_merged == reached
    set_merging(model, None)
    assert state_of(model.unet) is None
    assert loss_and_gradients() == (dense, reached)
