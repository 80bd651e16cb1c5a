"""Merging above a similarity threshold, after CA-ToMe (arXiv 2501.00946)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import by_similarity, most_similar
from tokenmerge.ops.partition import Sides
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners.sequences import partition


def plan_threshold(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Plan as ``tome``, but drop merged tokens whose similarity is below ``settings.threshold``.

    The paper merges exactly the tokens whose similarity to their destination reaches the threshold, so shapes
    depend on the image. Here r tokens are removed from every image. Those at or above the threshold merge
    into their destination. Those below it are dropped: they change neither the mean nor the size of their
    destination, and they receive its result.
    """
    src, dst = partition(grid, settings, step, features.device)
    similarity, nearest = most_similar(features, src, dst)
    order = by_similarity(similarity)
    counts = (similarity >= settings.threshold).to(torch.float32)
    return make_plan(src, dst, order, nearest, r, counts)
