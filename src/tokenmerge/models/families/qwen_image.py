"""Qwen-Image, its editing models, QwenImage-Layered and ControlNets: joint attention of image and text.

Rotary positions (image, text) are shared by the batch.
"""

from __future__ import annotations

from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument, is_a
from tokenmerge.models.family import Blank, Sizes, listed, transformer_host

_CONTROLNET = "QwenImageControlNetModel"
CLASSES = ("QwenImageTransformer2DModel", _CONTROLNET)

_MADE = 5  # images that QwenImage-Layered makes: four layers, and all of them together
_POSITIONS = TokenArgument("image_rotary_emb", axes=(0,), element=0)
_ATTENTION = Layout(token_arguments=(_POSITIONS,))
# Editing models can modulate the tokens of the image being made and of others apart. Blocks return (text,
# image).
_MODULATION = TokenArgument("modulate_index", axes=(1,), batched=True)
_BLOCK = Layout(token_arguments=(_POSITIONS, _MODULATION), outputs=(1,))
_LAYERS = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "img_mlp"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _LAYERS, layout=_BLOCK, block_layout=_BLOCK),
        _others,
        text=(512, root.config.joint_attention_dim),
        grids=_grids,
        takes_references=True,
        sample_size=(128, 128),
        patch=2,
        latent_frames=_MADE if _is_layered(root) else 1,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    # QwenImage-Layered splits an image into several layers. The image that it splits is the last one.
    first = arguments["img_shapes"][0]
    images = [tuple(image) for image in (first if isinstance(first, list) else [first])]
    count = max(1, len(images) - 1) if _is_layered(root) else 1
    made = images[:count]
    references = images[count:]
    frames, rows, columns = made[0]
    if any(layer != made[0] for layer in made):
        raise UnsupportedModelError(
            f"img_shapes: expected layers of one size, got {made}; call remove_token_merging(pipe) first"
        )
    return (len(made) * frames, rows, columns), *references


def _is_layered(root: Any) -> bool:
    return getattr(root.config, "use_layer3d_rope", False)


def _others(root: Any, zeros: Blank, height: int, width: int, references: Sizes = ()) -> dict[str, Any]:
    config = root.config
    made = [(height, width)]
    if _is_layered(root):
        references = references or made  # there is always an image to split
        made = made * zeros.frames
    shapes = [(1, rows // 2, columns // 2) for rows, columns in [*made, *references]]
    tokens = zeros(sum(rows * columns for _, rows, columns in shapes), config.in_channels)
    arguments: dict[str, Any] = {"hidden_states": tokens, "img_shapes": [shapes] * zeros.batch}
    if getattr(config, "use_additional_t_cond", False):
        arguments["additional_t_cond"] = zeros.integers()
    if is_a(root, _CONTROLNET):
        channels = config.in_channels + config.extra_condition_channels
        arguments["controlnet_cond"] = zeros(tokens.shape[1], channels)
    return arguments
