"""ToMe for Stable Diffusion: D. Bolya and J. Hoffman, arXiv 2303.17604."""

from __future__ import annotations

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops.matching import bipartite_soft_matching
from tokenmerge.ops.partition import Sides
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners.sequences import partition


def plan_tome(features: Tensor, grid: Sides, r: int, settings: MergeSettings, step: Tensor) -> Plan:
    """Partition the tokens, match each source with its most similar destination, merge the r best pairs.

    Planning time grows with the square of the number of tokens.
    """
    src, dst = partition(grid, settings, step, features.device)
    order, nearest = bipartite_soft_matching(features, src, dst)
    return make_plan(src, dst, order, nearest, r)
