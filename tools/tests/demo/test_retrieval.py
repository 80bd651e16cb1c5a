"""The bundled models are judged by what their images show."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from skimage.color import rgb2lab

from tokenmerge_tools.demo.glyphs import BACKGROUNDS, asked_for, caption, choose_prompts, read_glyphs
from tokenmerge_tools.demo.retrieval import COLUMNS, GRID, SHEET, Gallery, background_of, lab


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    return Gallery()


def drawn(glyph: int, background: str, side: int = 128) -> Image.Image:
    """An image of a glyph, as a perfect model would draw it."""
    left, top = glyph % COLUMNS * GRID, glyph // COLUMNS * GRID
    with Image.open(SHEET) as sheet:
        thumbnail = sheet.crop((left, top, left + GRID, top + GRID))
    page = Image.new("RGBA", thumbnail.size, BACKGROUNDS[background])
    page.alpha_composite(thumbnail)
    return page.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)


def test_lab_is_scikit_image_s() -> None:
    colours = np.random.default_rng(0).random((500, 3))
    # Both take the sRGB matrix and D65 as rounded to six digits: 1e-6 · 500 for a* and b*.
    np.testing.assert_allclose(lab(colours), rgb2lab(colours[None])[0], atol=5e-4)


def test_every_glyph_is_recognised_on_every_background(gallery: Gallery) -> None:
    backgrounds = list(BACKGROUNDS)
    for glyph in range(0, len(read_glyphs()), 7):
        background = backgrounds[glyph % len(backgrounds)]
        assert gallery.identify(drawn(glyph, background)) == (glyph, background)


def test_noise_and_size_do_not_confuse_it(gallery: Gallery) -> None:
    noise = np.random.default_rng(0).normal(0, 12, (200, 200, 3))
    for glyph, background in choose_prompts(20):
        picture = np.asarray(drawn(glyph, background, side=200), dtype=float) + noise
        noisy = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
        assert gallery.identify(noisy) == (glyph, background)


def test_the_background_is_the_named_colour_nearest_to_the_border() -> None:
    for name, colour in BACKGROUNDS.items():
        picture = Image.new("RGB", (64, 64), colour)
        picture.paste((0, 255, 0), (8, 8, 56, 56))
        assert background_of(picture) == name


def test_captions_and_what_they_ask_for_agree() -> None:
    glyphs = read_glyphs()
    for glyph, background in choose_prompts(len(glyphs)):
        assert asked_for(caption(glyphs[glyph].name, background)) == (glyph, background)
    assert asked_for("A watch") is None
