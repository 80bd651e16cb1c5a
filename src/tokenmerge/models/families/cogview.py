"""CogView3-Plus and CogView4: joint attention; CogView4 has rotary positions for the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Grids, Host, Layer, is_a, listed
from tokenmerge.models.family import Blank, transformer_host
from tokenmerge.models.grids import picture_grids
from tokenmerge.models.layout import ROTARY, Grid

CLASSES = ("CogView3PlusTransformer2DModel", "CogView4Transformer2DModel")

_PLUS = (Layer("attn1", "attn1"), Layer("ff", "ff"))
_FOUR = (Layer("attn1", "attn1", ROTARY),)
_SHARED = "CogView4 runs one MLP on the image and then on the text; merge_mlp leaves it dense"


def describe(root: Any) -> Host:
    """Find the blocks."""
    if is_a(root, "CogView4Transformer2DModel"):
        blocks = listed(root, "transformer_blocks", _FOUR, dense={"ff": _SHARED})
    else:
        blocks = listed(root, "transformer_blocks", _PLUS)
    return transformer_host(root, _example, blocks, grids=_grids)


def _grids(root: Any, arguments: Mapping[str, Any], last: Grid) -> Grids:
    if "batch_flag" in (arguments.get("attention_kwargs") or {}):
        raise UnsupportedModelError(
            "attention_kwargs: batch_flag packs samples into one sequence, which has no token grid; train "
            "without packing, or call remove_token_merging(model) first"
        )
    return picture_grids(root, arguments, last)


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    return {
        "hidden_states": zeros(config.in_channels, height, width),
        "encoder_hidden_states": zeros(224, config.text_embed_dim),
        "original_size": zeros(2).fill_(1024),
        "target_size": zeros(2).fill_(1024),
        "crop_coords": zeros(2),
    }
