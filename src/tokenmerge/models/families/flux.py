"""FLUX.1, its ControlNets and models with the same structure: Chroma, Bria, FIBO, LongCat-Image, Ovis-Image.

Blocks with two streams are followed by blocks with one. The whole batch shares its rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tokenmerge.models.base import Host, Layer, is_a, listed
from tokenmerge.models.family import Blank, device_of_values, transformer_host
from tokenmerge.models.grids import grids_of_ids
from tokenmerge.models.layout import POSITIONS, Layout, TokenArgument

CLASSES = (
    "FluxTransformer2DModel",
    "FluxControlNetModel",
    "ChromaTransformer2DModel",
    "BriaTransformer2DModel",
    "BriaFiboTransformer2DModel",
    "LongCatImageTransformer2DModel",
    "OvisImageTransformer2DModel",
)

# In both kinds of block, position tables and masks cover text and image. An IP-Adapter adds a third result,
# which belongs to the image.
MASK = TokenArgument("attention_mask", axes=(-2, -1), batched=True, broadcasts_to=4)
_ATTENTION = Layout(text="first", token_arguments=(POSITIONS, MASK), outputs=(0, 2))
# Users pass a mask to all attention in a dictionary. Blocks of Chroma get another mask as [b, n]. Blocks
# return (text, image); single blocks of Chroma return one sequence.
_BLOCK = Layout(
    token_arguments=(
        POSITIONS,
        TokenArgument("attention_mask", axes=(1,), batched=True),
        replace(MASK, name="joint_attention_kwargs", element=MASK.name),
        replace(MASK, name="attention_kwargs", element=MASK.name),
    ),
    outputs=(1,),
)
_DOUBLE = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "ff"))
_SINGLE = (Layer("attn1", "attn", _ATTENTION),)
_FUSED = "single-stream blocks project attention and MLP together; merge_mlp leaves their MLP dense"


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    # The blocks of FIBO get their mask inside another argument.
    block_layout = None if is_a(root, "BriaFiboTransformer2DModel") else _BLOCK
    blocks = (
        *listed(root, "transformer_blocks", _DOUBLE, layout=Layout(outputs=(1,)), block_layout=block_layout),
        *listed(root, "single_transformer_blocks", _SINGLE, block_layout=block_layout, dense={"ff": _FUSED}),
    )
    return transformer_host(
        root,
        _example,
        blocks,
        grids=grids_of_ids,
        takes_references=True,
        sample_size=(128, 128),
        patch=2,
    )


def packed_ids(root: Any, sizes: Sequence[tuple[int, int]], axes: int) -> Tensor:
    """Make position ids ``[n, axes]`` of pictures in a row: number, row, column, zeros for each token.

    ``sizes`` are the heights and widths of their latents. A token is made of 2 × 2 latent positions.
    """
    pictures = []
    for number, (height, width) in enumerate(sizes):
        ids = torch.zeros(height // 2, width // 2, axes, device=device_of_values(root))
        ids[..., 0] = number
        ids[..., 1] += torch.arange(height // 2, device=ids.device)[:, None]
        ids[..., 2] += torch.arange(width // 2, device=ids.device)
        pictures.append(ids.view(-1, axes))
    return torch.cat(pictures)


def _example(
    root: Any, zeros: Blank, height: int, width: int, references: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    config, words = root.config, 512
    ids = packed_ids(root, [(height, width), *references], 3)
    tokens = zeros(len(ids), config.in_channels)
    arguments: dict[str, Any] = {
        "hidden_states": tokens,
        "encoder_hidden_states": zeros(words, config.joint_attention_dim),
        "img_ids": ids,
        "txt_ids": ids.new_zeros(words, 3),
        "controlnet_cond": tokens,
        "attention_mask": zeros.full_mask(words + len(ids)),
    }
    if pooled := getattr(config, "pooled_projection_dim", None):
        arguments["pooled_projections"] = zeros(pooled)
    if layers := getattr(root, "caption_projection", None):  # FIBO: a text embedding for each block
        arguments["text_encoder_layers"] = [zeros(words, config.text_encoder_dim) for _ in layers]
    if getattr(root, "input_hint_block", None) is not None:  # a ControlNet that takes the picture itself
        arguments["controlnet_cond"] = zeros(3, height * 8, width * 8)
    if getattr(root, "union", False):
        arguments["controlnet_mode"] = zeros.integers(1)
    known = signature(type(root).forward).parameters
    return {name: value for name, value in arguments.items() if name in known}
