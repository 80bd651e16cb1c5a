"""The generation plan: facts about a generation, a wanted speed-up, and the policy decide what its steps do.

:func:`plan_for` is a pure function. Nothing here knows a library of models or runs one.
"""

from tokenmerge.plans.choose import ROUNDING, Plan, highest_speedup, plan_for
from tokenmerge.plans.estimate import Estimate, Shown, estimate_closeness, looks, noise_of
from tokenmerge.plans.facts import Facts, correction_bytes, facts_of, speedup_of
from tokenmerge.plans.tolerance import Tolerance

__all__ = [
    "ROUNDING",
    "Estimate",
    "Facts",
    "Plan",
    "Shown",
    "Tolerance",
    "correction_bytes",
    "estimate_closeness",
    "facts_of",
    "highest_speedup",
    "looks",
    "noise_of",
    "plan_for",
    "speedup_of",
]
