"""The training data: the glyphs of `tokenmerge_tools.demo.glyphs`, drawn on its backgrounds.

Every image is one glyph of Noto Color Emoji on one flat colour, and its caption says exactly that:
"a red apple on a light blue background". Glyph and background are independent, so that a model which has
learnt them can be judged on each separately.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from tokenmerge_tools.demo.glyphs import BACKGROUNDS, Glyph

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")  # Debian package fonts-noto-color-emoji

STRIKE = 109  # the only size the font holds: bitmaps of 136 × 128 pixels
MARGIN = 0.08  # of the image's height, above and below: some background shows on every side


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont:
    if not FONT.exists():
        raise FileNotFoundError(f"{FONT} is missing: install the Debian package fonts-noto-color-emoji")
    return ImageFont.truetype(FONT, STRIKE)


def draw(glyph: Glyph, size: int) -> Image.Image:
    """Draw a glyph in the middle of a transparent square of `size` pixels (mode RGBA)."""
    strike = Image.new("RGBA", (136, 128))
    ImageDraw.Draw(strike).text((0, 0), glyph.character, font=_font(), embedded_color=True, anchor="lt")
    height = round(size * (1 - 2 * MARGIN))
    scaled = strike.resize((round(height * 136 / 128), height), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (size, size))
    square.paste(scaled, ((size - scaled.width) // 2, (size - scaled.height) // 2))
    return square


def compose(glyph: Image.Image, background: str) -> np.ndarray:
    """Lay a drawn glyph on a background: uint8 [h, w, 3]."""
    canvas = Image.new("RGBA", glyph.size, (*BACKGROUNDS[background], 255))
    canvas.alpha_composite(glyph)
    picture = canvas.convert("RGB")
    if picture.width > 150:  # the strike was enlarged: sharpen its edges back to about one pixel
        picture = picture.filter(ImageFilter.UnsharpMask(radius=2, percent=80, threshold=0))
    return np.asarray(picture)
