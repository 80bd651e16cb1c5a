"""Correction: dense steps that measure what merging loses on the other steps."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer
from tokenmerge.config.value import Value
from tokenmerge.errors import ConfigError


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
