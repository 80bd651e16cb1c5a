"""Draws the groups of merged tokens on an image. Needs Pillow and NumPy."""

from __future__ import annotations

import colorsys

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["draw_groups"]

_GOLDEN = 0.618033988749895


def draw_groups(image: Image.Image, labels: NDArray[np.int64]) -> Image.Image:
    """Draw the groups of merged tokens on an image, in the style of the ToMe paper (arXiv 2210.09461).

    Each group of two or more tokens gets the mean colour of its pixels and a thin border. The border colour
    differs by group, which shows separate parts of one group. Tokens that were not merged show the image.

    Args:
        image: the merged image.
        labels: [h, w] integers, row 0 at the top. Tokens with equal labels are one group. A label has the
            same border colour in every image.
    """
    colours = np.asarray(image.convert("RGB"), dtype=np.float32)
    rows, columns = labels.shape
    height, width = colours.shape[:2]
    row_of = np.arange(height) * rows // height
    column_of = np.arange(width) * columns // width
    ids, group, tokens = np.unique(labels, return_inverse=True, return_counts=True)
    pixel_group = group.reshape(rows, columns)[row_of[:, None], column_of[None, :]]

    flat = pixel_group.ravel()
    pixels = np.maximum(np.bincount(flat, minlength=len(ids)), 1)
    sums = [np.bincount(flat, channel, minlength=len(ids)) for channel in colours.reshape(-1, 3).T]
    means = np.stack(sums, axis=-1) / pixels[:, None]
    borders = np.array([_border_colour(int(label)) for label in ids])

    merged = (tokens > 1)[pixel_group]
    drawn = np.where(merged[..., None], means[pixel_group], colours)
    drawn = np.where((merged & _edges(pixel_group))[..., None], borders[pixel_group], drawn)
    return Image.fromarray(np.rint(drawn).astype(np.uint8))


def _edges(groups: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark each pixel that touches another group to the left, right, top or bottom."""
    padded = np.pad(groups, 1, mode="edge")
    around = padded[1:-1, :-2], padded[1:-1, 2:], padded[:-2, 1:-1], padded[2:, 1:-1]
    edges: NDArray[np.bool_] = np.any([other != groups for other in around], axis=0)
    return edges


def _border_colour(label: int) -> tuple[float, float, float]:
    """Return a bright colour. Steps of the golden ratio in hue make consecutive labels look different."""
    red, green, blue = colorsys.hsv_to_rgb(label * _GOLDEN % 1.0, 0.55, 0.95)
    return red * 255, green * 255, blue * 255
