"""Prompts from a file, or those of a bundled model."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tokenmerge.errors import ConfigError, reason_of
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.files import read_text
from tokenmerge_tools.pipelines.options import check_prompt

PROMPTS_HELP = (
    "File with one prompt per line, or PartiPrompts' TSV. Default: the prompts of the bundled model."
)

# For each preset, the id of its dataset on the hub and the column with the prompts.
PRESETS = {
    "drawbench": ("sayakpaul/drawbench", "Prompts"),
    "partiprompts": ("nateraw/parti-prompts", "Prompt"),
    "coco": ("sayakpaul/coco-30-val-2014", "caption"),
}
_BUILT_IN = 100
_LARGEST = 64 * 2**20  # in bytes, about a million prompts


@dataclasses.dataclass(frozen=True)
class Item:
    """One image to draw with each variant."""

    prompt: str
    seed: int


def items_of(prompts: Sequence[str], seeds: Sequence[int]) -> list[Item]:
    """Combine every prompt with every seed. The seeds of one prompt are consecutive."""
    return [Item(prompt, seed) for prompt in prompts for seed in seeds]


def built_in_prompts() -> list[str]:
    """Return the prompts of the bundled models: 100 glyphs, on each background in turn."""
    glyphs = read_glyphs()
    return [caption(glyphs[glyph].name, ground) for glyph, ground in choose_prompts(_BUILT_IN)]


def read_prompts(path: Path) -> list[str]:
    """Read a UTF-8 file of prompts. Repeated prompts are read once.

    In a table separated by tabs (PartiPrompts), the column ``Prompt`` is read. In any other file, each line
    is a prompt.
    """
    found = _lines(path)
    if "Prompt" in found[0].split("\t"):
        names, *rows = (line.split("\t") for line in found)
        found = [dict(zip(names, row, strict=False)).get("Prompt", "") for row in rows]
    prompts = list(dict.fromkeys(text for line in found if (text := line.strip())))
    for text in prompts:
        check_prompt(f"prompts: {path}: {text[:20]!r}…", text)
    if not prompts:
        raise ConfigError(f"prompts: {path} has a header but no prompts; give a file with one per line")
    return prompts


def download_prompts(preset: str, limit: int | None) -> list[str]:
    """Read the first prompts of a preset from the hub, with the package datasets. Repeats count once."""
    name, column = PRESETS[preset]
    instead = "or give --prompts with a file, one prompt per line"
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"preset {preset}: its prompts are the dataset {name} of the hub, and the package datasets is "
            f"not installed; run: pip install datasets, {instead}"
        )
    try:
        stream: Any = importlib.import_module("datasets").load_dataset(name, split="train", streaming=True)
        found = [row[column].strip() for row in islice(stream, limit)]
    except Exception as error:
        raise ConfigError(
            f"preset {preset}: cannot load {name} ({reason_of(error)}); check the network, {instead}"
        ) from error
    return list(dict.fromkeys(found))


def _lines(path: Path) -> list[str]:
    text = read_text(path, "prompts", "give a file with one prompt per line", _LARGEST)
    if "\0" in text:
        raise ConfigError(f"prompts: {path} is binary; give a text file with one prompt per line")
    lines = [line.strip("\r ") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"prompts: {path} is empty; give a file with one prompt per line")
    return lines
