"""What a family's file says about a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Block", "Host", "is_a"]


def is_a(module: object, *names: str) -> bool:
    """Whether the object's class, or one that it inherits from, has one of these names.

    Names instead of classes: the libraries that define them need not be installed or imported.

    >>> is_a(nn.ReLU(), "Module")
    True
    """
    return any(cls.__name__ in names for cls in type(module).__mro__)


@dataclasses.dataclass(frozen=True)
class Block:
    """One transformer block.

    Attributes:
        path: its qualified name in the host.
        module: the block. Its first argument are the tokens ``[b, n, c]``.
        method: the method that gradient checkpointing runs again: ``"forward"`` or ``"_forward"``.
        grid: the module whose first argument ``[b, c, h, w]`` has the block's token grid, n = h·w.
        level: resolution level as a divisor of the sample's height and width: 1, 2, 4 …
    """

    path: str
    module: Any
    method: str
    grid: nn.Module
    level: int

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The sub-layers that can merge, by name."""
        layers = {name: getattr(self.module, name, None) for name in ("attn1", "attn2", "ff")}
        if self.chunks_feed_forward:
            del layers["ff"]
        return {name: layer for name, layer in layers.items() if layer is not None}

    @property
    def chunks_feed_forward(self) -> bool:
        """Whether the feed-forward layer runs on parts of the sequence, which no plan fits."""
        return bool(getattr(self.module, "_chunk_size", None))


@dataclasses.dataclass(frozen=True)
class Host:
    """A denoiser or a ControlNet.

    Attributes:
        root: the model.
        blocks: its transformer blocks in the order in which they run.
        sample: name of its argument for the sample ``[b, c, h, w]``.
        timestep: name of its argument for the timestep.
        sample_size: height and width of the sample that the model was made for, if it says so.
        controlnet: whether it is a ControlNet, which may stay dense beside a denoiser that merges.
        example: ``(height, width, batch)`` → keyword arguments of a call with a sample of that size.
    """

    root: nn.Module
    blocks: tuple[Block, ...]
    sample: str
    timestep: str
    sample_size: tuple[int, int] | None
    controlnet: bool
    example: Callable[[int, int, int], dict[str, Any]]
