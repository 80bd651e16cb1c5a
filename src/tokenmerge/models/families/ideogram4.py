"""Ideogram 4: one sequence of padding, text and image; each sample has its own rotary positions and mask."""

from __future__ import annotations

from typing import Any

import torch

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import OWN_POSITIONS, Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, position_ids, transformer_host
from tokenmerge.models.grids import grids_of_rows, known_grids
from tokenmerge.ops.once import once

CLASSES = ("Ideogram4Transformer2DModel",)

_WORDS = 512
_IMAGE = 2  # the role of tokens of the image
_TEXT = 3  # and of those of the text
_MASK = TokenArgument("attention_mask", axes=(-2, -1), batched=True)
_ATTENTION = Layout(text="first", token_arguments=(OWN_POSITIONS, _MASK))
# Each token can have a timestep.
_TIMES = TokenArgument("adaln_input", axes=(1,), batched=True)
_BLOCK = Layout(text="first", token_arguments=(OWN_POSITIONS, _MASK, _TIMES))
_LAYERS = (Layer("attn1", "attention", _ATTENTION), Layer("ff", "feed_forward", Layout(text="first")))


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "layers", _LAYERS, layout=_BLOCK, block_layout=_BLOCK),
        _others,
        words=_WORDS,
        grids=_grids,
        sample_size=(128, 128),
        patch=2,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    ids = arguments["position_ids"]
    roles = arguments["indicator"]
    if torch.compiler.is_compiling():
        return known_grids(last, "position_ids", arguments["hidden_states"].shape[1])

    def read() -> Grids:
        is_image = roles == _IMAGE
        tokens = int(is_image[0].sum())
        # In each sample the image is at the end, and nothing else is.
        if not tokens or is_image[:, :-tokens].any() or not is_image[:, -tokens:].all():
            return ()
        return grids_of_rows(ids[0, -tokens:])

    grids = () if ids.is_meta or roles.is_meta else once(ids, "grids", read, roles)
    if len(grids) == 1:
        return grids
    raise UnsupportedModelError(
        "position_ids, indicator: expected the tokens of one image behind those of the text, got others in a "
        f"sequence of {ids.shape[1]} tokens; generate one image in each sample, or call "
        "remove_token_merging(pipe) first"
    )


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    ids = position_ids(root, [(height, width)]).long()
    text = ids.new_zeros(_WORDS, 3)
    ids = torch.cat([text, ids]).expand(zeros.batch, -1, -1)
    roles = torch.full(ids.shape[:2], _IMAGE, device=ids.device)
    roles[:, :_WORDS] = _TEXT
    return {
        "hidden_states": zeros(ids.shape[1], config.in_channels),
        "encoder_hidden_states": zeros(ids.shape[1], config.llm_features_dim),
        "position_ids": ids,
        "segment_ids": torch.ones_like(roles),
        "indicator": roles,
    }
