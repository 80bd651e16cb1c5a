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

# Of each preset: the id of its dataset on the hub, and its columns of prompts and of categories.
PRESETS: dict[str, tuple[str, ...]] = {
    "drawbench": ("sayakpaul/drawbench", "Prompts", "Category"),
    "partiprompts": ("nateraw/parti-prompts", "Prompt", "Category"),
    "coco": ("sayakpaul/coco-30-val-2014", "caption"),
}
_BUILT_IN = 100
_LARGEST = 64 * 2**20  # bytes; a million prompts


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, with its category if the file has categories."""

    text: str
    category: str | None = None


@dataclasses.dataclass(frozen=True)
class Item:
    """One picture to draw with each variant."""

    prompt: Prompt
    seed: int


def items_of(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Item]:
    """Combine every prompt with every seed. The seeds of one prompt are consecutive."""
    return [Item(prompt, seed) for prompt in prompts for seed in seeds]


def built_in_prompts() -> list[Prompt]:
    """Return the prompts of the bundled models: 100 glyphs, on each background in turn."""
    glyphs = read_glyphs()
    return [Prompt(caption(glyphs[glyph].name, ground)) for glyph, ground in choose_prompts(_BUILT_IN)]


def read_prompts(path: Path) -> list[Prompt]:
    """Read a UTF-8 file of prompts. Repeated prompts are read once.

    In a table separated by tabs (PartiPrompts), the column ``Prompt`` is read, and the column ``Category`` if
    there is one. In any other file, each line is a prompt.
    """
    lines = _lines(path)
    found: list[tuple[str, str | None]] = [(line, None) for line in lines]
    if "Prompt" in lines[0].split("\t"):
        names, *rows = (line.split("\t") for line in lines)
        columns = [dict(zip(names, row, strict=False)) for row in rows]
        found = [(row.get("Prompt", ""), row.get("Category") or None) for row in columns]
    prompts = {text: Prompt(text, category) for line, category in found if (text := line.strip())}
    for text in prompts:
        check_prompt(f"prompts: {path}: {text[:20]!r}…", text)
    if not prompts:
        raise ConfigError(f"prompts: {path} has a header but no prompts; give a file with one per line")
    return list(prompts.values())


def download_prompts(preset: str, limit: int | None) -> list[Prompt]:
    """Read the first prompts of a preset from the hub, by the package datasets. Repeated ones count once."""
    name, *columns = PRESETS[preset]
    instead = "or give --prompts with a file, one prompt per line"
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"preset {preset}: its prompts are the dataset {name} of the hub, and the package datasets is "
            f"not installed; run: pip install datasets, {instead}"
        )
    try:
        stream: Any = importlib.import_module("datasets").load_dataset(name, split="train", streaming=True)
        rows = [[row[column] for column in columns] for row in islice(stream, limit)]
    except Exception as error:
        raise ConfigError(
            f"preset {preset}: cannot load {name} ({reason_of(error)}); check the network, {instead}"
        ) from error
    return list({row[0].strip(): Prompt(row[0].strip(), *row[1:]) for row in rows}.values())


def _lines(path: Path) -> list[str]:
    """Return the lines that are not blank."""
    text = read_text(path, "prompts", "give a file with one prompt per line", _LARGEST)
    if "\0" in text:
        raise ConfigError(f"prompts: {path} is binary; give a text file with one prompt per line")
    lines = [line.strip("\r ") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"prompts: {path} is empty; give a file with one prompt per line")
    return lines
