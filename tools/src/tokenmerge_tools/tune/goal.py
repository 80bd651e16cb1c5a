"""What ``tokenmerge tune`` is asked to reach, and its other options."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from tokenmerge.errors import ConfigError, shown
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.metrics import PICTURE_METRICS
from tokenmerge_tools.evaluate.prompts import PROMPTS_HELP
from tokenmerge_tools.pipelines.options import PipelineOptions, option
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER

# Metrics that can be a goal. With a wanted speed-up, it can be any that has a value for each picture.
GOAL_METRICS = ("psnr", "ssim", "lpips")
_UNITS = {"s": 1, "min": 60, "h": 3600}


@dataclasses.dataclass(frozen=True)
class Goal:
    """A wanted speed-up or a wanted closeness: the smallest t_dense / t > 1, or the worst mean of the metric.

    For a speed-up, the closest settings that reach it are wanted. For a closeness, the fastest ones are.
    """

    metric: str
    speedup: float | None = None
    value: float | None = None

    @property
    def lower_is_closer(self) -> bool:
        """Whether smaller values of the metric are closer."""
        return self.metric in LOWER_IS_CLOSER

    def closeness(self, value: float) -> float:
        """Return a value of the metric, negated if lower is closer, so that larger is closer."""
        return -value if self.lower_is_closer else value

    @property
    def least(self) -> float:
        """The number that the speed-up, or the result of :meth:`closeness`, has to reach."""
        if self.speedup is not None:
            return self.speedup
        assert self.value is not None
        return self.closeness(self.value)

    def __str__(self) -> str:
        """Return the goal in words.

        >>> str(Goal("psnr", speedup=1.5)), str(Goal("lpips", value=0.1))
        ('a speed-up of at least 1.5', 'LPIPS of at most 0.1')
        """
        if self.speedup is not None:
            return f"a speed-up of at least {self.speedup:g}"
        bound = "at most" if self.lower_is_closer else "at least"
        return f"{self.metric.upper()} of {bound} {self.value:g}"


def parse_goal(min_speedup: float | None, bounds: Mapping[str, float | None], metric: str | None) -> Goal:
    """Make the goal from the options of the command line. ``bounds`` has the worst value of each metric."""
    given = {name: value for name, value in bounds.items() if value is not None}
    flags = [*(["min-speedup"] if min_speedup is not None else []), *map(flag_of, given)]
    if len(flags) != 1:
        found = f"{len(flags)} of them ({', '.join(flags)})" if flags else "none"
        raise ConfigError(
            f"goal: expected one of --min-speedup, {', '.join(f'--{flag_of(m)}' for m in GOAL_METRICS)}, got "
            f"{found}; give the one that matters most, such as --min-speedup 1.5"
        )
    if min_speedup is not None:
        if metric is not None and metric not in PICTURE_METRICS:
            raise ConfigError(
                f"metric: expected one of {', '.join(PICTURE_METRICS)}, which have a value for each picture, "
                f"got {metric!r}"
            )
        if not (math.isfinite(min_speedup) and min_speedup > 1):
            raise ConfigError(
                f"min-speedup: expected a number above 1, such as 1.5, got {min_speedup:g}; 1 is the speed "
                "of dense"
            )
        return Goal(metric or "psnr", speedup=min_speedup)
    ((name, value),) = given.items()
    if metric is not None and metric != name:
        raise ConfigError(f"metric: --{flag_of(name)} measures {name}, got {metric!r}; leave --metric out")
    most = 1.0 if name == "ssim" else math.inf
    if not (math.isfinite(value) and 0 < value <= most):
        upto = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{flag_of(name)}: expected a number above 0{upto}, got {value:g}")
    return Goal(name, value=value)


def flag_of(metric: str) -> str:
    """Return the option for a metric.

    >>> flag_of("lpips"), flag_of("psnr")
    ('max-lpips', 'min-psnr')
    """
    return f"{'max' if metric in LOWER_IS_CLOSER else 'min'}-{metric}"


def parse_seconds(text: str) -> float:
    """Read a duration.

    >>> parse_seconds("10min"), parse_seconds("90s"), parse_seconds("1.5h")
    (600.0, 90.0, 5400.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"within: expected a duration such as 90s, 10min or 1h, got {shown(text)}")
    return float(found[1]) * _UNITS[found[2]]


_search = partial(option, "Search")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions(PipelineOptions):
    """What to find settings for, and how long to search.

    ``within`` are seconds, including those of earlier runs.
    """

    goal: Goal
    within: float = 600.0
    prompts: Annotated[Path | None, _search(PROMPTS_HELP)] = None
    metric: Annotated[
        str | None,
        option(
            "Goal",
            f"Closeness metric used with --min-speedup: {', '.join(PICTURE_METRICS)}. NAME=NETWORK uses the "
            "network in a folder or with a hub id. Default: psnr.",
        ),
    ] = None
    items: Annotated[int, _search("Largest number of pictures to compare settings on.", parser="integer")] = (
        16
    )
    out: Annotated[
        Path,
        option(
            None,
            "File for the settings. Records, pictures and the price curve go beside it.",
            "--out",
            "-o",
        ),
    ] = Path("outputs/tuned.json")

    def __post_init__(self) -> None:
        if self.out.suffix != ".json":
            raise ConfigError(f"out: expected a file ending in .json, got {self.out}")
        if not self.within > 0:
            raise ConfigError(f"within: expected a duration above 0 seconds, got {self.within:g}")
        if self.items < 2:
            raise ConfigError(f"items: expected an integer ≥ 2, got {self.items}")
        if self.steps < 2:
            raise ConfigError(
                f"steps: expected at least 2, got {self.steps}; with one step, nothing is left to reuse"
            )
        self.evaluation()

    @property
    def records(self) -> Path:
        """The file with every measurement."""
        return self.out.with_suffix(".jsonl")

    def evaluation(self, prompts: int | None = None) -> EvaluateOptions:
        """Return the options of ``tokenmerge evaluate`` for drawing the same pictures.

        If there are fewer ``prompts`` than ``items``, each is drawn with several seeds.
        """
        shared = [field.name for field in dataclasses.fields(PipelineOptions)]
        return EvaluateOptions(
            **{name: getattr(self, name) for name in (*shared, "prompts")},
            limit=self.items,
            seeds=1 if prompts is None else -(-self.items // prompts),
            variants=(),
            batch=1,
            metrics=() if (wanted := self.metric or self.goal.metric) in ("psnr", "ssim") else (wanted,),
            out=self.records,
        )
