"""The settings of token merging in vision transformers, as frozen values."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from tokenmerge.config.checks import as_items, check_fields, integer, refuse, switch
from tokenmerge.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DecreasingSchedule:
    """Remove 2r tokens in the first layer, then fewer and fewer, and none in the last (arXiv 2210.09461).

    The total is that of r tokens in every layer. Because tokens are removed earlier, the model is faster and
    its quality lower than with the constant schedule.

    Args:
        r: the mean number of tokens removed in a layer, ≥ 0.

    Raises:
        ConfigError: r is not an integer ≥ 0.

    >>> DecreasingSchedule(8).per_layer(5)
    (16, 12, 8, 4, 0)
    """

    r: int

    def __post_init__(self) -> None:
        check_fields(self, "", {"r": integer(0)})

    def per_layer(self, depth: int) -> tuple[int, ...]:
        """Return how many tokens to remove in each of ``depth`` layers; they sum to r · depth."""
        # Layers at equal distance from the two ends remove 2r together, so rounding does not change the sum.
        first_half = [-(-2 * self.r * (depth - 1 - i) // (depth - 1)) for i in range(depth // 2)]
        second_half = [2 * self.r - r for r in reversed(first_half)]
        middle = [self.r] if depth % 2 == 1 else []
        return (*first_half, *middle, *second_half)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Token merging for vision transformers (arXiv 2210.09461). The number of tokens falls layer by layer.

    The main knob:

    Args:
        r: number of tokens removed in each layer, between attention and MLP: an integer ≥ 0 for all layers, a
            sequence with one for each layer, or a :class:`DecreasingSchedule`. Raising it makes the model
            faster and its output less like that of the dense model; 0 leaves the model exactly as it is. A
            layer removes at most half of its tokens; the report says where r asks for more.

    Knobs to tinker with:

    Args:
        proportional_attention: give a merged token as much attention as the tokens that it stands for, by
            adding log(size) to its logits. It costs little time. Models that were not trained with merging
            need it. It works with ``eager`` and ``sdpa`` attention, which can add to the logits.
        unmerge: after the last layer, give each input token the result of its merged token, for tasks that
            need the full grid, such as segmentation. It costs almost no time. Heads that average over the
            patches always get unmerged tokens, so that each patch counts once.

    Raises:
        ConfigError: a value is outside these ranges.

    >>> ViTConfig(r=8).per_layer(3), ViTConfig(r=[9, 5, 0]).per_layer(3)
    ((8, 8, 8), (9, 5, 0))
    """

    r: int | Sequence[int] | DecreasingSchedule = 8
    proportional_attention: bool = True
    unmerge: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", {"r": _check_r, "proportional_attention": switch, "unmerge": switch})

    def per_layer(self, depth: int) -> tuple[int, ...]:
        """Return how many tokens to remove in each of ``depth`` layers.

        Raises:
            ConfigError: ``r`` is a sequence of another length.
        """
        if isinstance(self.r, DecreasingSchedule):
            return self.r.per_layer(depth)
        r = (self.r,) * depth if isinstance(self.r, int) else tuple(self.r)
        if len(r) != depth:
            raise ConfigError(
                f"r: expected {depth} numbers, one for each layer of the model, got {len(r)}: {list(r)}; an "
                "integer is the same for all layers"
            )
        return r

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for records."""
        return dataclasses.asdict(self)


def _check_r(name: str, value: Any) -> int | tuple[int, ...] | DecreasingSchedule:
    if isinstance(value, DecreasingSchedule):
        return value
    items = as_items(value)
    if items is not None:
        return tuple(integer(0)(f"{name}[{i}]", r) for i, r in enumerate(items))
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        refuse(name, "an integer ≥ 0, a sequence of them, or a DecreasingSchedule", value)
    return integer(0)(name, value)
