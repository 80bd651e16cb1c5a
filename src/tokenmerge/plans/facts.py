"""The facts about one generation, from which its plan is made, and the operations that settings save in it.

The savings are arithmetic on the shares of work. No model runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set
from typing import Any, Literal, NamedTuple

from tokenmerge.config import ToMeConfig
from tokenmerge.config.parts import StepsOfReuse
from tokenmerge.models.base import Host
from tokenmerge.models.work import Part, PlanningWork, Share, Work, work_of
from tokenmerge.ops.tiles import SIDES, boxes_along, window_of
from tokenmerge.plans import policy

ModelClass = Literal["unet", "transformer", "output", "other"]
_DENSE = ToMeConfig(ratio=0.0)


class Schedule(NamedTuple):
    """The properties of a scheduler on which a generation plan depends."""

    ends_clean: bool = False  # almost no noise is left before the last step, which then changes little
    adds_noise: bool = False  # its steps add new noise, as those of ancestral schedulers do
    # Its steps add the model's output, times the change of the noise level, as in flow matching with Euler's
    # method.
    is_euler: bool = False


class FewestTokens(NamedTuple):
    """The fewest tokens of a grid on which merging saves enough time, with a scope and from a ratio on."""

    scope: str
    ratio: float
    tokens: int


def pays_from(tokens: int) -> tuple[FewestTokens, ...]:
    """Return the fewest tokens of all scopes if merging saves enough time from so many on at any ratio."""
    return tuple(FewestTokens(scope, 0.0, tokens) for scope in ("block", "layers"))


def fewest_at(found: Iterable[FewestTokens], scope: str, ratio: float) -> int:
    """Return the fewest tokens for a scope and a ratio: those of the highest timed ratio that is not above.

    Below all timed ratios they are those of the lowest one, and 0 for a scope that was not timed.
    """
    of_scope = sorted((one.ratio, one.tokens) for one in found if one.scope == scope)
    below = [tokens for timed, tokens in of_scope if timed <= ratio]
    if below:
        return below[-1]
    if of_scope:
        _, tokens = of_scope[0]
        return tokens
    return 0


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts about one generation. They hold from its first step to its last."""

    # A UNet whose deep stages can be skipped, a transformer whose blocks can run on merged tokens as a whole,
    # a model of which nothing but the output is known, or another model, which gets the most careful row of
    # the policy.
    model: ModelClass
    work: Work
    grid: tuple[int, int, int]  # frames, rows and columns of the finest token grid at this size
    steps: int
    guidance: float | None = None  # scale of classifier-free guidance, or None if unknown (counts as strong)
    schedule: Schedule = Schedule()
    follows_steps: bool = True  # the denoising step is known, so that settings can change over the steps
    can_skip: bool = True  # step reuse can skip parts of the model here
    whole_blocks: bool = False  # all blocks can merge as a whole here
    layers: bool = True  # attention can merge alone here
    proportional: bool = True  # attention can count a merged token as often as the tokens it stands for
    # The number of tokens from which on merging saves enough time on the device, for each scope that is tried
    # and for some ratios. A scope that is not here saves enough on every grid.
    fewest_tokens: tuple[FewestTokens, ...] = ()

    def min_tokens(self, scope: str, ratio: float) -> int:
        """Return the fewest tokens of a grid that the default method merges with a scope and a ratio."""
        return max(fewest_at(self.fewest_tokens, scope, ratio), policy.fewest_tokens(self.model))

    @property
    def makes_good(self) -> bool:
        """Whether the next full step makes good what forecasts missed; see ``runtime.steps.making_good``."""
        return self.schedule.is_euler and self.guidance == 1

    def tokens(self, level: int) -> int:
        """Return the number of tokens of the grid at a resolution level."""
        frames, rows, columns = self.grid
        return frames * -(-rows // level) * -(-columns // level)


def facts_of(host: Host, grid: tuple[int, int, int], steps: int, **more: Any) -> RunFacts:
    """Return the facts about a generation with a denoiser. ``more`` are other fields of :class:`RunFacts`."""
    whole = bool(host.blocks) and all(block.block_layout is not None for block in host.blocks)
    attends = any(layer.kind == "attn1" for block in host.blocks for layer in block.layers)
    facts = {"can_skip": host.can_skip, "whole_blocks": whole, "layers": attends, **more}
    return RunFacts(_model_class(host, whole), work_of(host), grid, steps, **facts)


def _model_class(host: Host, whole_blocks: bool) -> ModelClass:
    if host.deep_stages:
        return "unet"
    if host.span == ("",):
        return "output"
    if whole_blocks and all(block.level == 1 for block in host.blocks):
        return "transformer"
    return "other"


class Costs(NamedTuple):
    """Multiplications of one call for one sample, by the kind of step, in a generation of so many steps.

    A ``full`` call merges and skips nothing, and has a number for each step. A ``shallow`` one skips the deep
    stages of a UNet, or the blocks of another model, and a ``skipped`` one the finest level of a UNet too.
    """

    dense: float
    full: tuple[float, ...]
    shallow: float
    skipped: float

    def speedup(self, runs: StepsOfReuse, every: int) -> float:
        """Return the speed-up with these full steps, and these that run the finest level.

        Of the full steps, one in ``every`` is a correction, which is dense, or none if ``every`` is 0.
        """
        steps = len(self.full)
        full = len(runs.full)
        finest = len(runs.finest)
        corrections = runs.full[::every] if every else ()
        if len(set(self.full)) == 1:
            merged = (full - len(corrections)) * self.full[0]
        else:
            merged = sum(self.full[step] for step in runs.full) - sum(self.full[step] for step in corrections)
        spent = (
            len(corrections) * self.dense
            + merged
            + (finest - full) * self.shallow
            + (steps - finest) * self.skipped
        )
        return steps * self.dense / spent


def costs_of(facts: RunFacts, config: ToMeConfig) -> Costs:
    """Return the multiplications of calls with these settings. Tokens merge in all steps, or in none."""
    parts = facts.work.parts
    outer = parts - {"deep", "blocks"}
    at_steps = [config.at_step(step, facts.steps) for step in range(facts.steps)]
    of_settings = {settings: _of_call(facts, settings, parts) for settings in set(at_steps)}
    return Costs(
        dense=_of_call(facts, _DENSE, parts),
        full=tuple(of_settings[settings] for settings in at_steps),
        shallow=_of_call(facts, config, outer),
        skipped=_of_call(facts, config, outer - {"finest"}),
    )


def speedup_of(facts: RunFacts, config: ToMeConfig) -> float:
    """Return dense operations over those with these settings, for the whole generation.

    The settings are those at its guidance scale, with the planner ``"tiled"``. Of their rules, those count
    that hold at all levels.
    """
    runs = config.reuse.steps_of(facts.steps)
    return costs_of(facts, config).speedup(runs, config.correction.every)


def share_that_merges(facts: RunFacts, config: ToMeConfig) -> float:
    """Return the share of the dense operations in parts that merge, 0 to 1."""
    every = 0.0
    merging = 0.0
    for share in facts.work.shares:
        operations = share.amount.at(facts.tokens(share.level))
        every += operations
        if _merges(facts, config, share):
            merging += operations
    return merging / every


def _of_call(facts: RunFacts, merging: ToMeConfig, parts: Set[Part]) -> float:
    """Return the multiplications of a call that runs these parts."""
    shares = (_of_share(facts, merging, share) for share in facts.work.shares if share.part in parts)
    plans = (_of_plan(facts, merging, plan) for plan in facts.work.plans if plan.parts & parts)
    return sum(shares) + sum(plans)


def _merges(facts: RunFacts, merging: ToMeConfig, work: Share | PlanningWork) -> bool:
    if not merging.ratio or merging.scope not in work.scopes:
        return False
    finest = min(facts.work.levels, default=1)  # it merges whatever ``max_downsample`` is
    deepest = max(merging.max_downsample, finest)
    return work.level <= deepest and facts.tokens(work.level) >= merging.min_tokens


def _of_share(facts: RunFacts, merging: ToMeConfig, share: Share) -> float:
    tokens = facts.tokens(share.level)
    removed = merging.removed_of(tokens) if _merges(facts, merging, share) else 0
    return share.amount.at(tokens - removed)


def _of_plan(facts: RunFacts, merging: ToMeConfig, plan: PlanningWork) -> float:
    """Return the multiplications of comparing sources with the destinations around them."""
    if not _merges(facts, merging, plan):
        return 0.0
    frames, rows, columns = facts.grid
    cells_down = -(-rows // plan.level) // merging.sy
    cells_across = -(-columns // plan.level) // merging.sx
    side_down, side_across = SIDES[2]
    pairs = frames * _compared(cells_down, side_down) * _compared(cells_across, side_across)
    plans = 1 if merging.merge_sharing.blocks else plan.blocks
    return float(plans * (merging.sx * merging.sy - 1) * pairs * plan.channels)


def _compared(cells: int, side: int) -> int:
    """Return the number of pairs of cells that are compared along an axis.

    The cells of each box, of at most ``side`` cells, are compared with those of the window around it. On an
    accelerator, smaller boxes and windows are filled up to the size of the largest ones.

    >>> [_compared(cells, 16) for cells in (12, 16, 24, 64)]
    [144, 256, 480, 2048]
    """
    boxes = boxes_along(cells, side)
    windows = [window_of(box, cells, side) for box in boxes]
    longest_box = max(end - start for start, end in boxes)
    longest_window = max(end - start for start, end in windows)
    return len(boxes) * longest_box * longest_window
