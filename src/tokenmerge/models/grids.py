"""Token grids of diffusion transformers: from the shape of the sample, or the positions of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import GridShape
from tokenmerge.models.layout import Grid

__all__ = ["grid_of_ids", "picture_grid", "video_grid"]


def picture_grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    """The grid of ``hidden_states`` ``[b, c, h, w]`` cut into square patches of ``config.patch_size``."""
    height, width = arguments["hidden_states"].shape[-2:]
    return 1, height // root.config.patch_size, width // root.config.patch_size


def video_grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    """The grid of ``hidden_states`` ``[b, c, f, h, w]``, with patches as the config says.

    It has them as ``patch_size`` (frames, height, width), or as the side ``patch_size`` of a square and,
    unless a patch is of one frame, its length ``patch_size_t``.
    """
    patch = root.config.patch_size
    if isinstance(patch, int):
        patch = (getattr(root.config, "patch_size_t", None) or 1, patch, patch)
    sides = zip(arguments["hidden_states"].shape[2:], patch, strict=True)
    frames, rows, columns = (side // length for side, length in sides)
    return frames, rows, columns


_known: Any = WeakTensorKeyDictionary()


def grid_of_ids(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    """The grid that ``img_ids`` span.

    These are ``[n, d]`` or ``[b, n, d]``: for each of the n tokens of ``hidden_states`` a picture number, its
    row, its column, and what else a model puts behind them. ``last`` is taken while a graph is compiled, in
    which the ids have no values yet; one that the user gave, where they are not those of one picture too.

    Raises:
        UnsupportedModelError: the tokens are not one picture in row order, or the values are missing, and
            ``last`` does not fit.
    """
    ids, tokens = arguments["img_ids"], arguments["hidden_states"].shape[1]
    ids = ids[0] if ids.ndim == 3 else ids
    _, known_rows, known_columns = last.shape
    fits = known_rows * known_columns == tokens
    if torch.compiler.is_compiling():
        if not fits:
            known = "given to patch.at_size(height, width)" if last.given else "of its last call"
            raise UnsupportedModelError(
                f"the token grid cannot be read from img_ids while the whole model is compiled, and {tokens} "
                f"tokens are not the {known_rows} × {known_columns} {known}; call patch.at_size(height, "
                "width) with the size of the latents first, call the model once before it is compiled, or "
                "compile its blocks only: transformer.compile_repeated_blocks()"
            )
        return last.shape
    if ids not in _known:  # reading values makes a GPU wait, and a pipeline passes the same tensor each step
        _known[ids] = _read(ids)
    rows, columns = _known[ids]
    if rows * columns != tokens and last.given and fits:
        return last.shape
    if rows * columns != tokens:
        raise UnsupportedModelError(
            f"img_ids describe {rows} × {columns} = {rows * columns} tokens of one picture and there are "
            f"{tokens}; reference pictures beside the one that is generated cannot be merged yet: call "
            "remove_token_merging(pipe) first"
        )
    return 1, rows, columns


def _read(ids: Tensor) -> tuple[int, int]:
    values = ids.long().cpu()
    own = values[(values[:, 0] == values[0, 0])]
    rows, columns = (int(side) for side in own[:, 1:3].amax(0) - own[:, 1:3].amin(0) + 1)
    return rows, columns
