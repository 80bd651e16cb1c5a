"""The options of ``tokenmerge tune``, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.options import EvaluateOptions
from tokenmerge_tools.tune.goal import Goal


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to find settings for, and how long to search.

    Args:
        goal: what is wanted.
        model: as for :class:`tokenmerge_tools.evaluate.options.EvaluateOptions`. The same holds for
            ``size``, ``steps``, ``guidance``, ``scheduler``, ``dtype`` and ``device``.
        prompts: a file with prompts. None: the built-in prompts of a bundled model.
        within: seconds that the measurements may take, > 0, including those of earlier runs. Raising it tries
            more settings, on more prompts.
        items: pictures that the last settings are compared on, ≥ 2. Raising it makes the result more certain.
        metric: the metric of closeness with its network, such as ``"dino=FOLDER"``. None: that of the goal.
        out: file for the settings, ending in ``.json``. Records, pictures and the chart of speed-up against
            closeness go beside it.

    Raises:
        ConfigError: a value is outside these ranges, or two values contradict each other.
    """

    goal: Goal
    model: str = EvaluateOptions.model
    prompts: Path | None = None
    size: tuple[int, int] | None = None
    steps: int = EvaluateOptions.steps
    guidance: float | None = None
    scheduler: str | None = None
    dtype: str = EvaluateOptions.dtype
    device: str = EvaluateOptions.device
    within: float = 600.0
    items: int = 16
    metric: str | None = None
    out: Path = Path("outputs/tuned.json")

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
        """The options of ``tokenmerge evaluate`` for drawing the same pictures.

        Args:
            prompts: number of available prompts. If it is less than ``items``, each is drawn with several
                seeds. None: one seed.
        """
        shared = ("model", "prompts", "size", "steps", "guidance", "scheduler", "dtype", "device")
        return EvaluateOptions(
            **{name: getattr(self, name) for name in shared},
            limit=self.items,
            seeds=1 if prompts is None else -(-self.items // prompts),
            variants=(),
            batch=1,
            metrics=() if (wanted := self.metric or self.goal.metric) in ("psnr", "ssim") else (wanted,),
            out=self.records,
        )
