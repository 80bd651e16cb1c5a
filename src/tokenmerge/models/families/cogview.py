"""CogView3-Plus and CogView4: joint attention; CogView4 has rotary positions for the image."""

from __future__ import annotations

from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import ROTARY, Arguments, Grid, Grids, Host, Layer, is_a
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import picture_grids

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
    return transformer_host(root, blocks, _sizes, text=(224, root.config.text_embed_dim), grids=_grids)


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    if "batch_flag" in (arguments.get("attention_kwargs") or {}):
        raise UnsupportedModelError(
            "attention_kwargs: batch_flag packs samples into one sequence, which has no token grid; train "
            "without packing, or call remove_token_merging(model) first"
        )
    return picture_grids(root, arguments, last)


def _sizes(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    size = zeros(2).fill_(1024)
    return {"original_size": size, "target_size": size, "crop_coords": zeros(2)}
