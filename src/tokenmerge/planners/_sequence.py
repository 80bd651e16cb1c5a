"""What of a sequence of pictures merges: asked for by every block in every call, and computed once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tokenmerge.config import MergeSettings
from tokenmerge.planners._parts import pictures_of_part
from tokenmerge.planners._pictures import Pictures, num_removed_in_all, num_tokens_in_all, pictures_of


class TokenSequence(NamedTuple):
    """The pictures in the tokens that a block gets.

    Attributes:
        pictures: grid and settings of each.
        tokens: number of tokens in all of them.
        removed: how many of these the settings remove.
    """

    pictures: Pictures
    tokens: int
    removed: int


def sequence_of(
    grids: tuple[tuple[int, int, int], ...], settings: MergeSettings, part: tuple[int, int] | None = None
) -> TokenSequence:
    """The sequence of pictures with these grids, or one of several equally long parts of it.

    Args:
        grids: (frames, rows, columns) of each picture, that being made first.
        settings: what holds for the picture being made.
        part: (index, number of parts); None: the whole sequence.

    >>> sequence_of(((1, 4, 4),), MergeSettings(ratio=0.5))[1:]
    (16, 8)
    """
    # torch.compile warns of what is remembered, and its graphs may have grids without numbers.
    found = _sequence_of if torch.compiler.is_compiling() else _remembered
    return found(grids, settings, part)


def _sequence_of(
    grids: tuple[tuple[int, int, int], ...], settings: MergeSettings, part: tuple[int, int] | None
) -> TokenSequence:
    pictures = pictures_of(grids, settings)
    if part is not None:
        pictures = pictures_of_part(pictures, *part)
    return TokenSequence(pictures, num_tokens_in_all(pictures), num_removed_in_all(pictures))


_remembered = functools.lru_cache(maxsize=1024)(_sequence_of)
