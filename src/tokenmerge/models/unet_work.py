"""Where a UNet works: at which resolution, and how much of it in self-attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_TOKENS = 64 * 64  # of the finest level: Stable Diffusion 1.5 at 512 × 512


@dataclasses.dataclass(frozen=True)
class UNetWork:
    """How the work of a call is distributed, whatever the size of the picture.

    Attributes:
        weights: number of weights at each resolution level. Each works once per position of its level.
        widths: level and channels of each self-attention.
    """

    weights: Mapping[int, int]
    widths: tuple[tuple[int, int], ...]

    @property
    def finest_share(self) -> float:
        """Fraction of the weights' work that is done at the finest level.

        >>> UNetWork({1: 100, 2: 1200}, ()).finest_share
        0.25
        """
        return self.weights.get(1, 0) / self._of_weights

    @property
    def attention_share(self) -> float:
        """Fraction of the work that compares and sums tokens, with 64 × 64 tokens at the finest level.

        >>> UNetWork({1: 4096}, ((1, 1), (2, 8))).attention_share
        0.75
        """
        # n tokens of c channels take 2 n² c multiplications. This is per position of the finest level.
        attention = sum(2 * channels * _TOKENS / level**4 for level, channels in self.widths)
        return attention / (attention + self._of_weights)

    @property
    def _of_weights(self) -> float:
        return sum(number / level**2 for level, number in self.weights.items())
