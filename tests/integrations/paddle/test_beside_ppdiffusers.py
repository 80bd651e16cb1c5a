"""Without randomness, the results equal those of ppdiffusers' own apply_tome."""

import numpy as np
import paddle
import paddle_hosts as hosts
import pytest
from ppdiffusers.models.lora import LoRALinearLayer

from tokenmerge.paddle import apply_patch, remove_patch

SETTINGS = {
    "attention": {},
    "everything": {"merge_crossattn": True, "merge_mlp": True},
    "two levels": {"max_downsample": 2, "ratio": 0.7},
    "wide cells": {"sx": 4, "sy": 3, "ratio": 0.8},
}


def both(model, settings, *arguments):
    """The model's result with ppdiffusers' own patch, with ours, and dense; it is called by position."""

    def call():
        with paddle.no_grad():
            return [value.numpy() for value in _tensors(model(*arguments, return_dict=False))]

    dense = call()
    settings = {"ratio": 0.5, "use_rand": False, **settings}
    hosts.OWN_APPLY(model, **settings)
    theirs = call()
    hosts.OWN_REMOVE(model)
    apply_patch(model, **settings)
    ours = call()
    remove_patch(model)
    return theirs, ours, dense


def _tensors(result):
    return [
        part for each in result for part in (_tensors(each) if isinstance(each, (tuple, list)) else [each])
    ]


def assert_equal(theirs, ours, dense):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert np.abs(mine - other).max() <= 1e-4 * np.abs(other).max()
    apart = [np.abs(mine - same).max() / np.abs(same).max() for mine, same in zip(ours, dense, strict=True)]
    assert max(apart) > 1e-3  # merging does something


@pytest.mark.parametrize("size", [(16, 16), (24, 36), (17, 13)])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_unet_at_three_sizes(size, name):
    arguments = hosts.inputs(2, *size).values()
    assert_equal(*both(hosts.unet(), SETTINGS[name], *arguments))


def test_sdxl():
    settings = {"max_downsample": 2, "ratio": 0.6}
    sample, timestep, text = hosts.inputs().values()
    added = {"text_embeds": hosts.tensor(2, hosts.TEXT), "time_ids": paddle.ones([2, 6])}
    rest = [None, None, None, None, added]
    assert_equal(*both(hosts.sdxl(), settings, sample, timestep, text, *rest))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_controlnet(name):
    picture = hosts.tensor(2, 3, 32, 32)
    assert_equal(*both(hosts.controlnet(), SETTINGS[name], *hosts.inputs().values(), picture))


def test_with_gligen():
    unet = hosts.unet(attention_type="gated")
    for block in hosts.blocks(unet):
        block.fuser.alpha_attn.set_value(paddle.ones_like(block.fuser.alpha_attn))
    objects = {
        "boxes": paddle.rand([2, 3, 4]),
        "positive_embeddings": hosts.tensor(2, 3, hosts.TEXT),
        "masks": paddle.ones([2, 3]),
    }
    arguments = [*hosts.inputs().values(), None, None, None, {"gligen": objects}]
    theirs, ours, dense = both(unet, SETTINGS["everything"], *arguments)
    assert_equal(theirs, ours, dense)
    with paddle.no_grad():
        without = unet(*hosts.inputs().values()).sample.numpy()
    assert np.abs(without - dense[0]).max() > 1e-3


def test_with_lora():
    unet = hosts.unet()
    for i, block in enumerate(hosts.blocks(unet)):
        for linear in (block.attn1.to_q, block.attn1.to_v, block.attn2.to_q, block.attn2.to_out[0]):
            lora = LoRALinearLayer(linear.weight.shape[0], linear.weight.shape[1], rank=2)
            lora.up.weight.set_value(hosts.tensor(*lora.up.weight.shape, seed=i))
            linear.set_lora_layer(lora)
    arguments = hosts.inputs().values()
    half, full = (
        both(unet, SETTINGS["everything"], *arguments, None, None, None, {"scale": scale})
        for scale in (0.5, 1.0)
    )
    assert_equal(*half)
    assert_equal(*full)
    assert np.abs(half[1][0] - full[1][0]).max() > 1e-3


def test_with_chunks_of_the_batch():
    unet = hosts.unet()
    for block in hosts.blocks(unet):
        block.set_chunk_feed_forward(1, dim=0)
    assert_equal(*both(unet, {}, *hosts.inputs().values()))
