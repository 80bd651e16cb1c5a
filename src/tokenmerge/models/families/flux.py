"""FLUX.1, its ControlNets, FLUX.2 and models like them: Chroma, Bria, FIBO, LongCat-Image, Ovis-Image.

Blocks with two streams are followed by blocks with one. The whole batch shares its rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import POSITIONS, Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument, is_a
from tokenmerge.models.family import FUSED_MLP, Blank, Sizes, listed, position_ids, transformer_host
from tokenmerge.models.grids import grids_of_ids

_SECOND = "Flux2Transformer2DModel"
CLASSES = (
    "FluxTransformer2DModel",
    "FluxControlNetModel",
    _SECOND,
    "ChromaTransformer2DModel",
    "BriaTransformer2DModel",
    "BriaFiboTransformer2DModel",
    "LongCatImageTransformer2DModel",
    "OvisImageTransformer2DModel",
)

# In both kinds of block, position tables and masks cover text and image. An IP-Adapter adds a third result,
# which belongs to the image.
_MASK = TokenArgument("attention_mask", axes=(-2, -1), batched=True, broadcasts_to=4)
_ATTENTION = Layout(text="first", token_arguments=(POSITIONS, _MASK), outputs=(0, 2))
# Users pass a mask to all attention in a dictionary. Blocks of Chroma get another mask as [b, n]. Blocks
# return (text, image); single blocks of Chroma return one sequence.
_BLOCK = Layout(
    token_arguments=(
        POSITIONS,
        TokenArgument("attention_mask", axes=(1,), batched=True),
        replace(_MASK, name="joint_attention_kwargs", element=_MASK.name),
        replace(_MASK, name="attention_kwargs", element=_MASK.name),
    ),
    outputs=(1,),
)
_LAYERS = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "ff"))
_ONE_LAYER = "single-stream blocks run attention and MLP as one layer, so merge_attn merges both"
_WORDS = 512


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    second = is_a(root, _SECOND)
    dense = {} if second else {"ff": FUSED_MLP}
    blocks = (
        *listed(root, "transformer_blocks", _LAYERS, layout=Layout(outputs=(1,)), block_layout=_BLOCK),
        *listed(root, "single_transformer_blocks", _LAYERS, block_layout=_BLOCK, dense=dense),
    )
    return transformer_host(
        root,
        blocks,
        _others,
        text=(_WORDS, root.config.joint_attention_dim),
        grids=_grids,
        takes_references=True,
        sample_size=(128, 128),
        patch=2,
        limits=(_ONE_LAYER,) if second else (),
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    mode = arguments.get("kv_cache_mode")
    if mode:
        raise UnsupportedModelError(
            f"kv_cache_mode={mode!r}: keys and values of reference images are cached between steps, and "
            "merging would change their tokens; call remove_token_merging(pipe) first"
        )
    return grids_of_ids(root, arguments, last)


def _others(root: Any, zeros: Blank, height: int, width: int, references: Sizes = ()) -> dict[str, Any]:
    config = root.config
    ids = position_ids(root, [(height, width), *references], axes=4 if is_a(root, _SECOND) else 3)
    tokens = zeros(len(ids), config.in_channels)
    arguments: dict[str, Any] = {
        "hidden_states": tokens,
        "img_ids": ids,
        "txt_ids": ids.new_zeros(_WORDS, ids.shape[1]),
        "controlnet_cond": tokens,
        "attention_mask": zeros.full_mask(_WORDS + len(ids)),
    }
    pooled = getattr(config, "pooled_projection_dim", None)
    if pooled:
        arguments["pooled_projections"] = zeros(pooled)
    layers = getattr(root, "caption_projection", None)
    if layers:  # FIBO takes a text embedding for each block
        arguments["text_encoder_layers"] = [zeros(_WORDS, config.text_encoder_dim) for _ in layers]
    if getattr(root, "input_hint_block", None) is not None:  # a ControlNet that takes the image itself
        arguments["controlnet_cond"] = zeros(3, height * 8, width * 8)
    if getattr(root, "union", False):
        arguments["controlnet_mode"] = zeros.integers(1)
    known = signature(type(root).forward).parameters
    return {name: value for name, value in arguments.items() if name in known}
