"""Recognises the glyph and the background of an image, without the model under test.

The features are down-sampled CIELAB colours and the gradients of lightness. An image's background is the
named colour nearest to the median of its border; its glyph is the one whose own image is nearest in feature
space, drawn on that background.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tokenmerge_tools.demo.glyphs import BACKGROUNDS, read_glyphs

if TYPE_CHECKING:
    from PIL.Image import Image

GRID = 32  # side of the down-sampled image
GRADIENT_WEIGHT = 1.0  # weight of a gradient of L* relative to a difference of colour
BORDER = 0.04  # width of the strip that counts as background, as a fraction of the image

SHEET = Path(__file__).parent / "emoji" / "glyphs.png"  # thumbnails of GRID × GRID pixels, RGBA, row by row
COLUMNS = 26

# Linear sRGB → CIE XYZ (IEC 61966-2-1), and the white point D65 that CIELAB is relative to.
_TO_XYZ = np.array(
    [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])
_TO_LAB = np.array([[0, 116, 0], [500, -500, 0], [0, 200, -200]])


def lab(colours: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return L* in [0, 100], a* and b* (CIELAB, CIE 15) of sRGB colours [..., 3] in [0, 1]."""
    # The constants of the two curves are those of the standards.
    linear = np.where(colours > 0.04045, ((colours + 0.055) / 1.055) ** 2.4, colours / 12.92)
    relative = linear @ _TO_XYZ.T / _WHITE
    curved = np.where(relative > (6 / 29) ** 3, np.cbrt(relative), relative * (29 / 6) ** 2 / 3 + 4 / 29)
    return curved @ _TO_LAB.T - np.array([16, 0, 0])


def features(colours: NDArray[np.floating]) -> NDArray[np.float32]:
    """Turn images [..., h, w, 3] with values in [0, 1] into feature vectors [..., h · w · 5]."""
    values = lab(colours)
    gradients = np.stack([*np.gradient(values[..., 0], axis=(-2, -1))], axis=-1) * GRADIENT_WEIGHT
    return np.concatenate([values, gradients], axis=-1).astype(np.float32).reshape(*colours.shape[:-3], -1)


def background_of(image: Image) -> str:
    """Name the background of an image."""
    pixels = np.asarray(image.convert("RGB"))
    strip = max(1, round(BORDER * pixels.shape[0]))
    edge = np.ones(pixels.shape[:2], dtype=bool)
    edge[strip:-strip, strip:-strip] = False
    known = lab(np.array([np.median(pixels[edge], axis=0), *BACKGROUNDS.values()]) / 255)
    return list(BACKGROUNDS)[int(np.linalg.norm(known[1:] - known[0], axis=-1).argmin())]


class Gallery:
    """The features of every glyph on every background, computed on first use."""

    def __init__(self) -> None:
        import PIL.Image

        with PIL.Image.open(SHEET) as sheet:
            pixels = np.asarray(sheet, dtype=np.float32) / 255
        cells = pixels.reshape(-1, GRID, COLUMNS, GRID, 4).swapaxes(1, 2).reshape(-1, GRID, GRID, 4)
        self._thumbnails = cells[: len(read_glyphs())]
        self._features_on = lru_cache(maxsize=len(BACKGROUNDS))(self._on)

    def _on(self, background: str) -> NDArray[np.float32]:
        colours = self._thumbnails[..., :3]
        opacity = self._thumbnails[..., 3:]
        return features(colours * opacity + np.array(BACKGROUNDS[background]) / 255 * (1 - opacity))

    def identify(self, image: Image) -> tuple[int, str]:
        """Return the index of the nearest glyph and the name of the background."""
        from PIL.Image import Resampling

        background = background_of(image)
        small = np.asarray(image.convert("RGB").resize((GRID, GRID), Resampling.BOX)) / 255
        distances = np.linalg.norm(self._features_on(background) - features(small), axis=-1)
        return int(distances.argmin()), background
