"""Options of commands. Each is declared once, as a field of a class of options with its help.

:func:`tokenmerge_tools.cli.arguments.takes` makes the options of a command from the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmerge.config.checks import integer, one_of
from tokenmerge.default_method import check_min_psnr
from tokenmerge.errors import ConfigError, short_repr
from tokenmerge_tools.method_spec import SPEEDUP, MethodSpec
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL
from tokenmerge_tools.pipelines.settings import (
    ATTENTION_HELP,
    DTYPE_CHOICES,
    SCHEDULER_NAMES,
    check_attention,
    check_guidance,
)


def _parser(read: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise typer.BadParameter(f"expected {wanted}, got {short_repr(text)}.") from None

    return parse


_PARSERS = {"number": _parser(float, "a number"), "integer": _parser(int, "an integer")}


def option(panel: str | None, help: str, *names: str, parser: str | None = None) -> Any:
    """Make an option in one panel of ``--help``. The parser is ``"number"`` or ``"integer"``."""
    read: Callable[[str], Any] | None = _PARSERS[parser] if parser else None
    metavar = f"<{parser}>" if parser else None
    return typer.Option(*names, help=help, rich_help_panel=panel, parser=read, metavar=metavar)


image_option = partial(option, "Image")
machine = partial(option, "Running")

Model = Annotated[str, option(None, "Bundled model, diffusers folder, .safetensors checkpoint or hub id.")]
Dtype = Annotated[str, machine(f"{', '.join(DTYPE_CHOICES)}.")]
Device = Annotated[str, machine("auto, cpu, cuda, cuda:1 or mps.")]
Size = Annotated[
    tuple[int, int] | None,
    image_option("WIDTHxHEIGHT, or N for a square, in pixels. Default: the model's own."),
]
Guidance = Annotated[
    float | None, image_option("Guidance scale. Default: the pipeline's own.", parser="number")
]

LONGEST_PROMPT = 10_000  # in characters; text encoders read a few thousand at most


def check_prompt(name: str, prompt: str) -> None:
    """Refuse a prompt that is longer than any text encoder reads: the tokenizer would take minutes."""
    if len(prompt) > LONGEST_PROMPT:
        raise ConfigError(
            f"{name}: expected at most {LONGEST_PROMPT:,} characters, got {len(prompt):,}; shorten it"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options of every command that draws with a pipeline."""

    model: Model = DEFAULT_MODEL
    size: Size = None
    steps: Annotated[int, image_option("Denoising steps.", parser="integer")] = 25
    scheduler: Annotated[
        str | None,
        image_option(
            f"{', '.join(SCHEDULER_NAMES)}, or a class name in diffusers. Default: the model's own."
        ),
    ] = None
    guidance: Guidance = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    attention: Annotated[str, machine(ATTENTION_HELP)] = "sdpa"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(PipelineOptions):
    """The options of ``tokenmerge generate``, checked before anything is loaded.

    Image i has the seed ``seed + i``, whatever the batch. ``control`` is resized to ``size``.
    """

    prompt: str
    out: Annotated[
        Path | None,
        option(None, "Folder for results. Default: a new folder in outputs/, named after the prompt."),
    ] = None
    merging: MethodSpec = dataclasses.field(default_factory=MethodSpec)
    min_psnr: Annotated[
        float | None,
        option(
            "Merging",
            "Least PSNR to the dense image, in dB. Where auto estimates less, it skips less.",
            parser="number",
        ),
    ] = None
    seed: Annotated[
        int, image_option("Seed of the first image; each later image adds 1.", parser="integer")
    ] = 0
    batch: Annotated[int, image_option("Images per call.", parser="integer")] = 1
    negative_prompt: Annotated[str | None, image_option("What not to draw.")] = None
    control: Annotated[Path | None, image_option("Image for the ControlNet.")] = None
    controlnet: Annotated[str | None, image_option("Folder or hub id of a ControlNet.")] = None
    compare: Annotated[bool, machine("Also draw without tokenmerge.", "--compare/--no-compare")] = True
    repeat: Annotated[int, machine("Timed calls with tokenmerge, and as many without.", parser="integer")] = 3
    record_steps: Annotated[
        bool,
        machine("Print a row for each step: what ran, what merged, and how long it took.", "--record-steps"),
    ] = False

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ConfigError('prompt: it is empty; say what to draw, such as "a red apple"')
        check_prompt("prompt", self.prompt)
        check_prompt("negative-prompt", self.negative_prompt or "")
        for name, lowest in (("steps", 1), ("batch", 1), ("repeat", 1), ("seed", 0)):
            integer(lowest)(name, getattr(self, name))
        check_guidance("guidance", self.guidance)
        one_of(DTYPE_CHOICES)("dtype", self.dtype)
        both = "an image and the ControlNet that reads it"
        if self.control is not None and self.controlnet is None:
            raise ConfigError(f"control: it needs controlnet too: {both}")
        if self.controlnet is not None and self.control is None:
            raise ConfigError(f"controlnet: it needs control too: {both}")
        check_attention(self.attention)
        check_min_psnr("min-psnr", self.min_psnr)
        if self.min_psnr is not None and (
            not self.merging.needs_model or set(self.merging.changes) - {SPEEDUP}
        ):
            raise ConfigError(
                f"min-psnr: it works with a speed-up alone, got {self.merging.title}; give --speedup 2 "
                f"--min-psnr {self.min_psnr:g}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the options in JSON-compatible values."""
        paths = {
            "control": str(self.control) if self.control else None,
            "out": str(self.out) if self.out else None,
        }
        return {**dataclasses.asdict(self), "merging": self.merging.to_dict(), **paths}
