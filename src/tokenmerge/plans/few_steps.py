"""Where fewer steps of the unchanged model can be as close as the default method, at equal operations.

They can be so where they were in at least a quarter of the images of a bundled model. These were drawn with
the guidance of its pipeline (benchmarks/by_steps_cpu.jsonl).
"""

from __future__ import annotations

import math

from tokenmerge.plans.facts import RunFacts

# The largest number of steps where they were so on 1024 tokens. Where tokens of the transformer merged, they
# never were in 6 to 30 steps, which is all that was drawn.
MOST = 15
# On so many tokens of the UNet, they were so in up to 30 steps where nothing merged, which is all that was
# drawn. Where tokens merged, they never were.
MANY_TOKENS = 4096
MOST_ON_MANY_TOKENS = 30


def can_be_as_close(facts: RunFacts, merges: bool) -> bool:
    """Return whether fewer steps can be as close as the default method in a generation.

    ``merges`` says whether its tokens merge.
    """
    has_many = facts.model == "unet" and math.prod(facts.grid) >= MANY_TOKENS
    if merges and (has_many or facts.model == "transformer"):
        return False
    return facts.steps <= (MOST_ON_MANY_TOKENS if has_many else MOST)
