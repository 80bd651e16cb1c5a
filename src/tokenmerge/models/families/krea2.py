"""Krea 2: one sequence of text and image; the whole batch shares its rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from tokenmerge.models.base import KEY_MASK, POSITIONS, Arguments, Grid, Grids, Host, Layer, Layout
from tokenmerge.models.family import Blank, listed, position_ids, transformer_host
from tokenmerge.models.grids import grids_of_ids

CLASSES = ("Krea2Transformer2DModel",)

_WORDS = 512
_BLOCK = Layout(text="first", token_arguments=(POSITIONS, KEY_MASK))
_LAYERS = (Layer("attn1", "attn", _BLOCK), Layer("ff", "ff", Layout(text="first")))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _LAYERS, layout=_BLOCK, block_layout=_BLOCK),
        _others,
        words=_WORDS,
        # Some blocks attend to the layers of the text encoder, for each word.
        shares={"layerwise_blocks": root.config.num_text_layers},
        grids=_grids,
        sample_size=(128, 128),
        patch=2,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    text = arguments["encoder_hidden_states"].shape[1]
    return grids_of_ids(root, arguments, last, "position_ids", text)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    ids = position_ids(root, [(height, width)])
    return {
        "hidden_states": zeros(len(ids), config.in_channels),
        # Tokens of several layers of the text encoder.
        "encoder_hidden_states": zeros(_WORDS, config.num_text_layers, config.text_hidden_dim),
        "encoder_attention_mask": zeros.full_mask(_WORDS),
        "position_ids": torch.cat([ids.new_zeros(_WORDS, 3), ids]),
    }
