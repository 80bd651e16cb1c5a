"""The parts of a ToMeConfig: sharing of plans, correction, and step reuse, which has a file of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tokenmerge.config.checks import Value, check_fields, integer, switch
from tokenmerge.config.step_reuse import StepReuse
from tokenmerge.errors import ConfigError


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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Correction(Value):
    """Dense steps that measure what merging loses, so that the other steps can add it back.

    On a dense step, each layer or block that merges stores its residual: what it adds to each token. On the
    steps in between, the tokens of a group share one residual. Each token then gets back the difference, on
    the dense step, between its own residual and that of its group.

    It needs memory for one residual of each layer or block that merges. It cannot be used with
    ``scope="keys"``, where each token has its own residual anyway.

    Args:
        every: distance between dense steps, counted in steps that run all blocks, ≥ 2; 0: no step is dense.
            Raising it saves more time, as fewer steps are dense, and gives back less of what merging loses.
            3 gives back most of the loss and costs a third of the saving.

    Raises:
        ConfigError: the value is outside its range.
    """

    every: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "correction.", {"every": integer(0)})
        if self.every == 1:
            raise ConfigError(
                "correction.every: with 1 every step would be dense; take 2 or more, or 0 for none"
            )

    @property
    def on(self) -> bool:
        """Whether any step is dense."""
        return self.every > 0


# The classes that a ToMeConfig nests, by the name of their field.
PARTS: Mapping[str, type] = {
    "plans": PlanSharing,
    "correction": Correction,
    "reuse": StepReuse,
}
