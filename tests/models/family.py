"""What the tests of a family need: a tiny random model of its class, and a call of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TEXT = 16  # width of text embeddings
WORDS = 7  # number of text tokens


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build and to call a family's model.

    Attributes:
        build: returns the model, with seeded random weights, in evaluation mode.
        inputs: (batch, height, width of the token grid) → arguments by name; image i is the same in a batch
            of any size.
        frames: number of frames of its token grid.
        merge: settings besides the ratio that it needs to merge, such as ``max_downsample``.
        attention: names of the sub-layers whose calls must get fewer tokens.
        square: whether the model itself only takes square images.
        side: the only side of its grid that it takes, or None.
        multiple: the sides of its grid must be multiples of this.
        mixes: whether the model itself lets the images of a batch see each other.
        checkpoints: whether its own gradient checkpointing works, if it claims to have one.
    """

    build: Callable[[], Any]
    inputs: Callable[[int, int, int], dict[str, Any]]
    frames: int = 1
    merge: dict[str, Any] = dataclasses.field(default_factory=dict)
    attention: tuple[str, ...] = ("attn1",)
    square: bool = False
    side: int | None = None
    multiple: int = 1
    mixes: bool = False
    checkpoints: bool = True

    def fitting(self, grid: tuple[int, int]) -> tuple[int, int]:
        """This grid, with its sides rounded up to a size that the model takes."""
        if self.side is not None:
            return self.side, self.side
        rows, columns = (-(-side // self.multiple) * self.multiple for side in grid)
        return rows, rows if self.square else columns


def seeded(model: nn.Module) -> nn.Module:
    """Fill all weights with noise, so that every part of the model matters: some are zero at first."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * scale + (parameter.ndim < 2) * 0.5
            )
    return model.eval()


def noise(batch: int, *shape: int) -> Tensor:
    """Noise ``[batch, *shape]``; the first images are the same for every batch."""
    return torch.stack(
        [torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i in range(batch)]
    )


def text_masks(batch: int, words: int = WORDS) -> Tensor:
    """Texts of different length: the first image has all words, each further one two fewer."""
    return torch.stack([torch.arange(words) < words - 2 * i for i in range(batch)])
