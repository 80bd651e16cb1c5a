"""Draws comparisons (dense, merged, in fewer steps, and where they differ) and sheets of samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_SMALLEST_SIDE = 320  # in pixels; smaller images are enlarged
_MARGIN = 24
_GAP = 16
_PAPER = (255, 255, 255)
_INK = (24, 24, 27)
_SOFT_INK = (113, 113, 122)
_FRAME = (212, 212, 216)

Row = tuple[Sequence[Image.Image | None], str | Sequence[str]]  # the panels of a row, and their captions


def comparison(columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> Image.Image:
    """Draw images side by side, the dense one first. Below each is the part in which they differ most.

    All images have the same size. ``columns`` are as for :func:`sheet`.
    """
    lines: list[Row] = []
    for panels, captions in rows:
        images = [panel for panel in panels if panel is not None]
        factor = max(1, -(-_SMALLEST_SIDE // min(images[0].size)))
        part = most_different(*images)
        shown = [enlarge(image, factor) for image in images]
        for one in shown:
            for colour, width in (("black", 4), ("white", 2)):  # visible on any background
                ImageDraw.Draw(one).rectangle([factor * side for side in part], outline=colour, width=width)
        lines.append((shown, captions))
        closer = [image.crop(part).resize(shown[0].size, Image.Resampling.NEAREST) for image in images]
        lines.append((closer, "where they differ most from dense, enlarged"))
    return sheet(columns, lines)


def most_different(dense: Image.Image, *others: Image.Image) -> tuple[int, int, int, int]:
    """Return the part in which images differ most from the first: (left, top, right, bottom) in pixels.

    It has a third of their width and height.
    """
    lost = sum(np.abs(_pixels(other) - _pixels(dense)).sum(axis=2) for other in others)
    width, height = ((side + 2) // 3 for side in dense.size)
    lefts = range(0, dense.width - width + 1, max(1, width // 4))
    tops = range(0, dense.height - height + 1, max(1, height // 4))
    left, top = max(
        product(lefts, tops), key=lambda place: lost[place[1] :, place[0] :][:height, :width].sum()
    )
    return left, top, left + width, top + height


def as_tensor(images: Sequence[Image.Image]) -> Tensor:
    """Stack images of the same size as [b, 3, h, w] with values in [0, 1]."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def sheet(columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> Image.Image:
    """Draw panels of one size under column titles, with captions below them.

    Each column is a title and the small print below it. Each row is a list of panels, in which None leaves a
    gap, and either one caption for the row or one caption for each panel.
    """
    width, height = next(filter(None, rows[0][0])).size
    title_font, small_font = map(ImageFont.load_default, (22, 15))
    head = _MARGIN + 56
    foot = 30 if any(captions for _, captions in rows) else 0
    canvas = Image.new(
        "RGB",
        (
            2 * _MARGIN + len(columns) * width + (len(columns) - 1) * _GAP,
            head + len(rows) * (height + foot + _GAP) - _GAP + _MARGIN,
        ),
        _PAPER,
    )
    pen = ImageDraw.Draw(canvas)
    lefts = [_MARGIN + column * (width + _GAP) for column in range(len(columns))]
    for left, (title, small_print) in zip(lefts, columns, strict=True):
        pen.text((left, _MARGIN - 6), _shortened(title, title_font, width), font=title_font, fill=_INK)
        words = _shortened(small_print, small_font, width)
        pen.text((left, _MARGIN + 24), words, font=small_font, fill=_SOFT_INK)
    for index, (panels, captions) in enumerate(rows):
        top = head + index * (height + foot + _GAP)
        there = [(left, panel) for left, panel in zip(lefts, panels, strict=True) if panel is not None]
        for left, panel in there:
            # The frame separates images with a white background from the paper.
            pen.rectangle((left - 1, top - 1, left + width, top + height), outline=_FRAME)
            canvas.paste(panel, (left, top))
        if isinstance(captions, str):
            texts: Sequence[str] = [captions]
            room = canvas.width - 2 * _MARGIN
        else:
            texts = captions
            room = width
        for (left, _), text in zip(there, texts, strict=False):
            words = _shortened(text, small_font, room)
            pen.text((left, top + height + 6), words, font=small_font, fill=_SOFT_INK)
    return canvas


def enlarge(image: Image.Image, factor: int) -> Image.Image:
    """Enlarge an image without smoothing."""
    size = (image.width * factor, image.height * factor)
    return image.convert("RGB").resize(size, Image.Resampling.NEAREST)


def _pixels(image: Image.Image) -> NDArray[np.float32]:
    return np.asarray(image.convert("RGB"), dtype=np.float32)


def _shortened(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Cut a line of text with an ellipsis to fit into ``width`` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
