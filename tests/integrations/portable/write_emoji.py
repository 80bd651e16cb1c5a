"""Write emoji.npz: what the PyTorch pipeline of `emoji-unet` computes, for its conversion to ppdiffusers.

Run from the repository: python tests/integrations/portable/write_emoji.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from tokenmerge_tools import demo

EMOJI = Path(__file__).parent / "emoji.npz"
PROMPT = "a grinning face on a light blue background"
TIMESTEPS = (999, 499, 49)


@torch.no_grad()
def emoji() -> dict[str, np.ndarray]:
    """Token ids, text embedding, noise predicted at three timesteps, and a decoded image."""
    pipe = StableDiffusionPipeline.from_pretrained(demo.path("emoji-unet"), safety_checker=None)
    length = pipe.tokenizer.model_max_length
    ids = pipe.tokenizer(PROMPT, padding="max_length", max_length=length, return_tensors="pt").input_ids
    latents = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 4, 16, 16)).astype(np.float32))
    text = pipe.text_encoder(ids)[0]
    noise = [pipe.unet(latents, t, encoder_hidden_states=text).sample for t in TIMESTEPS]
    tensors = {
        "ids": ids,
        "text": text,
        "latents": latents,
        "noise": torch.cat(noise),
        "picture": pipe.vae.decode(latents).sample,
        "alphas": pipe.scheduler.alphas_cumprod,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items()}


if __name__ == "__main__":
    np.savez_compressed(EMOJI, **emoji())
