"""Correction: dense steps that measure what merging loses on the other steps."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer
from tokenmerge.config.places import at_places, check_places
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
        steps: places of the dense steps, 0 (the first step) to 1 (the last), in place of ``every``:
            ``(0, 0.4, 0.7)``. The first step that merges is dense in any case. More places save less and
            bring the picture closer. Empty: ``every`` decides.

    Raises:
        ConfigError: a value is outside its range, or both are given.
    """

    every: int = 0
    steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "correction.", {"every": integer(0), "steps": check_places})
        if self.every == 1:
            raise ConfigError(
                "correction.every: with 1 every step would be dense; take 2 or more, or 0 for none"
            )
        if self.every and self.steps:
            raise ConfigError(
                f"correction.every, correction.steps: both say which steps are dense, got {self.every} and "
                f"{self.steps}; leave one out"
            )

    @property
    def on(self) -> bool:
        """Whether any step is dense."""
        return self.every > 0 or bool(self.steps)

    @property
    def given(self) -> str:
        """The setting that turns it on, for messages: ``"correction.every=2"``."""
        return f"correction.steps={self.steps}" if self.steps else f"correction.every={self.every}"

    def is_at(self, index: int, steps: int) -> bool | None:
        """Whether step ``index`` of ``steps`` is a dense step by its place; None if no places are given."""
        return index in at_places(self.steps, steps) if self.steps else None
