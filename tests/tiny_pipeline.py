"""A real Stable Diffusion pipeline with a few thousand random weights, in diffusers' format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

SCALE = 2  # pixels per latent position
SIDE = 32  # pixels
UNET = {
    "sample_size": SIDE // SCALE,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


def write_pipeline(folder: Path) -> Path:
    """Write a pipeline to ``folder``."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**UNET)
    codec = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    )
    pipe = StableDiffusionPipeline(
        vae=codec,
        text_encoder=_text_encoder(),
        tokenizer=tokenizer(folder.parent / f"{folder.name}-tokenizer"),
        unet=unet,
        scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder)
    return folder


def write_controlnet(folder: Path) -> Path:
    """Write a ControlNet that fits :func:`write_pipeline`'s UNet to ``folder``."""
    torch.manual_seed(1)
    unet = UNet2DConditionModel(**UNET)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8))
    for layer in (*controlnet.controlnet_down_blocks, controlnet.controlnet_cond_embedding.conv_out):
        torch.nn.init.normal_(layer.weight)  # they begin as zeros, which would block the image
    controlnet.save_pretrained(folder)
    return folder


def _text_encoder() -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=300,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def tokenizer(folder: Path) -> CLIPTokenizer:
    """One token per letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
