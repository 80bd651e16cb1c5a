"""The images that the bundled models draw, which are emoji on plain backgrounds, and their prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

GLYPH_LIST = Path(__file__).parent / "emoji" / "glyphs.tsv"

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
    """One emoji: its character, and its name with an article, such as "a red apple"."""

    character: str
    name: str


@lru_cache(maxsize=1)
def read_glyphs() -> tuple[Glyph, ...]:
    """Read the list of glyphs in the package. Its order determines their indices."""
    rows = (line.split("\t") for line in GLYPH_LIST.read_text(encoding="utf-8").splitlines())
    return tuple(Glyph(chr(int(codepoint, 16)), name) for codepoint, name in rows)


def caption(name: str, background: str) -> str:
    """Describe an image.

    >>> caption("a red apple", "orange")
    'a red apple on an orange background'
    """
    return f"{name} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"


def choose_prompts(count: int, seed: int = 0) -> list[tuple[int, str]]:
    """Choose ``count`` different glyphs at random, by index, on each background in turn."""
    order = np.random.default_rng(seed).permutation(len(read_glyphs()))[:count]
    names = list(BACKGROUNDS)
    return [(int(glyph), names[i % len(names)]) for i, glyph in enumerate(order)]


def asked_for(prompt: str) -> tuple[int, str] | None:
    """Return the index of the glyph and the name of the background that a prompt asks for.

    The background is white if the prompt names none. The result is None for any other prompt.

    >>> asked_for("an hourglass on a black background"), asked_for("a watch"), asked_for("a city at night")
    ((1, 'black'), (0, 'white'), None)
    """
    return _meanings().get(prompt)


@lru_cache(maxsize=1)
def _meanings() -> dict[str, tuple[int, str]]:
    glyphs = read_glyphs()
    meanings = {}
    for index, glyph in enumerate(glyphs):
        meanings[glyph.name] = (index, "white")
        for background in BACKGROUNDS:
            meanings[caption(glyph.name, background)] = (index, background)
    return meanings
