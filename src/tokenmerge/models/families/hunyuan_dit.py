"""Hunyuan-DiT and its ControlNet: self- and cross-attention; the batch shares its rotary positions."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import ROTARY, Host, Layer, is_a
from tokenmerge.models.family import Blank, listed, transformer_host

_CONTROLNET = "HunyuanDiT2DControlNetModel"
CLASSES = ("HunyuanDiT2DModel", _CONTROLNET)

# Cross-attention applies rotary positions to its queries too, which are image tokens.
_LAYERS = (Layer("attn1", "attn1", ROTARY), Layer("attn2", "attn2", ROTARY), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks."""
    text = root.config.text_len, root.config.cross_attention_dim
    return transformer_host(root, listed(root, "blocks", _LAYERS), _others, text=text)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    tokens = (height // config.patch_size) * (width // config.patch_size)
    arguments = {
        "text_embedding_mask": zeros(config.text_len),
        "encoder_hidden_states_t5": zeros(config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": zeros(config.text_len_t5),
        "image_rotary_emb": (zeros().new_zeros(tokens, config.attention_head_dim),) * 2,
    }
    if config.use_style_cond_and_image_meta_size:
        arguments["image_meta_size"] = zeros(6)
        arguments["style"] = zeros.integers()
    if is_a(root, _CONTROLNET):
        arguments["controlnet_cond"] = zeros(config.in_channels, height, width)
    return arguments
