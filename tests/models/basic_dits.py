"""Diffusion transformers with self- and cross-attention, and their ControlNets."""

from __future__ import annotations

from typing import Any

import torch
from tests.models.family import TEXT, WORDS, Family, noise, text_masks

FRAMES = 3
PATCHED = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
}


def _latents(batch: int, rows: int, columns: int) -> Any:
    return noise(batch, 4, 2 * rows, 2 * columns)


def _dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(**PATCHED, num_embeds_ada_norm=1000)


def _dit_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": _latents(batch, rows, columns),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.arange(batch),
    }


def _pixart(**changes: Any) -> Any:
    from diffusers import PixArtTransformer2DModel

    settings = {**PATCHED, "cross_attention_dim": 16, "caption_channels": TEXT}
    return PixArtTransformer2DModel(**{**settings, **changes})


def _pixart_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    """Inputs with masks for both attentions, without the last word and the first tokens of each image."""
    words, tokens = torch.ones(batch, WORDS), torch.ones(batch, rows * columns)
    words[:, -1] = 0
    tokens[:, :5] = 0
    return {
        "hidden_states": _latents(batch, rows, columns),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "timestep": torch.full((batch,), 500),
        "added_cond_kwargs": {"resolution": torch.ones(batch, 2), "aspect_ratio": torch.ones(batch, 1)},
        "attention_mask": tokens,
        "encoder_attention_mask": words,
    }


def _latte() -> Any:
    from diffusers import LatteTransformer3DModel

    return LatteTransformer3DModel(
        **PATCHED,
        cross_attention_dim=16,
        caption_channels=TEXT,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        num_embeds_ada_norm=1000,
        video_length=FRAMES,
    )


def _latte_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, FRAMES, 2 * rows, 2 * columns),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
    }


def _uvit(**changes: Any) -> Any:
    from diffusers import UVit2DModel

    return UVit2DModel(
        **{
            "hidden_size": 16,
            "cond_embed_dim": TEXT,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": TEXT,
            "vocab_size": 32,
            "codebook_size": 31,
            "in_channels": 16,
            "block_out_channels": 16,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "sample_size": 16,
            **changes,
        }
    )


def _uvit_inputs(stride: int) -> Any:
    def inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
        return {
            "input_ids": (noise(batch, stride * rows, stride * columns).abs() * 1e4).long() % 32,
            "encoder_hidden_states": noise(batch, WORDS, TEXT),
            "pooled_text_emb": noise(batch, TEXT),
            "micro_conds": torch.ones(batch, 5),
        }

    return inputs


HUNYUAN = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "hidden_size": 16,
    "mlp_ratio": 2.0,
    "cross_attention_dim": TEXT,
    "cross_attention_dim_t5": TEXT,
    "pooled_projection_dim": TEXT,
    "text_len": WORDS,
    "text_len_t5": WORDS,
}


def _hunyuan() -> Any:
    from diffusers import HunyuanDiT2DModel

    return HunyuanDiT2DModel(**HUNYUAN, num_layers=4)


def _hunyuan_controlnet() -> Any:
    from diffusers import HunyuanDiT2DControlNetModel

    return HunyuanDiT2DControlNetModel(**HUNYUAN, transformer_num_layers=6)


def _hunyuan_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    corners = ((0, 0), (rows, columns))
    return {
        "hidden_states": _latents(batch, rows, columns),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "text_embedding_mask": torch.ones(batch, WORDS),
        "encoder_hidden_states_t5": noise(batch, WORDS, TEXT),
        "text_embedding_mask_t5": torch.ones(batch, WORDS),
        "image_meta_size": torch.ones(batch, 6),
        "style": torch.zeros(batch, dtype=torch.int64),
        "image_rotary_emb": get_2d_rotary_pos_embed(8, corners, (rows, columns), output_type="pt"),
    }


def _hunyuan_controlnet_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {**_hunyuan_inputs(batch, rows, columns), "controlnet_cond": _latents(batch, rows, columns)}


def _lumina_next() -> Any:
    from diffusers import LuminaNextDiT2DModel

    return LuminaNextDiT2DModel(
        sample_size=16,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        cross_attention_dim=TEXT,
    )


def _lumina_next_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {
        "hidden_states": _latents(batch, rows, columns),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "encoder_mask": text_masks(batch),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 48, 48),
        "cross_attention_kwargs": {},
    }


SANA = {
    **PATCHED,
    "patch_size": 1,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": TEXT,
    "sample_size": 8,
}


def _sana() -> Any:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(**SANA, out_channels=4, guidance_embeds=True)


def _sana_controlnet() -> Any:
    from diffusers import SanaControlNetModel

    return SanaControlNetModel(**SANA)


def _sana_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, rows, columns),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "timestep": torch.full((batch,), 500.0),
        "guidance": torch.full((batch,), 4.5),
    }


def _sana_controlnet_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    arguments = _sana_inputs(batch, rows, columns)
    del arguments["guidance"]
    return {**arguments, "controlnet_cond": noise(batch, 4, rows, columns)}


FAMILIES: dict[str, Family] = {
    "DiTTransformer2DModel": Family(_dit, _dit_inputs, square=True),
    "PixArtTransformer2DModel": Family(_pixart, _pixart_inputs),
    "PixArtTransformer2DModel, size conditions": Family(
        lambda: _pixart(use_additional_conditions=True, num_attention_heads=3, cross_attention_dim=24),
        _pixart_inputs,
    ),
    "LatteTransformer3DModel": Family(_latte, _latte_inputs),
    "UVit2DModel": Family(_uvit, _uvit_inputs(1), checkpoints=False),
    "UVit2DModel, downsampling": Family(
        lambda: _uvit(downsample=True, upsample=True), _uvit_inputs(2), checkpoints=False
    ),
    "HunyuanDiT2DModel": Family(_hunyuan, _hunyuan_inputs),
    "HunyuanDiT2DControlNetModel": Family(_hunyuan_controlnet, _hunyuan_controlnet_inputs),
    "LuminaNextDiT2DModel": Family(_lumina_next, _lumina_next_inputs),
    "SanaTransformer2DModel": Family(_sana, _sana_inputs),
    "SanaControlNetModel": Family(_sana_controlnet, _sana_controlnet_inputs),
}
