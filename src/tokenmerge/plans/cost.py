"""Counts what settings save in a generation: arithmetic on the shares of work, without running the model."""

from __future__ import annotations

import functools
from collections.abc import Collection

from tokenmerge.config import ToMeConfig
from tokenmerge.models.work import Part, Planning, Share
from tokenmerge.plans.facts import Facts

# Sides of a box of cells whose tokens are compared, and how far the window around it reaches further.
_BOX, _MARGIN = 16, 8


def speedup_of(facts: Facts, config: ToMeConfig) -> float:
    """Return dense operations over those with these settings, for the whole generation.

    Args:
        facts: about the generation.
        config: settings at its guidance scale, with the planner ``"tiled"`` and shared plans. Rules and places
            of single steps are not counted.
    """
    runs, steps = config.reuse.steps_of(facts.steps), facts.steps
    complete = len(runs.full) if config.reuse.on and facts.can_skip else steps
    finest = max(complete, len(runs.shallow)) if config.reuse.skips_finest else steps
    dense = -(-complete // config.correction.every) if config.correction.on else 0
    return speedup(facts, config, complete, finest, dense)


def speedup(facts: Facts, merging: ToMeConfig, complete: int, finest: int, dense: int) -> float:
    """Return dense operations over those of a generation with these numbers of steps.

    Args:
        facts: about the generation.
        merging: settings of token merging.
        complete: number of complete steps.
        finest: number of steps that run the finest level of a UNet, the complete ones included.
        dense: number of complete steps that are dense.
    """
    parts = facts.work.parts
    whole = cost(facts, None, parts)
    merged = cost(facts, merging, parts)
    shallow = cost(facts, merging, parts - {"deep", "blocks"})
    least = cost(facts, merging, frozenset({"always"}))
    spent = (
        dense * whole
        + (complete - dense) * merged
        + (finest - complete) * shallow
        + (facts.steps - finest) * least
    )
    return facts.steps * whole / spent


@functools.lru_cache(maxsize=1024)
def cost(facts: Facts, merging: ToMeConfig | None, parts: Collection[Part]) -> float:
    """Return the multiplications of one call that runs these parts, for one sample; None: it is dense."""
    total = sum(_of_share(facts, merging, share) for share in facts.work.shares if share.part in parts)
    if merging is not None:
        plans = (plan for plan in facts.work.plans if plan.parts & set(parts))
        total += sum(_of_plan(facts, merging, plan) for plan in plans)
    return total


def _merges(facts: Facts, merging: ToMeConfig, level: int) -> bool:
    return merging.ratio > 0 and level <= merging.max_downsample and facts.tokens(level) >= merging.min_tokens


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
    return float((merging.sx * merging.sy - 1) * pairs * plan.channels)


def _compared(cells: int) -> int:
    """Return the pairs of cells that are compared along an axis: those of each box with the window around it.

    >>> _compared(16), _compared(32)
    (256, 768)
    """
    boxes = range(0, cells, _BOX)
    ends = [min(cells, start + _BOX) for start in boxes]
    windows = [min(cells, start + _BOX + _MARGIN) - max(0, start - _MARGIN) for start in boxes]
    return sum((end - start) * window for start, end, window in zip(boxes, ends, windows, strict=True))
