"""Qwen-Image 2.1: one sequence of text and given images, then the image; only that attends to all of it.

The whole batch shares its rotary positions. Keys of what precedes the image can be cached between steps.
"""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import KEY_MASK, Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument, is_a
from tokenmerge.models.family import Blank, listed, transformer_host

CLASSES = ("QwenImage21Transformer2DModel",)

_WORDS = 512
_SLOT = 4  # tokens of an image for which one entry of ``img_mask`` stands
_POSITIONS = TokenArgument("rotary_emb", axes=(0,))
_VALID = TokenArgument("key_valid", axes=(1,), batched=True)
# It tells the image from what precedes it.
_TARGET = TokenArgument("target_token_mask", axes=(0,), alike=True)
_CACHE = "batches of several images with a cache of keys (use_kv_cache=True) stay dense"
_FLEX = "the mask of QwenImage21FlexAttnProcessor is for all tokens: a call with one stays dense"


def describe(root: Any) -> Host:
    """Find the blocks."""
    # A mask of flex attention has no entries that could be left out.
    flex = any(
        is_a(block.attn.processor, "QwenImage21FlexAttnProcessor") for block in root.transformer_blocks
    )
    facts: dict[str, Any] = {
        "text": "first",
        "dense_if": ("attention_mask",) if flex else (),
        "dense_by_image": ("layer_cache",),
    }
    attention = Layout(token_arguments=(_POSITIONS, _VALID, KEY_MASK), **facts)
    block = Layout(token_arguments=(_POSITIONS, _VALID, KEY_MASK, _TARGET), **facts)
    layers = (Layer("attn1", "attn", attention), Layer("ff", "img_mlp", Layout(text="first")))
    return transformer_host(
        root,
        listed(root, "transformer_blocks", layers, layout=block, block_layout=block),
        _others,
        words=_WORDS,
        grids=_grids,
        sample_size=(64, 64),
        fills_cache=_fills_cache,
        limits=(_CACHE, _FLEX) if flex else (_CACHE,),
    )


def _fills_cache(arguments: Arguments) -> bool:
    return arguments.get("kv_cache_mode") == "extract"


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    frames, rows, columns = arguments["img_shapes"][0][-1]
    return ((frames, rows, columns),)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    mask = zeros.full_mask(_WORDS + height * width // _SLOT)
    mask[:, :_WORDS] = False
    return {
        "hidden_states": zeros(height * width, config.in_channels),
        "encoder_hidden_states": zeros(_WORDS, config.context_in_dim),
        "img_shapes": [[(1, height, width)]] * zeros.batch,
        "img_mask": mask,
    }
