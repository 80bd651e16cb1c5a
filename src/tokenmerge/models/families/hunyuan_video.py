"""HunyuanVideo, 1.0 and 1.5, and HunyuanImage: joint attention with the text behind the image.

Rotary positions are the image's alone and shared by the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tokenmerge.models.base import GridShape, Host, Layer, is_a, listed
from tokenmerge.models.dummy_inputs import blank, device_of_values, full_mask
from tokenmerge.models.grids import video_grid
from tokenmerge.models.layout import Grid, Layout, TokenArgument

__all__ = ["CLASSES", "describe"]

# Height and width of the latents for 720p, and for 2048 × 2048 pixels; the later codecs compress more.
_SIZES = {
    "HunyuanVideoTransformer3DModel": (90, 160),
    "HunyuanVideo15Transformer3DModel": (45, 80),
    "HunyuanImageTransformer2DModel": (64, 64),
}
CLASSES = tuple(_SIZES)

_FRAMES = 33  # of the latents: 129 pictures
_POSITIONS = TokenArgument("image_rotary_emb", axes=(0,))
_ATTENTION = Layout(
    text="last", token_arguments=(_POSITIONS, TokenArgument("attention_mask", axes=(-1,), batched=True))
)
_DOUBLE = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "ff"))
_SINGLE = (Layer("attn1", "attn", _ATTENTION),)
# Its mask is the text's.
_DOUBLE_15 = (Layer("attn1", "attn", Layout(text="last", token_arguments=(_POSITIONS,))), Layer("ff", "ff"))
_FUSED = "blocks of a single stream project attention and MLP together; merge_mlp leaves their MLP dense"


def describe(root: Any) -> Host:
    """Find the blocks; 1.5 has those with two streams alone."""
    if is_a(root, "HunyuanVideo15Transformer3DModel"):
        blocks = listed(root, "transformer_blocks", _DOUBLE_15)
    else:
        blocks = (
            *listed(root, "transformer_blocks", _DOUBLE),
            *listed(root, "single_transformer_blocks", _SINGLE, dense={"ff": _FUSED}),
        )
    patch = root.config.patch_size
    return Host(
        root=root,
        blocks=blocks,
        sample="hidden_states",
        timestep="timestep",
        grid=_grid,
        sample_size=next(size for name, size in _SIZES.items() if is_a(root, name)),
        controlnet=False,
        example=partial(_example, root),
        patch=patch if isinstance(patch, int) else patch[-1],
        frames=1 if _of_pictures(root) else _FRAMES,
    )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    if not _of_pictures(root):
        return video_grid(root, arguments, last)
    sides = zip(arguments["hidden_states"].shape[2:], root.config.patch_size, strict=True)
    rows, columns = (side // length for side, length in sides)
    return 1, rows, columns


def _of_pictures(root: Any) -> bool:
    """Whether the sample is [b, c, h, w], as that of HunyuanImage, most of whose patches have two sides."""
    patch = root.config.patch_size
    return not isinstance(patch, int) and len(patch) == 2


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros, words = root.config, blank(root, batch), 256
    frames = () if _of_pictures(root) else (_FRAMES,)
    arguments: dict[str, Any] = {
        "hidden_states": zeros(config.in_channels, *frames, height, width),
        "timestep": torch.full_like(zeros(), 500),
        "encoder_hidden_states": zeros(words, config.text_embed_dim),
        "encoder_attention_mask": full_mask(root, batch, words),
    }
    if is_a(root, "HunyuanVideoTransformer3DModel"):
        arguments["pooled_projections"] = zeros(config.pooled_projection_dim)
    if getattr(config, "guidance_embeds", False):
        arguments["guidance"] = torch.full_like(zeros(), 6000)
    if getattr(config, "use_meanflow", False):
        arguments["timestep_r"] = zeros()
    if getattr(config, "text_embed_2_dim", None):
        arguments["encoder_hidden_states_2"] = zeros(words, config.text_embed_2_dim)
        arguments["encoder_attention_mask_2"] = full_mask(root, batch, words)
    if is_a(root, "HunyuanVideo15Transformer3DModel"):
        # Nothing but zeros says that there is no picture to start from: the model looks at the values.
        like = {"device": device_of_values(root), "dtype": root.dtype}
        arguments["image_embeds"] = torch.zeros(batch, 729, config.image_embed_dim, **like)
    return arguments
