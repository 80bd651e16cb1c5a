"""The fields of the page, and the options that they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenmerge.config.checks import as_number, integer, one_of, refuse, text
from tokenmerge.errors import ConfigError
from tokenmerge_tools import demo
from tokenmerge_tools.method_spec import AUTO, DEFAULT_SPEEDUP, METHODS, SPEEDUP, MethodSpec
from tokenmerge_tools.pipelines.options import LONGEST_PROMPT, GenerateOptions
from tokenmerge_tools.pipelines.settings import parse_size

_LONGEST_WORD = 40
_MOST_STEPS = 1_000  # the number that models are trained with
_LARGEST_SIDE = 2_048  # in pixels; half of it for the bundled models, whose latents are finer
_BUNDLED_SIZE = "256x256"  # 4096 tokens, enough for merging to save time


@dataclasses.dataclass(frozen=True)
class Form:
    """The values of the fields, in the order of the page.

    An empty size or guidance is the model's or the pipeline's default.
    """

    model: str = GenerateOptions.model
    prompt: str = "a red apple on a light blue background"
    seed: float | None = 0
    size: str = _BUNDLED_SIZE
    steps: float | None = 20
    guidance: str = ""
    method: str = METHODS[0]
    speedup: float | None = DEFAULT_SPEEDUP
    ratio: float | None = 0.5

    @classmethod
    def first(cls, model: str) -> Form:
        """Return the fields before the first trial."""
        return cls(model) if model in demo.NAMES else cls(model, size="")

    @classmethod
    def of(cls, options: GenerateOptions) -> Form:
        """Return the fields that stand for these options."""
        return cls(
            model=options.model,
            prompt=options.prompt,
            seed=options.seed,
            size="" if options.size is None else "x".join(map(str, options.size)),
            steps=options.steps,
            guidance="" if options.guidance is None else f"{options.guidance:g}",
            method=options.merging.method,
            speedup=options.merging.speedup,
            ratio=options.merging.changes.get("ratio", cls.ratio),
        )

    def options(self, models: Sequence[str] | None = None, **machine: Any) -> GenerateOptions:
        """Check the fields. They come from visitors, and may have values of any type.

        ``models`` are those that can be chosen, or None for that of the form alone. ``machine`` has the
        options that the command line sets for all trials, such as ``device``.
        """
        method = text("method", self.method)
        amount = SPEEDUP if method == AUTO else "ratio"
        given = getattr(self, amount)
        if given is None:
            example = "≥ 1, such as 2" if method == AUTO else "from 0 to 1, such as 0.5"
            raise ConfigError(f"{amount}: it is empty; give a number {example}")
        one_of(models or (self.model,))("model", self.model)
        size = _text("size", self.size, _LONGEST_WORD)
        return GenerateOptions(
            prompt=_text("prompt", self.prompt, LONGEST_PROMPT),
            model=self.model,
            size=self._limited(parse_size(size)) if size else None,
            steps=_whole("steps", self.steps, 1, _MOST_STEPS),
            seed=_whole("seed", self.seed, 0),
            guidance=_number("guidance", _text("guidance", self.guidance, _LONGEST_WORD)),
            merging=MethodSpec(method, {amount: given}),
            **machine,
        )

    def _limited(self, size: tuple[int, int]) -> tuple[int, int]:
        most = _LARGEST_SIDE // 2 if self.model in demo.NAMES else _LARGEST_SIDE
        width, height = size
        if width * height > most**2:
            raise ConfigError(
                f"size: expected at most {most**2:,} pixels, such as {most}x{most}, got {width}x{height}; "
                "tokenmerge generate draws larger ones"
            )
        return size


def _text(name: str, value: Any, longest: int) -> str:
    """Return a text without the blanks around it, or an empty text for None."""
    found = "" if value is None else text(name, value)
    if len(found) > longest:
        raise ConfigError(f"{name}: expected at most {longest:,} characters, got {len(found):,}; shorten it")
    return found.strip()


def _number(name: str, written: str) -> float | None:
    """Return a number, or None if the field is empty."""
    try:
        return float(written) if written else None
    except ValueError:
        raise ConfigError(f"{name}: expected a number such as 3, or nothing, got {written!r}") from None


def _whole(name: str, value: Any, lowest: int, most: int | None = None) -> int:
    """Return a number of the page as an integer; browsers send 20 and 20.0 alike."""
    if value is None:
        raise ConfigError(f"{name}: expected a whole number, got nothing")
    plain = as_number(value)
    if plain is None or plain != int(plain):
        refuse(name, "a whole number", value)
    found = integer(lowest)(name, int(value))
    if most is not None and found > most:
        refuse(name, f"an integer from {lowest} to {most:,}", found)
    return found
