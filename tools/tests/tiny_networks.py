"""Vision networks of transformers with a few thousand random weights, as folders."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_pipeline
import torch
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model

SIDE = 16
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def write_dino(folder: Path) -> Path:
    """Write a DINOv2 model that makes 16 features."""
    torch.manual_seed(0)
    config = Dinov2Config(image_size=SIDE, patch_size=4, initializer_range=0.5, **_SIZES)
    Dinov2Model(config).save_pretrained(folder)
    _write_processor(folder, "BitImageProcessor")
    return folder


def write_clip(folder: Path) -> Path:
    """Write a CLIP model that makes 8 features of images and of texts."""
    torch.manual_seed(0)
    text = {"vocab_size": 300, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config={**_SIZES, **text},
        vision_config={**_SIZES, "image_size": SIDE, "patch_size": 4},
        projection_dim=8,
    )
    config.vision_config.initializer_factor = config.text_config.initializer_factor = 20.0
    CLIPModel(config).save_pretrained(folder)
    _write_processor(folder, "CLIPImageProcessor")
    tiny_pipeline.tokenizer(folder.parent / f"{folder.name}-tokenizer").save_pretrained(folder)
    return folder


def _write_processor(folder: Path, kind: str) -> None:
    size = {"height": SIDE, "width": SIDE}
    values = {
        "image_processor_type": kind,
        "size": {"shortest_edge": SIDE},
        "crop_size": size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_resize": True,
        "do_center_crop": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
