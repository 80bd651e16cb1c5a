"""Prompts from a file, or those of a bundled model."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from tokenmerge.errors import ConfigError
from tokenmerge.measure.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge.measure.files import read_bytes

__all__ = ["IMAGENET_TEMPLATE", "Item", "Prompt", "built_in_prompts", "items_of", "read_prompts"]

IMAGENET_TEMPLATE = "a photo of a {}"

_BUILT_IN = 100
_SYNSET = re.compile(r"n\d{8}\s+")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        text: what to draw.
        category: the part of the set that it belongs to, if the file says one.
    """

    text: str
    category: str | None = None


@dataclasses.dataclass(frozen=True)
class Item:
    """One picture to draw, by each variant."""

    prompt: Prompt
    seed: int


def items_of(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Item]:
    """Every prompt with every seed, the seeds of one prompt together."""
    return [Item(prompt, seed) for prompt in prompts for seed in seeds]


def built_in_prompts() -> list[Prompt]:
    """100 glyphs, on each of the backgrounds in turn: what the bundled models were trained to draw."""
    glyphs = read_glyphs()
    return [Prompt(caption(glyphs[glyph].name, ground)) for glyph, ground in choose_prompts(_BUILT_IN)]


def read_prompts(path: Path, template: str | None = None) -> list[Prompt]:
    """Read a file of prompts; each is drawn once, however often it is in the file.

    Args:
        path: UTF-8 text. A table with tabs and a column ``Prompt`` (PartiPrompts) gives that column, and the
            column ``Category`` where there is one. Lines that begin with WordNet ids
            (``n01440764 tench, Tinca tinca``, the classes of ImageNet-1k) give their first name in the words
            "a photo of a …". Any other file gives a prompt a line.
        template: text around each of them, with ``{}`` in its place; for files of bare class names.

    Raises:
        ConfigError: the file is missing, binary or empty, or the template has no place for the text.
    """
    lines = _lines(path)
    if "Prompt" in lines[0].split("\t"):
        found = [
            (row["Prompt"] or "", row.get("Category") or None)
            for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]
    elif all(map(_SYNSET.match, lines)):
        found = [(_SYNSET.sub("", line).partition(",")[0], None) for line in lines]
        template = template or IMAGENET_TEMPLATE
    else:
        found = [(line, None) for line in lines]
    if template is not None and "{}" not in template:
        raise ConfigError(
            f"template: expected {{}} where the text goes, such as {IMAGENET_TEMPLATE!r}, got {template!r}"
        )
    prompts = {
        text: Prompt(text, category)
        for line, category in found
        if (text := line.strip() if template is None else template.replace("{}", line.strip()))
    }
    if not prompts:
        raise ConfigError(f"prompts: {path} has a header and no prompts; give a file with one a line")
    return list(prompts.values())


def _lines(path: Path) -> list[str]:
    """The lines that are not blank."""
    content = read_bytes(path, "prompts", "give a file with a prompt a line")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts: {path} is not UTF-8 text; give a file with a prompt a line") from error
    if "\0" in text:
        raise ConfigError(f"prompts: {path} is binary; give a text file with a prompt a line")
    lines = [line.strip("\r ") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"prompts: {path} is empty; give a file with a prompt a line")
    return lines
