"""How long a plan is used, and which blocks and prompts share it."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer, switch
from tokenmerge.config.value import Value


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanSharing(Value):
    """How long a plan is used, and which blocks and prompts share it.

    A plan says which tokens merge with which. Making one takes time, so using it more than once saves time.
    But a plan that was made for other tokens fits a little worse.

    Args:
        every: a plan is used for this many denoising steps, ≥ 1. Raising it makes planning cheaper and the
            picture a little less close. 1: each step has its own plans.
        blocks: blocks with the same token grid use the plan of the first of them. A UNet's way down and way
            up have a plan each, and so do a transformer's joint and single blocks. The cost of planning is
            divided by the number of blocks that share a plan; the picture gets a little less close.
        guidance: the samples that classifier-free guidance compares, one with the prompt and one without, use
            one plan. Guidance amplifies the difference between the two; with two plans, it would amplify the
            difference between the plans as well. It costs no time and pays most under strong guidance. If the
            samples are in one batch, the plan is made from their mean similarity. If they are in two calls,
            the second call uses the plan of the first, except with gradients and in a model compiled as a
            whole, where each call makes its own plan. Switched off, each plan fits its own sample better.

    Raises:
        ConfigError: a value is outside these ranges.
    """

    every: int = 1
    blocks: bool = False
    guidance: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "plans.", {"every": integer(1), "blocks": switch, "guidance": switch})
