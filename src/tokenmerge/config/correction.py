"""Dense steps that say what merging loses on the others."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer
from tokenmerge.config.value import Value
from tokenmerge.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Correction(Value):
    """Dense steps that say what merging loses on the others.

    On a dense step, each layer or block that merges stores its residual: what it adds to each token. On the
    steps in between, merged tokens share one residual; each token then gets back by how much its own residual
    differed from that of its group on the dense step.

    It needs memory for one residual of each layer or block that merges. It does not go together with
    ``scope="keys"``, where each token has a residual of its own anyway, nor with ``scope="stack"``, where no
    block has all tokens.

    Args:
        every: of the steps that run all blocks, every so many-th is dense, ≥ 2; 0: none. Raising it saves
            more time, as fewer steps are dense, and gives back less of what merging loses. At 3, most of the
            loss goes for a third of the saving.

    Raises:
        ConfigError: ``every`` is outside its range.
    """

    every: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "correction.", {"every": integer(0)})
        if self.every == 1:
            raise ConfigError(
                "correction.every: with 1 every step would be dense; take 2 or more, or 0 for none"
            )
