"""Stable Diffusion 3 and 3.5 and their ControlNets: joint attention of image and text, no position tables."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Arguments, Grid, Grids, Host, Layer, Layout, is_a
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import picture_grids

_CONTROLNET = "SD3ControlNetModel"
CLASSES = ("SD3Transformer2DModel", _CONTROLNET)

# Some blocks of 3.5 medium have a second self-attention, for the image only.
_LAYERS = (Layer("attn1", "attn", Layout(text="last")), Layer("attn1", "attn2"), Layer("ff", "ff"))
_BLOCK = Layout(outputs=(1,))  # a block returns (text, image)


def describe(root: Any) -> Host:
    """Find the blocks."""
    blocks = listed(root, "transformer_blocks", _LAYERS, block_layout=_BLOCK)
    return transformer_host(root, blocks, _others, grids=_grids)


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    # A ControlNet without position embeddings takes tokens as its sample; its condition is always latents.
    latents = arguments["controlnet_cond" if is_a(root, _CONTROLNET) else "hidden_states"]
    return picture_grids(root, {"hidden_states": latents}, last)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    arguments = {"pooled_projections": zeros(config.pooled_projection_dim)}
    if root.context_embedder is not None:
        arguments["encoder_hidden_states"] = zeros(77 + 256, config.joint_attention_dim)
    if is_a(root, _CONTROLNET):
        channels = config.in_channels + config.extra_conditioning_channels
        arguments["controlnet_cond"] = zeros(channels, height, width)
        if root.pos_embed is None:
            tokens = (height // config.patch_size) * (width // config.patch_size)
            arguments["hidden_states"] = zeros(tokens, root.inner_dim)
    return arguments
