"""The facts about a generation with a model that a family of ``tokenmerge.models`` describes."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host
from tokenmerge.models.work import Work, work_of
from tokenmerge.plans.facts import Facts, ModelClass


def facts_of(
    host: Host, grid: tuple[int, int, int], steps: int, work: Work | None = None, **more: Any
) -> Facts:
    """Return the facts about a generation with a model.

    Args:
        host: the denoiser.
        grid: frames, rows and columns of its finest token grid.
        steps: number of denoising steps.
        work: as :func:`tokenmerge.models.work.work_of` returns it; None: it is computed now.
        more: other fields of :class:`Facts`.
    """
    whole = all(block.block_layout is not None for block in host.blocks)
    attends = any(layer.kind == "attn1" for block in host.blocks for layer in block.layers)
    facts = {"can_skip": host.can_skip, "whole_blocks": whole, "layers": attends, **more}
    return Facts(_class_of(host, whole), work_of(host) if work is None else work, grid, steps, **facts)


def _class_of(host: Host, whole: bool) -> ModelClass:
    if host.deep_stages:
        return "unet"
    return "transformer" if whole and all(block.level == 1 for block in host.blocks) else "other"
