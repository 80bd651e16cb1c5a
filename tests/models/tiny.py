"""A tiny random model of every family, of the real classes, with a call of any size."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from tests.models import basic_dits, dits, sequences, unets, videos
from tests.models.family import TEXT, WORDS, Family, noise, seeded

from tokenmerge.models.find import find_hosts

__all__ = ["FAMILIES", "Family", "distinct", "noise", "seeded"]


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=TEXT,
        caption_projection_dim=32,
        pooled_projection_dim=TEXT,
        out_channels=4,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _sd3_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "pooled_projections": noise(batch, TEXT),
        "timestep": torch.full((batch,), 500.0),
    }


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        axes_dims_rope=(2, 2, 4),
    )


def _flux_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    return {
        "hidden_states": noise(batch, rows * columns, 4),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "pooled_projections": noise(batch, TEXT),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(WORDS, 3),
    }


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


def _wan_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 3, 2 * rows, 2 * columns),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
    }


FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": Family(_sd3, _sd3_inputs, attention=("attn", "attn2")),
    "FluxTransformer2DModel": Family(_flux, _flux_inputs, attention=("attn",)),
    "WanTransformer3DModel": Family(_wan, _wan_inputs, frames=3),
    **unets.FAMILIES,
    **basic_dits.FAMILIES,
    **dits.FAMILIES,
    **sequences.FAMILIES,
    **videos.FAMILIES,
}


@functools.cache
def distinct() -> tuple[str, ...]:
    """Return the names of families that differ in what token merging knows of them, the first of each kind.

    Families of one kind have blocks of the same layouts and levels, and are called in the same way.
    """
    kinds: dict[Hashable, str] = {}
    for name, family in FAMILIES.items():
        kinds.setdefault(structure(family), name)
    return tuple(kinds.values())


def structure(family: Family) -> Hashable:
    """Return the facts about a family's model that its merging depends on."""
    host = find_hosts(family.build())[0]
    blocks = frozenset(
        (
            b.layers,
            b.layout,
            b.block_layout,
            b.skippable,
            b.method,
            b.grid is None,
            b.level,
            frozenset(b.dense),
        )
        for b in host.blocks
    )
    functions = tuple(
        f if f is None or isinstance(f, str) else f.__qualname__
        for f in (host.timestep, host.grids, host.latents)
    )
    stages = bool(host.deep_stages), bool(host.shallow_stages)
    called = host.sample, host.patch, host.frames > 1, host.controlnet, host.takes_references
    return blocks, functions, stages, called, family.mixes, family.square
