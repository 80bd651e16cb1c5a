"""The codec: images to latents a quarter as wide and high, and back.

An `AutoencoderTiny` without its blocks at full resolution: the decoder's last non-linear layer is at half
resolution, where 48 channels hold the 2 × 2 × 3 values below each position with room to spare. That makes it
several times cheaper and costs no visible sharpness.

    python -m tools.training.codec --steps 1300
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from diffusers import AutoencoderTiny
from rich.progress import track
from tools.training import checkpoint
from tools.training.glyphs import compose, draw
from torch import Tensor

import tokenmerge_tools.demo
from tokenmerge_tools.demo.glyphs import BACKGROUNDS, read_glyphs

RUN = Path("runs/codec")
FACTOR = 4  # pixels per latent position, each way
LATENT_CHANNELS = 4
CROP = 64
NOISE = 0.08  # added to the latents in training, so that small errors of a denoiser stay invisible
UNIT_WEIGHT = 0.02  # of the pull of each latent channel towards mean 0, variance 1
EDGE_WEIGHT = 1.0


def build_codec() -> AutoencoderTiny:
    """Build the codec with random weights."""
    width = 48
    return AutoencoderTiny(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(width,) * 3,
        num_encoder_blocks=(0, 1, 2),
        decoder_block_out_channels=(width,) * 3,
        num_decoder_blocks=(4, 3, 0),
    )


def to_tensor(pictures: np.ndarray) -> Tensor:
    """Turn uint8 [b, h, w, 3] into float [b, 3, h, w] in [−1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


class Crops:
    """Random crops of the training images at every size they are used at."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.drawn = [[draw(glyph, size) for glyph in read_glyphs()] for size in (64, 128, 128, 256)]
        self.backgrounds = list(BACKGROUNDS)

    def batch(self, size: int) -> Tensor:
        """Return [size, 3, CROP, CROP] in [−1, 1]."""
        return to_tensor(np.stack([self._crop() for _ in range(size)]))

    def _crop(self) -> np.ndarray:
        glyphs = self.drawn[self.rng.integers(len(self.drawn))]
        glyph = glyphs[self.rng.integers(len(glyphs))]
        picture = compose(glyph, self.backgrounds[self.rng.integers(len(self.backgrounds))])
        top, left = self.rng.integers(0, glyph.width - CROP + 1, size=2)
        return picture[top : top + CROP, left : left + CROP]


def codec_loss(codec: AutoencoderTiny, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training loss and the plain mean squared error, for images [b, 3, h, w]."""
    latents = codec.encode(pictures).latents
    decoded = codec.decode(latents + NOISE * torch.randn_like(latents)).sample
    # The gradient terms count an edge in the wrong place more than a flat area slightly off.
    edges = sum(F.l1_loss(decoded.diff(dim=d), pictures.diff(dim=d)) for d in (2, 3))
    mean, variance = latents.mean((0, 2, 3)), latents.var((0, 2, 3))
    unit = (mean.square() + (variance - 1).square()).mean()
    loss = F.l1_loss(decoded, pictures) + EDGE_WEIGHT * edges + UNIT_WEIGHT * unit
    return loss, F.mse_loss(decoded.detach(), pictures)


def main(
    steps: Annotated[int, typer.Option(help="Optimiser steps in all.")] = 1300,
    batch: Annotated[int, typer.Option(help="Crops per step.")] = 16,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Train the codec; started again, go on from the last checkpoint."""
    torch.manual_seed(seed)
    codec = build_codec().to(device)
    optimiser = torch.optim.AdamW(codec.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.05)
    start = 0
    if state := checkpoint.load(RUN / "last.pt", torch.device(device)):
        start = state["step"]
        codec.load_state_dict(state["codec"])
        optimiser.load_state_dict(state["optimiser"])
        schedule.load_state_dict(state["schedule"])
    crops = Crops(np.random.default_rng((seed, start)))
    recent = 0.0
    for step in track(range(start, steps), "codec"):
        loss, error = codec_loss(codec, crops.batch(batch).to(device))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        recent = error.item() if step == start else 0.98 * recent + 0.02 * error.item()
        if (step + 1) % 200 == 0 or step + 1 == steps:
            psnr = 10 * np.log10(4 / recent)
            print(f"step {step + 1}: PSNR {psnr:.1f} dB", flush=True)
            checkpoint.save(
                {
                    "step": step + 1,
                    "psnr": float(psnr),
                    "codec": codec.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "schedule": schedule.state_dict(),
                },
                RUN / "last.pt",
            )


def load_codec(device: torch.device) -> AutoencoderTiny:
    """Load the codec trained here or, where there is none, the one that is bundled; frozen."""
    state = checkpoint.load(RUN / "last.pt", device)
    if state is None:
        codec = AutoencoderTiny.from_pretrained(tokenmerge_tools.demo.path("emoji-unet") / "vae").to(device)
    else:
        codec = build_codec().to(device)
        codec.load_state_dict(state["codec"])
    return codec.eval().requires_grad_(False)


if __name__ == "__main__":
    typer.run(main)
