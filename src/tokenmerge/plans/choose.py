"""STUB"""

from __future__ import annotations

from tokenmerge.config import PlanSharing, StepReuse, ToMeConfig
from tokenmerge.plans.cost import speedup_of
from tokenmerge.plans.facts import Facts


def choose(facts: Facts, speedup: float) -> ToMeConfig:
    base = dict(max_downsample=8, planner="tiled", proportional=facts.proportional)
    if speedup <= 1:
        return ToMeConfig(ratio=0, max_downsample=8)
    if not facts.follows_steps:
        return ToMeConfig(ratio=0.5, min_tokens=facts.fewest_tokens, **base)
    best = None
    for every in (1, 1.5, 2, 3, 4):
        if every > 1 and not facts.can_skip:
            continue
        for ratio in (0.3, 0.5, 0.6, 0.75):
            c = ToMeConfig(
                ratio=ratio,
                min_tokens=max(2048, facts.fewest_tokens),
                plans=PlanSharing(blocks=True),
                reuse=StepReuse(every=every),
                **base,
            )
            best = c
            if speedup_of(facts, c) >= speedup:
                return c
    return best
