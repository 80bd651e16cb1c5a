"""Diffusion transformers in which text and image share one sequence, with blocks of one kind."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.dits import HEADS, positions
from tests.models.family import TEXT, WORDS, Family, noise, text_masks


def _krea2() -> Any:
    from diffusers import Krea2Transformer2DModel

    return Krea2Transformer2DModel(
        in_channels=4,
        num_layers=3,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=TEXT,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
        **HEADS,
    )


def _krea2_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, rows * columns, 4),
        "encoder_hidden_states": noise(batch, WORDS, 2, TEXT),
        "encoder_attention_mask": text_masks(batch),
        "timestep": torch.full((batch,), 0.5),
        "position_ids": torch.cat([torch.zeros(WORDS, 3), positions(rows, columns)]),
    }


def _ideogram4() -> Any:
    from diffusers import Ideogram4Transformer2DModel

    return Ideogram4Transformer2DModel(
        in_channels=4,
        num_layers=3,
        attention_head_dim=12,
        num_attention_heads=2,
        intermediate_size=32,
        adaln_dim=16,
        llm_features_dim=TEXT,
        mrope_section=(2, 2, 2),
    )


def _ideogram4_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Texts of different length, with padding before them."""
    tokens = WORDS + rows * columns
    ids = torch.zeros(batch, tokens, 3, dtype=torch.int64)
    ids[:, :WORDS] = torch.arange(WORDS)[:, None]
    ids[:, WORDS:] = positions(rows, columns).long() + 65536
    is_padding = ~text_masks(batch).flip(1)
    roles = torch.full((batch, tokens), 2)
    roles[:, :WORDS] = torch.where(is_padding, 0, 3)
    segments = torch.ones(batch, tokens, dtype=torch.int64)
    segments[:, :WORDS][is_padding] = -1
    return {
        "hidden_states": noise(batch, tokens, 4),
        "encoder_hidden_states": noise(batch, tokens, TEXT),
        "timestep": torch.full((batch,), 0.5),
        "position_ids": ids,
        "segment_ids": segments,
        "indicator": roles,
    }


def _ideogram4_times(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Each token has a timestep."""
    inputs = _ideogram4_inputs(batch, rows, columns)
    tokens = inputs["hidden_states"].shape[1]
    return {**inputs, "timestep": torch.linspace(0.4, 0.6, tokens).repeat(batch, 1)}


def _ernie() -> Any:
    from diffusers import ErnieImageTransformer2DModel

    return ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=4,
        num_layers=3,
        ffn_hidden_size=32,
        in_channels=4,
        out_channels=4,
        text_in_dim=TEXT,
        rope_axes_dim=(2, 2, 4),
    )


def _ernie_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, rows, columns),
        "timestep": torch.full((batch,), 500.0),
        "text_bth": noise(batch, WORDS, TEXT),
        "text_lens": text_masks(batch).sum(dim=1),
    }


def _hidream() -> Any:
    from diffusers import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        caption_channels=[TEXT, 12],
        text_emb_dim=TEXT,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=[0, 1, 1, 0],
        **HEADS,
    )


def _hidream_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Images that are not square are padded by the model itself."""
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "timesteps": torch.full((batch,), 500.0),
        "encoder_hidden_states_t5": noise(batch, WORDS, TEXT),
        "encoder_hidden_states_llama3": [noise(batch, WORDS, 12), noise(batch, WORDS, 12).flip(1)],
        "pooled_embeds": noise(batch, TEXT),
    }


def _hidream_sizes(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Tokens with their sizes, padded by whoever calls the model."""
    tokens = rows * columns
    padded = torch.cat([noise(batch, tokens, 16), torch.zeros(batch, 5, 16)], dim=1)
    ids = torch.cat([positions(rows, columns), torch.zeros(5, 3)])
    mask = torch.ones(batch, tokens + 5)
    mask[:, tokens:] = 0
    return {
        **_hidream_inputs(batch, rows, columns),
        "hidden_states": padded,
        "img_ids": ids.repeat(batch, 1, 1),
        "img_sizes": [(rows, columns)] * batch,
        "hidden_states_masks": mask,
    }


def _qwen21(**settings: Any) -> Any:
    from diffusers import QwenImage21Transformer2DModel

    return QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=3,
        context_in_dim=TEXT,
        axes_dims_rope=(2, 2, 4),
        **HEADS,
        **settings,
    )


def _qwen21_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """A text of which a given image is a part, and the image that is made."""
    given = (1, 4, 2)
    slots = torch.zeros(batch, WORDS + 2 + rows * columns // 4, dtype=torch.bool)
    slots[:, 3:5] = True  # two slots of four tokens
    slots[:, WORDS + 2 :] = True
    words = WORDS + 2
    return {
        "hidden_states": noise(batch, 8 + rows * columns, 4),
        "encoder_hidden_states": noise(batch, words, TEXT),
        "encoder_hidden_states_mask": text_masks(batch, words),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[given, (1, rows, columns)]] * batch,
        "img_mask": slots,
    }


def _unidiffuser() -> Any:
    from diffusers import UniDiffuserModel

    return UniDiffuserModel(
        text_dim=TEXT,
        clip_img_dim=12,
        num_text_tokens=WORDS,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        sample_size=16,
        patch_size=2,
        **HEADS,
    )


def _unidiffuser_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "latent_image_embeds": noise(batch, 4, 2 * rows, 2 * columns),
        "image_embeds": noise(batch, 1, 12),
        "prompt_embeds": noise(batch, WORDS, TEXT),
        "timestep_img": torch.full((batch,), 500.0),
        "timestep_text": torch.zeros(batch),
    }


FAMILIES: dict[str, Family] = {
    "Krea2Transformer2DModel": Family(_krea2, _krea2_inputs, attention=("attn",)),
    "Ideogram4Transformer2DModel": Family(_ideogram4, _ideogram4_inputs, attention=("attention",)),
    "Ideogram4Transformer2DModel, times of tokens": Family(
        _ideogram4, _ideogram4_times, attention=("attention",)
    ),
    "ErnieImageTransformer2DModel": Family(_ernie, _ernie_inputs, attention=("self_attention",)),
    "HiDreamImageTransformer2DModel": Family(_hidream, _hidream_inputs),
    "HiDreamImageTransformer2DModel, padded": Family(_hidream, _hidream_sizes),
    "QwenImage21Transformer2DModel": Family(_qwen21, _qwen21_inputs, attention=("attn",), multiple=2),
    "QwenImage21Transformer2DModel, times of all tokens": Family(
        lambda: _qwen21(causal_condition=False), _qwen21_inputs, attention=("attn",), multiple=2
    ),
    "UniDiffuserModel": Family(_unidiffuser, _unidiffuser_inputs, side=8),
}
