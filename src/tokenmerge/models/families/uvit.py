"""aMUSEd: a masked image model, with a transformer between two stages of convolutions and cross-attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenmerge.models.base import PLAIN, Arguments, Grid, Grids, Host, Layer
from tokenmerge.models.family import Blank, basic_blocks, listed, transformer_host

CLASSES = ("UVit2DModel",)

# Both attentions of a block in the outer stages attend to the text.
_OUTER = (Layer("attn2", "attn1"), Layer("attn2", "attn2"))


def describe(root: Any) -> Host:
    """Find the blocks of all three parts, which have the same tokens."""
    blocks = (
        *listed(root, "down_block.attention_blocks", _OUTER, block_layout=PLAIN),
        *basic_blocks(root, "transformer_layers"),
        *listed(root, "up_block.attention_blocks", _OUTER, block_layout=PLAIN),
    )
    return transformer_host(
        root,
        blocks,
        _others,
        text=(77, root.config.encoder_hidden_size),
        sample="input_ids",
        timestep=_masked,
        grids=_grids,
        patch=2 if root.config.downsample else 1,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    stride = 2 if root.config.downsample else 1
    rows, columns = (-(-side // stride) for side in arguments["input_ids"].shape[-2:])
    return ((1, rows, columns),)


def _masked(root: Any, arguments: Arguments) -> Tensor:
    """Count the tokens that are still masked: nothing else changes with the step."""
    return (arguments["input_ids"] == root.config.vocab_size - 1).sum(dim=(1, 2)).max()


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    return {
        "input_ids": zeros.integers(height, width),
        "pooled_text_emb": zeros(config.cond_embed_dim),
        "micro_conds": zeros(config.micro_cond_embed_dim // config.micro_cond_encode_dim),
    }
