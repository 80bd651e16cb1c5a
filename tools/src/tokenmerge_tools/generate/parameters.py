"""The parameters of a picture as text in its PNG file, in the form that web UIs write and read.

The text stands under ``parameters``::

    a red apple
    Negative prompt: blue
    Steps: 20, CFG scale: 3.0, Seed: 0, Size: 256x256, Model: emoji-unet, Token merging: "speed-up 2, {…}"

Values that contain a comma, a colon, a quote or a line break are in double quotes, written as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenmerge import __version__
from tokenmerge.config import ToMeConfig, read_metadata
from tokenmerge.config.checks import refuse
from tokenmerge.errors import ConfigError
from tokenmerge_tools import demo
from tokenmerge_tools.files import opened_picture
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.loading import PICKLE
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import parse_size, scheduler_class_name

if TYPE_CHECKING:
    from PIL.Image import Image

Number = TypeVar("Number", int, float)

_KEY = "parameters"
_NEGATIVE = "Negative prompt: "
_ADVICE = "give a PNG that tokenmerge generate or a web UI wrote, such as merged-00.png"
_LONGEST = 100_000  # characters; web UIs write some thousands
# A name, a colon, and a value: a JSON string, or the text before the next comma. The length of a name is
# bounded, so that the time is linear in the length of the text.
_ENTRY = re.compile(r'(\w[\w \-/]{1,60}):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of a picture. None: unknown, or the model's default; ``merging`` is also None if dense.

    The size is (width, height) in pixels. Of a model in a folder or file, there is only the name.
    """

    prompt: str
    seed: int | None = None
    steps: int | None = None
    size: tuple[int, int] | None = None
    negative_prompt: str | None = None
    guidance: float | None = None
    scheduler: str | None = None
    model: str | None = None
    controlnet: str | None = None
    merging: ToMeConfig | None = None


def parameters_of(options: GenerateOptions, size: tuple[int, int]) -> Parameters:
    """Return the parameters of a run's pictures, apart from their seeds and token merging.

    For a folder or a file, only its name is included: pictures are shared, and paths are private.
    """
    return Parameters(
        prompt=options.prompt,
        steps=options.steps,
        size=size,
        negative_prompt=options.negative_prompt,
        guidance=options.guidance,
        scheduler=options.scheduler,
        model=_name(options.model),
        controlnet=options.controlnet and _name(options.controlnet),
    )


def _name(model: str) -> str:
    path = Path(model.removeprefix(PICKLE))
    return path.name if path.exists() or path.is_absolute() else str(path)


def write_picture(picture: Image, parameters: Parameters, metadata: str | None, path: Path) -> None:
    """Write a PNG file with the parameters of its picture.

    ``metadata`` has the settings of merging, as :meth:`tokenmerge.Patch.metadata` returns them; None: dense.
    """
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text(_KEY, _to_text(parameters, metadata))
    picture.save(path, pnginfo=info)


def read_picture(path: Path) -> Parameters:
    """Read the parameters of a picture from its PNG file."""
    with opened_picture(path, "like", _ADVICE) as picture:
        text = getattr(picture, "text", {}).get(_KEY)
    if text is None:
        raise ConfigError(f"like: {path} does not say what it was made with; {_ADVICE}")
    try:
        return _from_text(text)
    except ConfigError as error:
        raise ConfigError(f"like: {path}: {error}") from error


def _to_text(own: Parameters, metadata: str | None) -> str:
    size = own.size and f"{own.size[0]}x{own.size[1]}"
    values = {
        "Steps": own.steps,
        "Sampler": own.scheduler,
        "CFG scale": own.guidance,
        "Seed": own.seed,
        "Size": size,
        "Model": own.model,
        "ControlNet": own.controlnet,
        "Version": f"tokenmerge {__version__}",
    }
    entries = [(name, str(value)) for name, value in values.items() if value is not None]
    if metadata is not None:
        name, _, value = metadata.partition(": ")
        entries.append((name, value))
    lines = [own.prompt]
    if own.negative_prompt is not None:
        lines.append(_NEGATIVE + own.negative_prompt)
    return "\n".join([*lines, ", ".join(f"{name}: {_quoted(value)}" for name, value in entries)])


def _quoted(value: str) -> str:
    plain = value == value.strip() and not re.search(r'[,:\n"]', value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def _from_text(text: str) -> Parameters:
    if len(text) > _LONGEST:
        raise ConfigError(
            f"parameters: expected at most {_LONGEST:,} characters, got {len(text):,}; give another picture"
        )
    prompts, _, last = text.rstrip().rpartition("\n")
    entries = {name.strip(): _unquoted(value) for name, value in _ENTRY.findall(last)}
    if "Steps" not in entries:  # the text is only a prompt
        prompts, entries = text, {}
    prompt, negates, negative = prompts.partition("\n" + _NEGATIVE)
    merging = entries.get("Token merging")
    return Parameters(
        prompt=prompt,
        seed=_number(entries, "Seed", int, "an integer"),
        steps=_number(entries, "Steps", int, "an integer"),
        size=parse_size(entries["Size"]) if "Size" in entries else None,
        negative_prompt=negative if negates else None,
        guidance=_number(entries, "CFG scale", float, "a number"),
        scheduler=entries.get("Sampler"),
        model=entries.get("Model"),
        controlnet=entries.get("ControlNet"),
        merging=None if merging is None else read_metadata(merging),
    )


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value.strip()
    try:
        return str(json.loads(value))
    except ValueError:
        return value


def _number(entries: dict[str, str], name: str, read: Callable[[str], Number], wanted: str) -> Number | None:
    try:
        return read(entries[name]) if name in entries else None
    except ValueError:
        refuse(name, wanted, entries[name])


# The options that set how to merge, apart from single settings.
_METHODS = {"method", "settings_file"}


def options_like(
    path: Path, options: Mapping[str, Any], given: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Fill in options from the parameters of a picture. Return them, and notes on what could not be taken.

    The model is taken only if it is bundled, so that a picture from elsewhere cannot load a model. Options
    ``given`` by the user are kept, and single settings of token merging replace those of the picture.
    """
    picture, notes = read_picture(path), []
    if "model" not in given and picture.model is not None and picture.model not in demo.NAMES:
        raise ConfigError(
            f"like: {path} was made with the model {picture.model!r}; give this or another model with --model"
        )
    if "scheduler" not in given and picture.scheduler is not None:
        try:
            scheduler_class_name(picture.scheduler)
        except ConfigError:
            notes.append(f"{path}: the sampler {picture.scheduler!r} is unknown; set one with --scheduler")
            picture = dataclasses.replace(picture, scheduler=None)
    if picture.controlnet is not None and "controlnet" not in given:
        notes.append(
            f"{path} was made with the ControlNet {picture.controlnet!r}; give it with --controlnet, and its "
            "picture with --control"
        )
    names = ("prompt", "seed", "steps", "size", "negative_prompt", "guidance", "scheduler", "model")
    found = {name: value for name in names if (value := getattr(picture, name)) is not None}
    taken = {**options, **{name: value for name, value in found.items() if name not in given}}
    if picture.merging is None:
        notes.append(f"{path}: it has no settings of token merging; those of the options are used")
    elif not _METHODS & set(given):
        own = options["merging"].changes
        also = f" and {', '.join(own)}" if own else ""
        taken["merging"] = MethodSpec("tome", {**picture.merging.changed(), **own}, f"{path}{also}")
    return taken, notes
