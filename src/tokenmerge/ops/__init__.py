"""Pure functions on tokens ``[b, n, c]``: partition, matching, plan, merge, unmerge.

They know neither models nor settings, and import nothing else of the package.
"""

from tokenmerge.ops.matching import (
    bipartite_soft_matching,
    by_similarity,
    features_if_shared,
    most_similar,
    own_cell,
    shared_features,
    unit_tokens,
)
from tokenmerge.ops.partition import (
    num_destinations,
    num_tokens,
    partition_at,
    strided_partition,
    uniform_noise,
    whole_cells,
)
from tokenmerge.ops.plan import IndexPlan, Plan, join_plans, keep_destinations, make_plan
from tokenmerge.ops.sized_attention import attend_by_columns, attend_by_values, head_size_with_columns
from tokenmerge.ops.soft import SoftPlan, Tiles, make_soft_plan, tile
from tokenmerge.ops.tiles import tiled_matching, tiled_plan

__all__ = [
    "IndexPlan",
    "Plan",
    "SoftPlan",
    "Tiles",
    "attend_by_columns",
    "attend_by_values",
    "bipartite_soft_matching",
    "by_similarity",
    "features_if_shared",
    "head_size_with_columns",
    "join_plans",
    "keep_destinations",
    "make_plan",
    "make_soft_plan",
    "most_similar",
    "num_destinations",
    "num_tokens",
    "own_cell",
    "partition_at",
    "shared_features",
    "strided_partition",
    "tile",
    "tiled_matching",
    "tiled_plan",
    "uniform_noise",
    "unit_tokens",
    "whole_cells",
]
