"""Batches of latents with their captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderTiny
from tools.training.codec import FACTOR, LATENT_CHANNELS, to_tensor
from tools.training.glyphs import compose, draw
from torch import Tensor

from tokenmerge_tools.demo.glyphs import BACKGROUNDS, Glyph, caption

EMPTY = 0.1  # share of captions left empty, which is what classifier-free guidance needs
BARE = 0.3  # share of images on white whose caption does not speak of the background


class Latents:
    """The latents of every glyph on every background at one size, encoded when first asked for."""

    def __init__(self, glyphs: Sequence[Glyph], codec: AutoencoderTiny, size: int) -> None:
        self.codec = codec
        self.names = [glyph.name for glyph in glyphs]
        self.backgrounds = list(BACKGROUNDS)
        self.drawn = [draw(glyph, size) for glyph in glyphs]
        side = size // FACTOR
        shape = (len(glyphs), len(self.backgrounds), LATENT_CHANNELS, side, side)
        self.known = torch.zeros(shape[:2], dtype=torch.bool)
        self.latents = torch.empty(shape)

    def batch(self, size: int, rng: np.random.Generator) -> tuple[Tensor, list[str]]:
        """Draw `size` images: latents [b, c, h, w] and their captions."""
        glyphs = rng.choice(len(self.names), size, replace=size > len(self.names))
        backgrounds = rng.integers(len(self.backgrounds), size=size)
        pairs = list(zip(glyphs.tolist(), backgrounds.tolist(), strict=True))
        self._encode([pair for pair in pairs if not self.known[pair]])
        return self.latents[glyphs, backgrounds], [self._caption(*pair, rng) for pair in pairs]

    @torch.no_grad()
    def _encode(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        pictures = np.stack([compose(self.drawn[g], self.backgrounds[b]) for g, b in pairs])
        encoded = self.codec.encode(to_tensor(pictures).to(self.codec.device)).latents
        for pair, latents in zip(pairs, encoded.cpu(), strict=True):
            self.latents[pair] = latents
            self.known[pair] = True

    def _caption(self, glyph: int, background: int, rng: np.random.Generator) -> str:
        if rng.random() < EMPTY:
            return ""
        if self.backgrounds[background] == "white" and rng.random() < BARE:
            return self.names[glyph]
        return caption(self.names[glyph], self.backgrounds[background])
