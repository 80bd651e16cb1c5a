"""The generation plan: facts about a generation, a wanted speed-up, and the policy decide what its steps do.

:func:`plan_for` is a pure function. Nothing here knows a library of models or runs one.
"""

from tokenmerge.plans.choose import ROUNDING, plan_for
from tokenmerge.plans.estimate import Estimate, looks
from tokenmerge.plans.facts import (
    FewestTokens,
    RunFacts,
    Schedule,
    facts_of,
    fewest_at,
    pays_from,
    share_that_merges,
    speedup_of,
)

__all__ = [
    "ROUNDING",
    "Estimate",
    "FewestTokens",
    "RunFacts",
    "Schedule",
    "facts_of",
    "fewest_at",
    "looks",
    "pays_from",
    "plan_for",
    "share_that_merges",
    "speedup_of",
]
