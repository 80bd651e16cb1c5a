"""What to merge in a vision transformer and how much: plain frozen values, readable without torch."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from tokenmerge.config.checks import as_items, check_fields, integer, refuse, switch
from tokenmerge.errors import ConfigError

__all__ = ["DecreasingSchedule", "ViTConfig"]


@dataclasses.dataclass(frozen=True)
class DecreasingSchedule:
    """Remove 2r tokens in the first layer and ever fewer, down to none in the last (arXiv 2210.09461).

    As many tokens go as with r in every layer, but earlier: faster than the constant schedule, at a lower
    quality.

    Args:
        r: the mean number of tokens removed in a layer, ≥ 0.

    Raises:
        ConfigError: r is not such a number.

    >>> DecreasingSchedule(8).per_layer(5)
    (16, 12, 8, 4, 0)
    """

    r: int

    def __post_init__(self) -> None:
        check_fields(self, "", {"r": integer(0)})

    def per_layer(self, depth: int) -> tuple[int, ...]:
        """Tokens to remove in each of ``depth`` layers; they sum to r · depth."""
        # Layers as far from the first as from the last have 2r together, so rounding loses none of them.
        first_half = [-(-2 * self.r * (depth - 1 - i) // (depth - 1)) for i in range(depth // 2)]
        middle = [self.r] * (depth % 2)
        return (*first_half, *middle, *(2 * self.r - r for r in reversed(first_half)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Token merging for vision transformers (arXiv 2210.09461), which end with fewer tokens.

    The main knob:

    Args:
        r: number of tokens removed in each layer, between attention and MLP: an integer ≥ 0, the same for
            all layers; a sequence with one for each; or a :class:`DecreasingSchedule`. Raising it makes the
            model faster and its output less like the dense one's; 0 leaves the model exactly as it is. A
            layer removes at most half of its tokens, whatever r asks for; the report says where that is so.

    Knobs to tinker with:

    Args:
        proportional_attention: let a merged token attract as much attention as the tokens that it stands
            for, by adding log(size) to its logits. It costs little time; a model that was not trained with
            merging needs it. It needs ``eager`` or ``sdpa`` attention, which add to the logits.
        unmerge: give each input token the result of the merged token that holds it, behind the last layer,
            for tasks that need the full grid, such as segmentation. It costs next to nothing. Heads that
            average over the patches get their tokens unmerged in any case, so that each patch counts once.

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
        """Tokens to remove in each of ``depth`` layers.

        Raises:
            ConfigError: ``r`` is a sequence of another length.
        """
        if isinstance(self.r, DecreasingSchedule):
            return self.r.per_layer(depth)
        if isinstance(self.r, tuple):
            if len(self.r) != depth:
                raise ConfigError(
                    f"r: expected {depth} numbers, one for each layer of the model, got {len(self.r)}: "
                    f"{list(self.r)}; an integer is the same for all layers"
                )
            return self.r
        assert isinstance(self.r, int)
        return (self.r,) * depth

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for records."""
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
