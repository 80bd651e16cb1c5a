"""The parameters of an image as text in its PNG file, in the form that web UIs write.

The text stands under ``parameters``::

    a red apple
    Negative prompt: blue
    Steps: 20, CFG scale: 3.0, Seed: 0, Size: 256x256, Model: emoji-unet, Token merging: "speedup=2, {…}"

Values that contain a comma, a colon, a quote or a line break are in double quotes, written as JSON.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmerge import __version__
from tokenmerge_tools.pipelines.loading import PICKLE
from tokenmerge_tools.pipelines.options import GenerateOptions

if TYPE_CHECKING:
    from PIL.Image import Image


def write_picture(
    image: Image, options: GenerateOptions, seed: int, metadata: str | None, path: Path
) -> None:
    """Write a PNG file with the parameters of its image.

    The options have the size that was drawn. ``metadata`` has the settings of merging, as
    :meth:`tokenmerge.Patch.metadata` returns them, or is None for a dense image.
    """
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("parameters", _text(options, seed, metadata))
    image.save(path, pnginfo=info)


def _text(options: GenerateOptions, seed: int, metadata: str | None) -> str:
    values = {
        "Steps": options.steps,
        "Sampler": options.scheduler,
        "CFG scale": options.guidance,
        "Seed": seed,
        "Size": options.size and "x".join(map(str, options.size)),
        "Model": _name(options.model),
        "ControlNet": options.controlnet and _name(options.controlnet),
        "Version": f"tokenmerge {__version__}",
    }
    entries = [(name, str(value)) for name, value in values.items() if value is not None]
    if metadata is not None:
        name, _, value = metadata.partition(": ")
        entries.append((name, value))
    lines = [options.prompt]
    if options.negative_prompt is not None:
        lines.append(f"Negative prompt: {options.negative_prompt}")
    return "\n".join([*lines, ", ".join(f"{name}: {_quoted(value)}" for name, value in entries)])


def _name(model: str) -> str:
    """Return the name of a folder or file without its path: images are shared, and paths are private."""
    path = Path(model.removeprefix(PICKLE))
    return path.name if path.exists() or path.is_absolute() else str(path)


def _quoted(value: str) -> str:
    plain = value == value.strip() and not re.search(r'[,:\n"]', value)
    return value if plain else json.dumps(value, ensure_ascii=False)
