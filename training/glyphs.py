"""The training data: named emoji glyphs, drawn on named plain backgrounds.

Every picture is one glyph of Noto Color Emoji on one flat colour, and its caption says exactly that:
"a red apple on a light blue background". Glyph and background are independent, so that a model which has
learnt them can be judged on each separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

GLYPH_LIST = Path(__file__).with_name("glyphs.tsv")
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")  # Debian package fonts-noto-color-emoji

STRIKE = 109  # the only size the font holds: bitmaps of 136 × 128 pixels
MARGIN = 0.08  # of the picture's height, above and below: some background shows on every side

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "light gray": (200, 200, 204),
    "light blue": (165, 212, 245),
    "light green": (172, 226, 160),
    "yellow": (255, 226, 92),
    "pink": (255, 178, 205),
    "orange": (255, 158, 66),
    "purple": (172, 130, 220),
    "dark blue": (28, 48, 112),
    "black": (22, 22, 24),
}


@dataclass(frozen=True)
class Glyph:
    """One emoji: its character and its name with an article, "a red apple"."""

    character: str
    name: str


def read_glyphs(path: Path = GLYPH_LIST) -> list[Glyph]:
    """Read the committed list; its order fixes the glyphs' indices."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [Glyph(chr(int(codepoint, 16)), name) for codepoint, name in rows]


def caption(name: str, background: str) -> str:
    """Say what a picture shows.

    >>> caption("a red apple", "orange")
    'a red apple on an orange background'
    """
    article = "an" if background[0] in "aeiou" else "a"
    return f"{name} on {article} {background} background"


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
