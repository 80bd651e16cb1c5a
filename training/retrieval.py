"""Which glyph, on which background, does a picture show? Answered without the model under test.

The features are down-sampled CIELAB colours and the gradients of lightness. A picture's background is the
named colour nearest to the median of its border; its glyph is the one whose own picture, drawn on that
background, is nearest in feature space.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from skimage.color import rgb2lab
from skimage.transform import resize

from training.glyphs import BACKGROUNDS, Glyph, compose, draw

GRID = 32  # side of the down-sampled picture
GRADIENT_WEIGHT = 1.0  # a step of one unit of L* weighs as much as a difference of one unit of colour
BORDER = 0.04  # width of the strip that is surely background, as a fraction of the picture


def features(picture: np.ndarray) -> np.ndarray:
    """Describe a picture (uint8 [h, w, 3]) by one vector [GRID · GRID · 5]."""
    small = resize(picture / 255.0, (GRID, GRID), anti_aliasing=True)
    lab = rgb2lab(small)
    gradients = np.stack(np.gradient(lab[..., 0]), axis=-1) * GRADIENT_WEIGHT
    return np.concatenate([lab, gradients], axis=-1).astype(np.float32).ravel()


def background_of(picture: np.ndarray) -> str:
    """Name the background of a picture (uint8 [h, w, 3])."""
    strip = max(1, round(BORDER * picture.shape[0]))
    edge = np.ones(picture.shape[:2], dtype=bool)
    edge[strip:-strip, strip:-strip] = False
    colour = np.median(picture[edge], axis=0)
    names = list(BACKGROUNDS)
    lab = rgb2lab(np.array([colour, *BACKGROUNDS.values()])[None] / 255.0)[0]
    return names[int(np.linalg.norm(lab[1:] - lab[0], axis=-1).argmin())]


class Gallery:
    """The features of every glyph on every background, computed when first asked for."""

    def __init__(self, glyphs: Sequence[Glyph]) -> None:
        self._drawn = [draw(glyph, 128) for glyph in glyphs]
        self.features_on = lru_cache(maxsize=len(BACKGROUNDS))(self._features_on)

    def _features_on(self, background: str) -> np.ndarray:
        return np.stack([features(compose(drawn, background)) for drawn in self._drawn])

    def identify(self, picture: np.ndarray) -> tuple[int, str]:
        """Return the index of the nearest glyph and the name of the background."""
        background = background_of(picture)
        distances = np.linalg.norm(self.features_on(background) - features(picture), axis=-1)
        return int(distances.argmin()), background
