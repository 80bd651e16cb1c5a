"""Tiny models of ppdiffusers with random weights, and calls of them."""

from __future__ import annotations

import numpy as np
import paddle
from ppdiffusers import ControlNetModel, UNet2DConditionModel

TEXT = 16
# ppdiffusers' own methods, saved before a test replaces them.
OWN_APPLY, OWN_REMOVE = paddle.nn.Layer.apply_tome, paddle.nn.Layer.remove_tome
SMALL = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "cross_attention_dim": TEXT,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
}


def unet(**changes):
    """Attention at levels 1 and 2: seven blocks, three of them at level 1."""
    paddle.seed(0)
    settings = {"sample_size": 16, **SMALL, "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D")}
    model = UNet2DConditionModel(**{**settings, **changes})
    model.eval()
    return model


def sdxl():
    """As in SDXL: no attention at level 1, several blocks a transformer, size and pooled text."""
    return unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=2,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + TEXT,
    )


def controlnet(seed=1, **changes):
    """As :func:`unet`; its zero convolutions are set to random values, so that it has an effect."""
    paddle.seed(seed)
    model = ControlNetModel(**{**SMALL, "conditioning_embedding_out_channels": (8, 16), **changes})
    for layer in [*model.controlnet_down_blocks, model.controlnet_mid_block]:
        layer.weight.set_value(0.1 * paddle.randn(layer.weight.shape))
    model.eval()
    return model


def tensor(*shape, seed=0):
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape).astype("float32"))


def inputs(batch=2, height=16, width=16):
    """Arguments of one call of :func:`unet`; image i is the same in a batch of any size."""
    return {
        "sample": paddle.stack([tensor(4, height, width, seed=i) for i in range(batch)]),
        "timestep": paddle.to_tensor(500),
        "encoder_hidden_states": paddle.stack([tensor(7, TEXT, seed=100 + i) for i in range(batch)]),
    }


def call(model, **arguments):
    """The model's result for these arguments, passed by keyword."""
    with paddle.no_grad():
        return model(**arguments).sample.numpy()


def run(model, batch=2, height=16, width=16):
    return call(model, **inputs(batch, height, width))


def blocks(model):
    found = model.named_sublayers(include_self=True)
    return [layer for _, layer in found if type(layer).__name__.endswith("BasicTransformerBlock")]


def everything(model):
    """What patching could leave on a model: the class and the attributes of each layer, and its hooks."""
    return [
        (type(layer), sorted(layer.__dict__), list(layer._forward_pre_hooks), list(layer._forward_post_hooks))
        for layer in model.sublayers(include_self=True)
    ]
