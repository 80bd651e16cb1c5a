"""CogVideoX and ConsisID: video, joint attention; text and image share one MLP call."""

from __future__ import annotations

import math
from typing import Any

from tokenmerge.models.base import PLAIN, ROTARY, Arguments, Grid, Grids, Host, Layer
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import patch_of

CLASSES = ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel")


def describe(root: Any) -> Host:
    """Find the blocks. The smaller checkpoints have no rotary positions."""
    config = root.config
    attention = ROTARY if config.use_rotary_positional_embeddings else PLAIN
    layers = (Layer("attn1", "attn1", attention), Layer("ff", "ff"))
    return transformer_host(
        root,
        listed(root, "transformer_blocks", layers, block_layout=attention),
        _others,
        text=(config.max_text_seq_length, config.text_embed_dim),
        grids=_grids,
        latent_frames=_frames(root),
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    patch_t, rows, columns = patch_of(root.config)
    _, frames, _, height, width = arguments["hidden_states"].shape
    return ((-(-frames // patch_t), height // rows, width // columns),)


def _frames(root: Any) -> int:
    """Return the number of latent frames that the model was made for, padded to whole patches."""
    frames = (root.config.sample_frames - 1) // root.config.temporal_compression_ratio + 1
    return frames + frames % patch_of(root.config)[0]


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    sample = zeros(zeros.frames, config.in_channels, height, width)
    arguments: dict[str, Any] = {"hidden_states": sample}
    if config.use_rotary_positional_embeddings:
        tokens = math.prod(_grids(root, arguments, Grid())[0])
        table = sample.new_zeros(tokens, config.attention_head_dim)
        arguments["image_rotary_emb"] = (table, table)
    if getattr(config, "ofs_embed_dim", None):
        arguments["ofs"] = zeros().fill_(2)
    if getattr(config, "is_train_face", False):
        face = root.local_facial_extractor
        arguments["id_cond"] = zeros(config.LFE_id_dim)
        arguments["id_vit_hidden"] = [zeros(577, config.LFE_vit_dim) for _ in range(face.num_scale)]
    return arguments
