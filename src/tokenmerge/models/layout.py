"""Where the tokens are in a module's call, and which other arguments have an entry for each token."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tokenmerge.models.call import HostCall


@dataclasses.dataclass(eq=False)
class Grid:
    """The token grids of the running call, noted by the module whose input shows them.

    A sequence has one grid, or one for each of several pictures in a row: that of the picture being made,
    then those of its reference pictures.
    """

    # For each grid an empty tensor of shape [frames, rows, columns, 0]: torch.compile makes a graph for each
    # value of an integer of a module, but can make one graph for all shapes of a tensor.
    sides: tuple[Tensor, ...] = dataclasses.field(default_factory=lambda: (torch.empty(0, 0, 0, 0),))
    given: bool = False  # the user gave the grid with ``Patch.at_size``

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(frames, rows, columns) of each grid."""
        # A list, since blocks ask often, and a generator takes a Python call for each item.
        shapes = [(sides.shape[0], sides.shape[1], sides.shape[2]) for sides in self.sides]
        return tuple(shapes)

    @shapes.setter
    def shapes(self, shapes: tuple[tuple[int, int, int], ...]) -> None:
        self.sides = tuple([torch.empty(*shape, 0) for shape in shapes])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of the first grid."""
        return self.shapes[0]

    @shape.setter
    def shape(self, shape: tuple[int, int, int]) -> None:
        self.shapes = (shape,)


@dataclasses.dataclass(frozen=True)
class TokenArgument:
    """An argument with an entry for each token, such as a position table or a mask.

    A merged token gets the entry of the token whose place it takes.
    """

    name: str  # a missing argument, or None, is left alone
    axes: tuple[
        int, ...
    ]  # those of the tokens; an axis of length 1, which the host broadcasts, is left alone
    # The first axis is the batch (length 1: the same entries for all images). If it is not, all images of a
    # batch must share one plan.
    batched: bool = False
    # Index of the element of a tuple, or key of the value of a dictionary, that has the entries; None: all.
    element: int | str | None = None
    ndim: int | None = None  # the argument has such entries only if it has this number of axes; None: any
    # The number of axes that the host broadcasts it to. Missing axes are added in front, and ``axes`` count
    # with them. None: no axes are missing.
    broadcasts_to: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the call of a block or a layer that takes tokens ``[b, n, c]``."""

    tokens: str | None = None  # the argument with the tokens; None: the first one, as in every layer
    # Where text tokens stand if they share a sequence with the image, in the tokens or in a token argument.
    # Text never merges.
    text: Literal["first", "last"] = "first"
    # Name of a mask [b, text + n] that is true before the padding, for blocks whose sequences are text, image
    # and padding, with texts of different lengths. None: there is no padding.
    padding: str | None = None
    token_arguments: tuple[TokenArgument, ...] = ()
    same_as_tokens: str | None = None  # name of an argument that may be the same tensor as the tokens
    outputs: tuple[int, ...] = (0,)  # indices of the image tokens in a result that is a tuple
    dense_if: tuple[str, ...] = ()  # arguments that only fit the whole grid: a call with one stays dense

    @property
    def batched(self) -> bool:
        """Whether each image of a batch can have its own plan."""
        return all(argument.batched for argument in self.token_arguments)

    def tokens_of(self, call: HostCall) -> Tensor:
        """Return the tokens of a call."""
        return call.argument(self.tokens or call.names[0])

    def image(self, x: Tensor, n: int, start: Tensor | None = None) -> Tensor:
        """Return the n image tokens of a sequence; ``start`` ``[b]``: first index, if it differs by image."""
        if start is not None:
            places = start.unsqueeze(1) + torch.arange(n, device=x.device)
            return x.take_along_dim(places.unsqueeze(-1), dim=1)
        return x[:, x.shape[1] - n :] if self.text == "first" else x[:, :n]


PLAIN = Layout()  # image tokens only, and no argument with an entry for each
# Rotary positions with an entry for each image token, which the whole batch shares or each sample has.
POSITIONS = TokenArgument("image_rotary_emb", axes=(0,))
OWN_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True)
KEY_MASK = TokenArgument("attention_mask", axes=(-1,), batched=True)
ROTARY = Layout(token_arguments=(POSITIONS,))
