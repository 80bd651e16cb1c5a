"""Counts what settings save in a generation: arithmetic on the shares of work, without running the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from tokenmerge.config import ToMeConfig
from tokenmerge.models.work import Part, Planning, Share
from tokenmerge.plans.facts import Facts
from tokenmerge.plans.policy import fewest_tokens

# Sides of a box of cells whose tokens are compared, and how far the window around it reaches further.
_BOX, _MARGIN = 16, 8


@dataclasses.dataclass(frozen=True)
class Costs:
    """Multiplications of one call for one sample, by what the step runs.

    Attributes:
        steps: number of steps of the generation.
        dense: of a dense call.
        complete: of a call that merges and skips nothing.
        finest: of a call that skips the deep stages of a UNet, or the blocks of another model.
        least: of a call that skips the finest level of a UNet too.
    """

    steps: int
    dense: float
    complete: float
    finest: float
    least: float

    def speedup(self, complete: int, finest: int, corrections: int) -> float:
        """Return dense multiplications over those of a generation with these numbers of steps.

        ``finest`` counts the complete steps too, of which ``corrections`` merge nothing.
        """
        spent = (
            corrections * self.dense
            + (complete - corrections) * self.complete
            + (finest - complete) * self.finest
            + (self.steps - finest) * self.least
        )
        return self.steps * self.dense / spent


def costs_of(facts: Facts, merging: ToMeConfig) -> Costs:
    """Return the multiplications of calls with these settings of token merging."""
    parts = facts.work.parts
    outer = parts - {"deep", "blocks"}
    return Costs(
        facts.steps,
        dense=_of_call(facts, None, parts),
        complete=_of_call(facts, merging, parts),
        finest=_of_call(facts, merging, outer),
        least=_of_call(facts, merging, outer - {"finest"}),
    )


def speedup_of(facts: Facts, config: ToMeConfig) -> float:
    """Return dense operations over those with these settings, for the whole generation.

    Args:
        facts: about the generation.
        config: settings at its guidance scale, with the planner ``"tiled"``. Rules are not counted.
    """
    runs, steps = config.reuse.steps_of(facts.steps), facts.steps
    complete = len(runs.full) if config.reuse.on else steps
    finest = len(runs.shallow) if config.reuse.skips_finest else steps
    corrections = -(-complete // config.correction.every) if config.correction.on else 0
    return costs_of(facts, config).speedup(complete, finest, corrections)


def correction_bytes(facts: Facts, scope: str) -> int:
    """Return the bytes that corrections cache between steps: one residual for each block that merges."""
    fewest = max(facts.fewest_tokens, fewest_tokens())
    values = sum(
        plan.blocks * plan.channels * facts.tokens(plan.level)
        for plan in facts.work.plans
        if scope in plan.scopes and facts.tokens(plan.level) >= fewest
    )
    return values * facts.number_bytes


def _of_call(facts: Facts, merging: ToMeConfig | None, parts: Set[Part]) -> float:
    """Return the multiplications of a call that runs these parts; None: it is dense."""
    total = sum(_of_share(facts, merging, share) for share in facts.work.shares if share.part in parts)
    if merging is not None:
        plans = (plan for plan in facts.work.plans if plan.parts & parts)
        total += sum(_of_plan(facts, merging, plan) for plan in plans)
    return total


def _merges(facts: Facts, merging: ToMeConfig, level: int) -> bool:
    deepest = max([merging.max_downsample, *facts.work.levels[:1]])
    return merging.ratio > 0 and level <= deepest and facts.tokens(level) >= merging.min_tokens


def _of_share(facts: Facts, merging: ToMeConfig | None, share: Share) -> float:
    tokens = facts.tokens(share.level)
    if merging is None or merging.scope not in share.scopes or not _merges(facts, merging, share.level):
        return share.amount.at(tokens)
    return share.amount.at(tokens - int(tokens * merging.ratio))


def _of_plan(facts: Facts, merging: ToMeConfig, plan: Planning) -> float:
    """Return the multiplications of comparing sources with the destinations around them."""
    if merging.scope not in plan.scopes or not _merges(facts, merging, plan.level):
        return 0.0
    frames, rows, columns = facts.grid
    cells = [-(-rows // plan.level) // merging.sy, -(-columns // plan.level) // merging.sx]
    pairs = frames * _compared(cells[0]) * _compared(cells[1])
    plans = 1 if merging.plans.blocks else plan.blocks
    return float(plans * (merging.sx * merging.sy - 1) * pairs * plan.channels)


def _compared(cells: int) -> int:
    """Return the pairs of cells that are compared along an axis: those of each box with the window around it.

    On an accelerator, the boxes and windows at the ends are filled up to the size of the largest ones.

    >>> _compared(12), _compared(16), _compared(24), _compared(64)
    (144, 256, 768, 2048)
    """
    boxes = range(0, cells, _BOX)
    windows = [min(cells, start + _BOX + _MARGIN) - max(0, start - _MARGIN) for start in boxes]
    return len(boxes) * min(cells, _BOX) * max(windows)
