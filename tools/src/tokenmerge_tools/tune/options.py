"""The options of ``tokenmerge tune``."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

from tokenmerge.config.checks import integer, number, optional
from tokenmerge.default_method import check_min_psnr
from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.prompts import PROMPTS_HELP
from tokenmerge_tools.pipelines.options import PipelineOptions, option

_USUAL_PSNR = 35.0  # in dB; at this value, small details differ
_FEWEST = 4  # prompts
_goal = partial(option, "Goal")
_check_speedup = optional(number("a number above 1, the speed of dense, such as 2", lambda speed: speed > 1))
_check_lpips = optional(number("a number above 0 and below 1, such as 0.1", lambda value: 0 < value < 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(PipelineOptions):
    """The options of ``tokenmerge tune``: what to find the speed for, or which speed to measure."""

    min_psnr: Annotated[
        float | None,
        _goal(
            "PSNR to dense in dB that 9 of 10 prompts shall keep. With no goal at all, it is 35.",
            parser="number",
        ),
    ] = None
    lpips: Annotated[
        float | None,
        _goal("LPIPS to dense that 9 of 10 prompts shall not exceed, such as 0.1.", parser="number"),
    ] = None
    speedup: Annotated[
        float | None,
        _goal("Measure this speed-up in place of finding one: how close is it?", parser="number"),
    ] = None
    prompts: Annotated[Path | None, option("Prompts", PROMPTS_HELP)] = None
    items: Annotated[
        int,
        option(
            "Prompts",
            "Number of prompts to draw. More make the answer surer. If the file has fewer, each is drawn "
            "with several seeds.",
            parser="integer",
        ),
    ] = 6
    out: Annotated[
        Path, option(None, "File for the result. Records and images go beside it.", "--out", "-o")
    ] = Path("outputs/tuned.json")

    def __post_init__(self) -> None:
        check_min_psnr("min-psnr", self.min_psnr)
        _check_lpips("lpips", self.lpips)
        _check_speedup("speedup", self.speedup)
        goals = {"min-psnr": self.min_psnr, "lpips": self.lpips, "speedup": self.speedup}
        given = [name for name, value in goals.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{', '.join(given)}: expected one goal, got {len(given)}; leave out the others"
            )
        if self.out.suffix != ".json":
            raise ConfigError(f"out: expected a file ending in .json, got {self.out}")
        integer(_FEWEST)("items", self.items)
        if self.steps < 2:
            raise ConfigError(
                f"steps: expected at least 2, got {self.steps}; with one step, nothing is left to reuse"
            )
        self.evaluation()

    @property
    def metric(self) -> str:
        """The name of the metric that the goal is about."""
        return "psnr" if self.lpips is None else "lpips"

    @property
    def goal(self) -> float | None:
        """The closeness that 9 of 10 prompts should keep, or None if a speed is measured."""
        if self.speedup is not None:
            return None
        if self.lpips is not None:
            return self.lpips
        return _USUAL_PSNR if self.min_psnr is None else self.min_psnr

    @property
    def records(self) -> Path:
        """The file with every measurement."""
        return self.out.with_suffix(".jsonl")

    @property
    def strip(self) -> Path:
        """The file with the images side by side."""
        return self.out.with_suffix(".png")

    def evaluation(self, prompts: int | None = None) -> EvaluateOptions:
        """Return the options of ``tokenmerge evaluate`` for drawing the same images.

        If there are fewer ``prompts`` than ``items``, each is drawn with several seeds.
        """
        shared = [field.name for field in dataclasses.fields(PipelineOptions)]
        return EvaluateOptions(
            **{name: getattr(self, name) for name in (*shared, "prompts")},
            limit=self.items,
            seeds=1 if prompts is None else -(-self.items // prompts),
            variants=(),
            batch=1,
            metrics=() if self.metric == "psnr" else (self.metric,),
            out=self.records,
        )
