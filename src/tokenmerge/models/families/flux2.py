"""FLUX.2: like FLUX.1, but positions have four axes, and single blocks run attention and MLP as one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Grids, Host, Layer, listed
from tokenmerge.models.families.flux import MASK, packed_ids
from tokenmerge.models.family import Blank, transformer_host
from tokenmerge.models.grids import grids_of_ids
from tokenmerge.models.layout import POSITIONS, Grid, Layout

CLASSES = ("Flux2Transformer2DModel",)

_ATTENTION = Layout(text="first", token_arguments=(POSITIONS, MASK))
_DOUBLE = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "ff"))
_SINGLE = (Layer("attn1", "attn", _ATTENTION),)
_FUSED = "single-stream blocks run attention and MLP as one layer, so merge_attn merges both"


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    return transformer_host(
        root,
        _example,
        (
            *listed(root, "transformer_blocks", _DOUBLE, layout=Layout(outputs=(1,))),
            *listed(root, "single_transformer_blocks", _SINGLE),
        ),
        grids=_grids,
        takes_references=True,
        sample_size=(128, 128),
        patch=2,
        limits=(_FUSED,),
    )


def _grids(root: Any, arguments: Mapping[str, Any], last: Grid) -> Grids:
    if mode := arguments.get("kv_cache_mode"):
        raise UnsupportedModelError(
            f"kv_cache_mode={mode!r}: keys and values of reference pictures are cached between steps, and "
            "merging would change their tokens; call remove_token_merging(pipe) first"
        )
    return grids_of_ids(root, arguments, last)


def _example(
    root: Any, zeros: Blank, height: int, width: int, references: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    config = root.config
    ids, words = packed_ids(root, [(height, width), *references], 4), 512
    return {
        "hidden_states": zeros(len(ids), config.in_channels),
        "encoder_hidden_states": zeros(words, config.joint_attention_dim),
        "img_ids": ids,
        "txt_ids": ids.new_zeros(words, 4),
    }
