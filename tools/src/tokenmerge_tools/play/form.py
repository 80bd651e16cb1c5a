"""The fields of the page, and the options that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools import demo
from tokenmerge_tools.method_spec import METHODS, MethodSpec
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.pipelines.settings import parse_size

_BUNDLED_SIZE = "256x256"  # 4096 tokens, on which merging has something to save


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
            ratio=options.merging.changes["ratio"],
        )

    def options(self, **machine: Any) -> GenerateOptions:
        """Check the fields.

        ``machine`` has the options that the command line sets for all trials, such as ``device``.
        """
        if self.ratio is None:
            raise ConfigError("ratio: it is empty; give a number from 0 to 1, such as 0.5")
        return GenerateOptions(
            prompt=(self.prompt or "").strip(),
            model=self.model,
            size=parse_size(self.size) if (self.size or "").strip() else None,
            steps=_whole("steps", self.steps),
            seed=_whole("seed", self.seed),
            guidance=_number("guidance", self.guidance),
            merging=MethodSpec(self.method, {"ratio": self.ratio}),
            **machine,
        )


def _number(name: str, text: str) -> float | None:
    """Return a number; None if the field is empty."""
    try:
        return float(text) if (text or "").strip() else None
    except ValueError:
        raise ConfigError(f"{name}: expected a number such as 3, or nothing, got {text!r}") from None


def _whole(name: str, value: float | None) -> int:
    """Return a number of the page as an integer; browsers send 20 and 20.0 alike."""
    if value is None or value != int(value):
        given = "nothing" if value is None else f"{value:g}"
        raise ConfigError(f"{name}: expected a whole number, got {given}")
    return int(value)
