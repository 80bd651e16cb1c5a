"""Pure tensor functions on tokens ``[b, n, c]``; they know no model and no setting."""

from tokenmerge.ops.matching import bipartite_soft_matching, local_matching, own_cell, shared_features
from tokenmerge.ops.partition import num_destinations, num_tokens, strided_partition
from tokenmerge.ops.plan import Plan, keep_destinations, make_plan, merge, merge_with_norm, unmerge
from tokenmerge.ops.tokens import SizedPlan, Tokens, plan_by_size

__all__ = [
    "Plan",
    "SizedPlan",
    "Tokens",
    "bipartite_soft_matching",
    "keep_destinations",
    "local_matching",
    "make_plan",
    "merge",
    "merge_with_norm",
    "num_destinations",
    "num_tokens",
    "own_cell",
    "plan_by_size",
    "shared_features",
    "strided_partition",
    "unmerge",
]
