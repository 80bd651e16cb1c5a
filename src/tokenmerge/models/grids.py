"""Token grids of diffusion transformers, from the shape of the sample or from position ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import GridShape
from tokenmerge.models.layout import Grid


def patch_of(config: Any) -> tuple[int, int, int]:
    """Frames, rows and columns of latent positions that make one token of a transformer.

    Its config has them as ``patch_size`` (frames, rows, columns) or (rows, columns), or as the side
    ``patch_size`` of a square, with ``patch_size_t`` frames where that is set.
    """
    patch = config.patch_size
    if isinstance(patch, int):
        return getattr(config, "patch_size_t", None) or 1, patch, patch
    frames, rows, columns = (1, *patch)[-3:]
    return frames, rows, columns


def picture_grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    """The token grid of pictures: from the last two axes, height and width, of ``hidden_states``."""
    height, width = arguments["hidden_states"].shape[-2:]
    _, rows, columns = patch_of(root.config)
    return 1, height // rows, width // columns


def video_grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    """The token grid of videos ``hidden_states`` ``[b, c, f, h, w]``."""
    sides = zip(arguments["hidden_states"].shape[2:], patch_of(root.config), strict=True)
    frames, rows, columns = (side // length for side, length in sides)
    return frames, rows, columns


_known: Any = WeakTensorKeyDictionary()


def grid_of_ids(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    """The token grid that the argument ``img_ids`` describes.

    ``img_ids`` are ``[n, d]`` or ``[b, n, d]``: for each of the n tokens of ``hidden_states`` the number of
    its picture, its row, its column, and further columns that depend on the model. While torch.compile traces
    the model, the ids have no values, and ``last`` is used. A grid that the user gave is also used where the
    ids are not those of one picture.

    Raises:
        UnsupportedModelError: the tokens are not those of one picture, or the model is being compiled and
            ``last`` has another number of tokens.
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
    if ids not in _known:  # reading synchronises; pipelines pass the same tensor at each step
        _known[ids] = _read(ids)
    rows, columns = _known[ids]
    if rows * columns != tokens and last.given and fits:
        return last.shape
    if rows * columns != tokens:
        raise UnsupportedModelError(
            f"img_ids: expected one picture of {tokens} tokens, as in hidden_states, got {rows} × {columns} "
            f"= {rows * columns}; reference pictures next to the generated one cannot be merged yet: call "
            "remove_token_merging(pipe) first"
        )
    return 1, rows, columns


def _read(ids: Tensor) -> tuple[int, int]:
    values = ids.long().cpu()
    own = values[(values[:, 0] == values[0, 0])]
    rows, columns = (int(side) for side in own[:, 1:3].amax(0) - own[:, 1:3].amin(0) + 1)
    return rows, columns
