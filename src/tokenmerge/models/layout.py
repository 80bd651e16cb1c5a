"""How a module takes its tokens: on which grid, where in its arguments, and what else changes with them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tokenmerge.models.call import HostCall

__all__ = ["PLAIN", "Follower", "Grid", "Layout"]


@dataclasses.dataclass(eq=False)
class Grid:
    """The token grid of the running call, left by the module whose input shows it.

    Attributes:
        sides: ``[frames, rows, columns, 0]``, an empty tensor with the sides as its shape. torch.compile
            makes a graph for each value of an integer of a module, and one for all shapes of a tensor.
        given: whether the user gave it, instead of a call.
    """

    sides: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0, 0, 0))
    given: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(frames, rows, columns)."""
        frames, rows, columns, _ = self.sides.shape
        return frames, rows, columns

    @shape.setter
    def shape(self, shape: tuple[int, int, int]) -> None:
        self.sides = torch.empty(*shape, 0)


@dataclasses.dataclass(frozen=True)
class Follower:
    """An argument that has an entry for each token: a position table, a mask.

    A merged token keeps the entry of the token whose place it takes.

    Attributes:
        name: of the argument; None and missing arguments are left alone.
        axes: of the tokens; one of length 1, which the host broadcasts, is left alone.
        batched: whether the first axis is that of the batch (of length 1: the same for all). Where it is
            not, all images of a batch have to share a plan.
        element: where the argument is a tuple, which of its parts; None: all of them.
        ndim: it follows only where it has so many axes; None: any number.
        expand: whether the host leaves out a first axis of the batch that its layer takes. The axes of the
            tokens count with it.
    """

    name: str
    axes: tuple[int, ...]
    batched: bool = False
    element: int | None = None
    ndim: int | None = None
    expand: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """The call of a block or of one of its layers, one of whose arguments are tokens ``[b, n, c]``.

    Attributes:
        tokens: of a block, the name of that argument; None: the first, as for every layer.
        text: where text tokens stand that are in one sequence with the image's, if there are any: in the
            tokens themselves or in a follower. They never merge.
        padding: of a block in which images have texts of different length, each followed by its image and
            then by padding: name of a mask ``[b, text + n]`` that is true up to the padding.
        followers: arguments with an entry for each token.
        again: name of an argument that may be the same tensor as the tokens.
        outputs: where the result is a tuple, which of its tensors are image tokens.
        whole: names of arguments laid out for the whole grid: while one is given, the call stays dense.
    """

    tokens: str | None = None
    text: Literal["first", "last"] = "first"
    padding: str | None = None
    followers: tuple[Follower, ...] = ()
    again: str | None = None
    outputs: tuple[int, ...] = (0,)
    whole: tuple[str, ...] = ()

    @property
    def batched(self) -> bool:
        """Whether each image of a batch can have a plan of its own."""
        return all(follower.batched for follower in self.followers)

    def name_of(self, call: HostCall) -> str:
        """The name of the argument that are tokens."""
        return self.tokens or call.names[0]

    def tokens_of(self, call: HostCall) -> Tensor:
        """The tokens of a call."""
        return call.argument(self.name_of(call))

    def image(self, x: Tensor, n: int, start: Tensor | None = None) -> Tensor:
        """The n image tokens of a sequence; ``start`` ``[b]``: where they begin, if images differ in it."""
        if start is not None:
            places = start.unsqueeze(1) + torch.arange(n, device=x.device)
            return x.take_along_dim(places.unsqueeze(-1), dim=1)
        return x[:, x.shape[1] - n :] if self.text == "first" else x[:, :n]


PLAIN = Layout()  # image tokens alone, and no argument that follows them
