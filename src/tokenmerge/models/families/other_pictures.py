"""Other transformers: AuraFlow, CogView, DiT, Hunyuan-DiT, Latte, Lumina, PixArt, PRX and Sana.

Of Lumina there are Lumina-Next and Lumina-Image 2.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import (
    KEY_MASK,
    OWN_POSITIONS,
    PLAIN,
    POSITIONS,
    ROTARY,
    Arguments,
    Grid,
    Grids,
    Host,
    Layer,
    Layout,
    TokenArgument,
    is_a,
)
from tokenmerge.models.family import Blank, basic_blocks, listed, transformer_host
from tokenmerge.models.grids import picture_grids

_AURAFLOW = (Layer("attn1", "attn"), Layer("ff", "ff"))


def _auraflow(root: Any) -> Host:
    # Blocks with two streams, then blocks with one. Positions are added before the first block.
    returned = Layout(outputs=(1,))
    double = listed(root, "joint_transformer_blocks", _AURAFLOW, layout=returned, block_layout=returned)
    single = listed(root, "single_transformer_blocks", _AURAFLOW, block_layout=PLAIN)
    return transformer_host(root, (*double, *single), text=(256, root.config.joint_attention_dim))


# CogView has joint attention.
_COGVIEW3 = (Layer("attn1", "attn1"), Layer("ff", "ff"))
_COGVIEW4 = (Layer("attn1", "attn1", ROTARY),)
_SHARED = "CogView4 runs one MLP on the image and then on the text; merge_mlp leaves it dense"


def _cogview(root: Any) -> Host:
    if is_a(root, "CogView4Transformer2DModel"):
        blocks = listed(root, "transformer_blocks", _COGVIEW4, block_layout=ROTARY, dense={"ff": _SHARED})
    else:
        blocks = listed(root, "transformer_blocks", _COGVIEW3, block_layout=PLAIN)
    text = 224, root.config.text_embed_dim
    return transformer_host(root, blocks, _cogview_sizes, text=text, grids=_cogview_grids)


def _cogview_grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    if "batch_flag" in (arguments.get("attention_kwargs") or {}):
        raise UnsupportedModelError(
            "attention_kwargs: batch_flag packs samples into one sequence, which has no token grid; train "
            "without packing, or call remove_token_merging(model) first"
        )
    return picture_grids(root, arguments, last)


def _cogview_sizes(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    size = zeros(2).fill_(1024)
    return {"original_size": size, "target_size": size, "crop_coords": zeros(2)}


def _basic_dit(root: Any) -> Host:
    # DiT, PixArt and Latte are made of ``BasicTransformerBlock``. Of Latte, the spatial blocks merge, whose
    # batch axis holds the frames.
    return transformer_host(root, basic_blocks(root, "transformer_blocks"), _basic_dit_others)


def _basic_dit_others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    if is_a(root, "DiTTransformer2DModel"):
        return {"class_labels": zeros.integers()}
    text_width = config.caption_channels or config.cross_attention_dim
    if is_a(root, "LatteTransformer3DModel"):
        return {
            "hidden_states": zeros(config.in_channels, config.video_length, height, width),
            "encoder_hidden_states": zeros(120, text_width),
        }
    sizes = {"resolution": zeros(2), "aspect_ratio": zeros(1)} if root.use_additional_conditions else {}
    return {
        "encoder_hidden_states": zeros(300, text_width),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None, **sizes},
    }


# Hunyuan-DiT has self- and cross-attention, which applies rotary positions to its queries too. Blocks of the
# second half also get the tokens that one of the first half returned.
_HUNYUAN_DIT = (Layer("attn1", "attn1", ROTARY), Layer("attn2", "attn2", ROTARY), Layer("ff", "ff"))
_SKIP = TokenArgument("skip", axes=(1,), batched=True, combined=True)
_HUNYUAN_DIT_BLOCK = Layout(token_arguments=(POSITIONS, _SKIP))


def _hunyuan_dit(root: Any) -> Host:
    text = root.config.text_len, root.config.cross_attention_dim
    blocks = listed(root, "blocks", _HUNYUAN_DIT, block_layout=_HUNYUAN_DIT_BLOCK)
    return transformer_host(root, blocks, _hunyuan_dit_others, text=text)


def _hunyuan_dit_others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    tokens = (height // config.patch_size) * (width // config.patch_size)
    table = zeros().new_zeros(tokens, config.attention_head_dim)
    arguments = {
        "text_embedding_mask": zeros(config.text_len),
        "encoder_hidden_states_t5": zeros(config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": zeros(config.text_len_t5),
        "image_rotary_emb": (table, table),
    }
    if config.use_style_cond_and_image_meta_size:
        arguments |= {"image_meta_size": zeros(6), "style": zeros.integers()}
    return arguments


# Lumina refines text and image apart. Joint blocks follow, with the text first and padding last.
_LUMINA_ARGUMENTS = (OWN_POSITIONS, TokenArgument("attention_mask", axes=(1,), batched=True))
_LUMINA_REFINER = Layout(token_arguments=_LUMINA_ARGUMENTS)
_LUMINA_BLOCK = replace(_LUMINA_REFINER, text="first", padding="attention_mask")
_LUMINA_ATTENTION = replace(_LUMINA_REFINER, text="first", same_as_tokens="encoder_hidden_states")
_LUMINA = (Layer("attn1", "attn", _LUMINA_ATTENTION), Layer("ff", "feed_forward"))


def _lumina(root: Any) -> Host:
    refining = listed(root, "noise_refiner", _LUMINA, block_layout=_LUMINA_REFINER)
    joint = listed(root, "layers", _LUMINA, layout=_LUMINA_BLOCK, block_layout=_LUMINA_BLOCK)
    text = 256, root.config.cap_feat_dim
    return transformer_host(root, (*refining, *joint), text=text, text_mask="encoder_attention_mask")


# Lumina-Next has self- and cross-attention, whose heads are joined behind both. Rotary positions are [1, n,
# d], for the whole batch.
_NEXT_QUERIES = TokenArgument("query_rotary_emb", axes=(1,), batched=True)
_NEXT_KEYS = replace(_NEXT_QUERIES, name="key_rotary_emb")
_NEXT_ATTENTION = Layout(
    token_arguments=(_NEXT_QUERIES, _NEXT_KEYS, KEY_MASK), same_as_tokens="encoder_hidden_states"
)
_NEXT_CROSS = Layout(token_arguments=(_NEXT_QUERIES,))
_NEXT_BLOCK = Layout(token_arguments=(OWN_POSITIONS, KEY_MASK))
_NEXT = (
    Layer("attn1", "attn1", _NEXT_ATTENTION),
    Layer("attn2", "attn2", _NEXT_CROSS),
    Layer("ff", "feed_forward"),
)
_NEXT_SCALE = "its pipeline scales attention by the logarithm of the number of tokens, which merging lowers"
_NEXT_SIDE = 384  # of the table of positions that its pipeline makes
_NEXT_WORDS = 256


def _lumina_next(root: Any) -> Host:
    blocks = listed(root, "layers", _NEXT, block_layout=_NEXT_BLOCK)
    return transformer_host(root, blocks, _lumina_next_others, limits=(_NEXT_SCALE,))


def _lumina_next_others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    table = torch.zeros(_NEXT_SIDE, _NEXT_SIDE, root.head_dim // 2, dtype=torch.complex64)
    return {
        "encoder_hidden_states": zeros(_NEXT_WORDS, root.config.cross_attention_dim),
        "encoder_mask": zeros.full_mask(_NEXT_WORDS),
        "image_rotary_emb": table.to(zeros().device),
        "cross_attention_kwargs": {},
    }


# In PRX the image attends to itself and to the text. Rotary positions are [b, 1, n, d / 2, 2, 2].
_PRX_POSITIONS = TokenArgument("image_rotary_emb", axes=(2,), batched=True)
_PRX_BLOCK = Layout(token_arguments=(_PRX_POSITIONS,))  # its mask covers the text only
_PRX = (Layer("attn1", "attention", _PRX_BLOCK),)
_NO_LAYER = "the MLP of PRX is not a separate layer; merge_mlp leaves it dense"


def _prx(root: Any) -> Host:
    blocks = listed(root, "blocks", _PRX, block_layout=_PRX_BLOCK, dense={"ff": _NO_LAYER})
    text = 256, root.config.context_in_dim
    return transformer_host(root, blocks, text=text, text_mask="attention_mask", sample_size=(64, 64))


_SANA = (Layer("attn1", "attn1"), Layer("attn2", "attn2"))
_CONVOLUTIONS = "the MLP of Sana convolves the whole token grid; merge_mlp leaves it dense"
_LITTLE_TO_GAIN = "the attention of Sana is linear in the number of tokens, so merging gains little"


def _sana(root: Any) -> Host:
    blocks = listed(root, "transformer_blocks", _SANA, dense={"ff": _CONVOLUTIONS})
    return transformer_host(root, blocks, text=(300, root.config.caption_channels), limits=(_LITTLE_TO_GAIN,))


_DESCRIBE = {
    "AuraFlowTransformer2DModel": _auraflow,
    "CogView3PlusTransformer2DModel": _cogview,
    "CogView4Transformer2DModel": _cogview,
    "DiTTransformer2DModel": _basic_dit,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "HunyuanDiT2DControlNetModel": _hunyuan_dit,
    "LatteTransformer3DModel": _basic_dit,
    "Lumina2Transformer2DModel": _lumina,
    "LuminaNextDiT2DModel": _lumina_next,
    "PixArtTransformer2DModel": _basic_dit,
    "PRXTransformer2DModel": _prx,
    "SanaTransformer2DModel": _sana,
    "SanaControlNetModel": _sana,
}
CLASSES = tuple(_DESCRIBE)


def describe(root: Any) -> Host:
    """Find the blocks of a model, by the name of its class."""
    return next(described_by for name, described_by in _DESCRIBE.items() if is_a(root, name))(root)
