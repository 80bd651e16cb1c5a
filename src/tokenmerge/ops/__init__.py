"""Pure tensor functions on tokens ``[b, n, c]``; they know no model and no setting."""

from tokenmerge.ops.matching import bipartite_soft_matching
from tokenmerge.ops.partition import num_destinations, strided_partition
from tokenmerge.ops.plan import Plan, make_plan, merge, unmerge

__all__ = [
    "Plan",
    "bipartite_soft_matching",
    "make_plan",
    "merge",
    "num_destinations",
    "strided_partition",
    "unmerge",
]
