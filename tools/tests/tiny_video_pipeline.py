"""A real Wan pipeline with a few thousand random weights, in diffusers' format."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tiny_pipeline import tokenizer
from transformers import CLIPTextConfig, CLIPTextModel

TEXT, WORDS = 16, 512


def write_video_pipeline(folder: Path) -> Path:
    """Write a pipeline to ``folder``. Its text encoder is CLIP's, which the pipeline accepts."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=TEXT,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    codec = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    words = tokenizer(folder.parent / f"{folder.name}-tokenizer")
    text = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=TEXT,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=WORDS,
    )
    pipe = WanPipeline(
        tokenizer=words,
        text_encoder=CLIPTextModel(text),
        transformer=transformer,
        vae=codec,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    pipe.save_pretrained(folder)
    return folder
