"""Draws comparisons (dense, merged, in fewer steps, and differences) and sheets of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_SMALLEST_SIDE = 320  # pixels; smaller pictures are enlarged
_GAINS = (1, 2, 4, 8, 16, 32, 64)
_MARGIN = 24
_GAP = 16
_PAPER = (255, 255, 255)
_INK = (24, 24, 27)
_SOFT_INK = (113, 113, 122)
_FRAME = (212, 212, 216)

Row = tuple[Sequence[Image.Image | None], str | Sequence[str]]  # panels of a sheet, and their captions


@dataclasses.dataclass(frozen=True)
class Pair:
    """A dense and a merged picture of the same size, which make one row of a comparison."""

    dense: Image.Image
    merged: Image.Image
    fewer: Image.Image | None = None  # dense, in fewer steps that take as long; all rows have one, or none
    captions: Sequence[str] = ()  # a text below each picture


def comparison(rows: Sequence[Pair], *, dense: str = "", merged: str = "", fewer: str = "") -> Image.Image:
    """Draw for each row: dense, with tokenmerge and in fewer steps, if any; and their differences below.

    All pictures have the same size. The texts are the small print below the titles of their columns.
    """
    gain = min(difference_gain(row.dense, row.merged) for row in rows)
    columns = [("dense", dense), ("with tokenmerge", merged), ("fewer steps", fewer)][
        : 2 + bool(rows[0].fewer)
    ]
    factor = max(1, -(-_SMALLEST_SIDE // min(rows[0].dense.size)))
    lines: list[Row] = []
    for row in rows:
        others = [other for other in (row.merged, row.fewer) if other is not None]
        lost = [difference(row.dense, other, gain) for other in others]
        lines.append(([enlarge(picture, factor) for picture in (row.dense, *others)], row.captions))
        below = f"difference to dense, {gain} times brighter than it is"
        lines.append(([None, *(enlarge(picture, factor) for picture in lost)], [below] * len(lost)))
    return sheet(columns, lines)


def as_tensor(pictures: Sequence[Image.Image]) -> Tensor:
    """Stack pictures of the same size as [b, 3, h, w] with values in [0, 1]."""
    pixels = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def sheet(columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> Image.Image:
    """Draw panels of one size under column titles, with captions below them.

    A column is its title and the small print below it. A row is its panels, None where it has none, and one
    caption for all, or one for each panel that there is.
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
            # The frame separates pictures with a white background from the paper.
            pen.rectangle((left - 1, top - 1, left + width, top + height), outline=_FRAME)
            canvas.paste(panel, (left, top))
        texts, room = (
            ([captions], canvas.width - 2 * _MARGIN) if isinstance(captions, str) else (captions, width)
        )
        for (left, _), text in zip(there, texts, strict=False):
            words = _shortened(text, small_font, room)
            pen.text((left, top + height + 6), words, font=small_font, fill=_SOFT_INK)
    return canvas


def difference(dense: Image.Image, merged: Image.Image, gain: int) -> Image.Image:
    """Draw the absolute difference times ``gain``, clipped at white. Equal pixels are black."""
    apart = np.abs(_pixels(merged) - _pixels(dense)) * gain
    return Image.fromarray(np.minimum(apart, 255).astype(np.uint8))


def difference_gain(dense: Image.Image, merged: Image.Image) -> int:
    """Return the largest power of two, up to 64, with which at most 1 % of the difference is clipped."""
    high = float(np.percentile(np.abs(_pixels(merged) - _pixels(dense)), 99))
    return max((gain for gain in _GAINS if high * gain <= 255), default=1)


def enlarge(picture: Image.Image, factor: int) -> Image.Image:
    """Enlarge a picture without smoothing."""
    size = (picture.width * factor, picture.height * factor)
    return picture.convert("RGB").resize(size, Image.Resampling.NEAREST)


def _pixels(picture: Image.Image) -> NDArray[np.float32]:
    return np.asarray(picture.convert("RGB"), dtype=np.float32)


def _shortened(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    """Cut a line of text with an ellipsis to fit into ``width`` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
