"""The options of ``tokenmerge tune``."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Annotated

from tokenmerge.config.checks import integer, number, one_of
from tokenmerge.errors import ConfigError, short_repr
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.metrics import PICTURE_METRICS
from tokenmerge_tools.evaluate.prompts import PROMPTS_HELP
from tokenmerge_tools.pipelines.options import PipelineOptions, option

_UNITS = {"s": 1, "min": 60, "h": 3600}
_search = partial(option, "Search")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(PipelineOptions):
    """What to find a plan for, and how many seconds to search, those of earlier runs included."""

    speedup: Annotated[
        float, _search("Speed-up to reach: dense operations, divided by those of the plan.", parser="number")
    ] = 2.0
    within: float = 600.0
    prompts: Annotated[Path | None, _search(PROMPTS_HELP)] = None
    metric: Annotated[
        str | None,
        _search(
            f"Closeness metric of the check: {', '.join(PICTURE_METRICS)}. NAME=NETWORK uses the network in "
            "a folder or with a hub id. Default: psnr."
        ),
    ] = None
    items: Annotated[
        int,
        _search("Number of prompts: two thirds for the search, the others for the check.", parser="integer"),
    ] = 12
    out: Annotated[
        Path, option(None, "File for the plan. Records and images go beside it.", "--out", "-o")
    ] = Path("outputs/tuned.json")

    def __post_init__(self) -> None:
        number("a number above 1, the speed of dense, such as 2", lambda speedup: speedup > 1)(
            "speedup", self.speedup
        )
        one_of(PICTURE_METRICS)("metric", self.metric_name)
        if self.out.suffix != ".json":
            raise ConfigError(f"out: expected a file ending in .json, got {self.out}")
        if not self.within > 0:
            raise ConfigError(f"within: expected a duration above 0 seconds, got {self.within:g}")
        integer(4)("items", self.items)
        if self.steps < 2:
            raise ConfigError(
                f"steps: expected at least 2, got {self.steps}; with one step, nothing is left to reuse"
            )
        self.evaluation()

    @property
    def metric_name(self) -> str:
        """The name of the metric, without its network."""
        return (self.metric or "psnr").partition("=")[0]

    @property
    def checked(self) -> int:
        """How many items are kept back for the check, the last ones."""
        return max(2, self.items // 3)

    @property
    def records(self) -> Path:
        """The file with every measurement."""
        return self.out.with_suffix(".jsonl")

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
            metrics=() if self.metric_name in ("psnr", "ssim") else (self.metric or "",),
            out=self.records,
        )


def parse_seconds(text: str) -> float:
    """Read a duration.

    >>> parse_seconds("10min"), parse_seconds("90s"), parse_seconds("1.5h")
    (600.0, 90.0, 5400.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"within: expected a duration such as 90s, 10min or 1h, got {short_repr(text)}")
    return float(found[1]) * _UNITS[found[2]]
