"""Other transformers for video: Allegro, Cosmos Predict, EasyAnimate, Mochi 1, SANA-Video."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tokenmerge.models.base import KEY_MASK, POSITIONS, ROTARY, Host, Layer, Layout, TokenArgument, is_a
from tokenmerge.models.family import Blank, listed, transformer_host

# Allegro has self- and cross-attention. Each token has an index into tables of rotary positions: the argument
# is (tables, for each token its indices in time, height and width).
_ALLEGRO_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True, element=1)
_ALLEGRO_ATTENTION = Layout(token_arguments=(_ALLEGRO_POSITIONS, KEY_MASK))
_ALLEGRO = (Layer("attn1", "attn1", _ALLEGRO_ATTENTION), Layer("attn2", "attn2"), Layer("ff", "ff"))


def _allegro(root: Any) -> Host:
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _ALLEGRO, block_layout=_ALLEGRO_ATTENTION),
        _allegro_positions,
        text=(512, root.config.caption_channels),
        text_mask="encoder_attention_mask",
        latent_frames=root.config.sample_frames,
    )


def _allegro_positions(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    frames = zeros.frames // config.patch_size_t
    rows = height // config.patch_size
    columns = width // config.patch_size
    channels = config.attention_head_dim // 3
    tables = []
    for side in (frames, rows, columns):
        table = torch.zeros(side, channels, device=root.device)
        tables.append((table, table))  # cosines and sines
    places = torch.zeros(1, frames * rows * columns, device=root.device, dtype=torch.int64)
    return {"image_rotary_emb": (tuple(tables), (places, places, places))}


# Cosmos has self- and cross-attention. The whole batch shares its rotary positions. Each block adds learned
# positions to its tokens, and may add what a ControlNet found. A timestep of each frame is repeated for each
# token.
_COSMOS_FRAMES = 16  # latent frames: 121 frames of video
_COSMOS_SIZE = (88, 160)  # height and width of the latents
_COSMOS = (Layer("attn1", "attn1", ROTARY), Layer("attn2", "attn2"), Layer("ff", "ff"))
_COSMOS_TIMES = ("embedded_timestep", "temb")
_COSMOS_ADDED = ("extra_pos_emb", "controlnet_residual")
_COSMOS_BLOCK = Layout(
    token_arguments=(
        POSITIONS,
        *(TokenArgument(name, axes=(1,), batched=True, ndim=3) for name in _COSMOS_TIMES),
        *(TokenArgument(name, axes=(1,), batched=True, combined=True) for name in _COSMOS_ADDED),
    )
)


def _cosmos(root: Any) -> Host:
    blocks = listed(root, "transformer_blocks", _COSMOS, block_layout=_COSMOS_BLOCK)
    return transformer_host(
        root, blocks, _cosmos_others, sample_size=_COSMOS_SIZE, latent_frames=_COSMOS_FRAMES
    )


def _cosmos_others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    text_dim = config.crossattn_proj_in_channels if config.use_crossattn_projection else config.text_embed_dim
    # One of `in_channels` is the mask of frames that are given. The padding mask is an extra channel.
    arguments: dict[str, Any] = {
        "hidden_states": zeros(config.in_channels - 1, zeros.frames, height, width),
        "condition_mask": zeros(1, zeros.frames, height, width),
        "encoder_hidden_states": zeros(512, text_dim),
    }
    if config.img_context_dim_in:
        image = zeros(config.img_context_num_tokens, config.img_context_dim_in)
        arguments["encoder_hidden_states"] = (arguments["encoder_hidden_states"], image)
    if config.concat_padding_mask:
        arguments["padding_mask"] = arguments["hidden_states"].new_zeros(1, 1, height * 8, width * 8)
    return arguments


# EasyAnimate has joint attention with the text before the image.
_EASYANIMATE_FRAMES = 13  # latent frames: 49 frames of video
_EASYANIMATE_ATTENTION = Layer("attn1", "attn1", ROTARY)
_EASYANIMATE = (_EASYANIMATE_ATTENTION, Layer("ff", "ff"))
_SHARED = "blocks with one MLP run it on the image and then on the text; merge_mlp leaves it dense"


def _easyanimate(root: Any) -> Host:
    blocks = (
        dataclasses.replace(block, layers=(_EASYANIMATE_ATTENTION,), dense={"ff": _SHARED})
        if block.module.txt_ff is None
        else block
        for block in listed(root, "transformer_blocks", _EASYANIMATE, block_layout=ROTARY)
    )
    text = (256, root.config.text_embed_dim)
    return transformer_host(root, tuple(blocks), _second_text, text=text, latent_frames=_EASYANIMATE_FRAMES)


def _second_text(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    if root.text_proj_t5 is None:
        return {}
    return {"encoder_hidden_states_t5": zeros(256, root.config.text_embed_dim_t5)}


# Mochi has joint attention, and learned positions for each head: [n, heads, d / 2], for the whole batch.
_MOCHI_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True, broadcasts_to=4)
_MOCHI_ATTENTION = Layout(text="last", token_arguments=(_MOCHI_POSITIONS,))
_MOCHI = (Layer("attn1", "attn1", _MOCHI_ATTENTION), Layer("ff", "ff"))


def _mochi(root: Any) -> Host:
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _MOCHI, block_layout=_MOCHI_ATTENTION),
        text=(root.config.max_sequence_length, root.config.text_embed_dim),
        text_mask="encoder_attention_mask",
        sample_size=(60, 106),
        latent_frames=4,  # 19 frames of video
        on_cpu=("pos_frequencies",),  # the model enters autocast for the device of this parameter
    )


# SANA-Video has self- and cross-attention. Rotary positions are broadcast over the batch.
_SANA_ATTENTION = Layout(token_arguments=(TokenArgument("rotary_emb", axes=(1,), batched=True),))
_SANA = (Layer("attn1", "attn1", _SANA_ATTENTION), Layer("attn2", "attn2"))
_CONVOLUTIONS = "the MLP of SANA-Video convolves the whole token grid; merge_mlp leaves it dense"
_LITTLE_TO_GAIN = "the attention of SANA-Video is linear in the number of tokens, so merging gains little"


def _sana(root: Any) -> Host:
    return transformer_host(
        root,
        listed(root, "transformer_blocks", _SANA, dense={"ff": _CONVOLUTIONS}),
        text=(300, root.config.caption_channels),
        text_mask="encoder_attention_mask",
        sample_size=(60, 104),
        latent_frames=21,  # 81 frames of video
        limits=(_LITTLE_TO_GAIN,),
    )


_DESCRIBE = {
    "AllegroTransformer3DModel": _allegro,
    "CosmosTransformer3DModel": _cosmos,
    "EasyAnimateTransformer3DModel": _easyanimate,
    "MochiTransformer3DModel": _mochi,
    "SanaVideoTransformer3DModel": _sana,
}
CLASSES = tuple(_DESCRIBE)


def describe(root: Any) -> Host:
    """Find the blocks of a model, by the name of its class."""
    return next(described_by for name, described_by in _DESCRIBE.items() if is_a(root, name))(root)
