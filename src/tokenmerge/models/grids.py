"""Token grids of diffusion transformers, from the shape of the sample or from position ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, GridShape
from tokenmerge.ops.once import once
from tokenmerge.ops.partition import num_tokens


def patch_of(config: Any) -> tuple[int, int, int]:
    """Return the frames, rows and columns of latent positions that make one token of a transformer."""
    # (frames, rows, columns), (rows, columns), or the side of a square.
    patch = config.patch_size
    if isinstance(patch, int):
        return getattr(config, "patch_size_t", None) or 1, patch, patch
    frames, rows, columns = (1, *patch)[-3:]
    return frames, rows, columns


def in_tokens(sides: Sequence[int], config: Any) -> GridShape:
    """Return the token grid of latents with this number of frames, rows and columns."""
    frames, rows, columns = (side // length for side, length in zip(sides, patch_of(config), strict=True))
    return frames, rows, columns


def picture_grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    """Return the token grid of an image, from the last two axes of ``hidden_states``: height and width."""
    height, width = arguments["hidden_states"].shape[-2:]
    _, rows, columns = patch_of(root.config)
    return ((1, height // rows, width // columns),)


def video_grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    """Return the token grid of a video ``hidden_states`` ``[b, c, f, h, w]``."""
    return (in_tokens(arguments["hidden_states"].shape[2:], root.config),)


def grids_of_ids(root: Any, arguments: Arguments, last: Grid, name: str = "img_ids", text: int = 0) -> Grids:
    """Return the token grids of the images that an argument ``name`` describes.

    Its ids are ``[text + n, d]`` or ``[b, text + n, d]``: for each of the n tokens of ``hidden_states`` the
    number of its image, its row, its column, and further columns that depend on the model. Those of ``text``
    tokens precede them. The image being made is first, and reference images follow it. While torch.compile
    traces the model, the ids have no values, and ``last`` is used, if it has as many tokens. A grid that the
    user gave is also used where the ids are not those of images in a row. Otherwise an UnsupportedModelError
    is raised.
    """
    ids = arguments[name]
    tokens = arguments["hidden_states"].shape[1]
    if torch.compiler.is_compiling():
        return known_grids(last, name, tokens)

    def read() -> Grids:
        return grids_of_rows((ids[0] if ids.ndim == 3 else ids)[text:])

    # Reading waits for the device, and pipelines pass the same tensor at each step. On the meta device there
    # are no values to read.
    grids = () if ids.is_meta else once(ids, ("grids", text), read)
    if sum(map(num_tokens, grids)) == tokens:
        return grids
    if last.given and sum(map(num_tokens, last.shapes)) == tokens:
        return last.shapes
    raise UnsupportedModelError(
        f"{name}: expected one image of {tokens} tokens, as in hidden_states, or several images one "
        f"after another, got ids of shape {tuple(ids.shape)} "
        f"{'without values, on the meta device' if ids.is_meta else 'that do not describe such images'}; "
        "call remove_token_merging(pipe) first, or patch.at_size(height, width) if it is one image"
    )


def known_grids(last: Grid, name: str, tokens: int) -> Grids:
    """Return the grids of the last call for ``tokens`` tokens, where the values of ``name`` are unknown.

    An UnsupportedModelError is raised if they have another number of tokens.
    """
    if sum(map(num_tokens, last.shapes)) == tokens:
        return last.shapes
    known = "given to patch.at_size(height, width)" if last.given else "of its last call"
    shown = " + ".join(f"{rows} × {columns}" for _, rows, columns in last.shapes)
    raise UnsupportedModelError(
        f"the token grid cannot be read from {name} while the whole model is compiled, and {tokens} "
        f"tokens are not the {shown} {known}; call patch.at_size(height, "
        "width) with the size of the latents first, call the model once before it is compiled, or "
        "compile its blocks only: transformer.compile_repeated_blocks()"
    )


def grids_of_coordinates(coordinates: Tensor) -> Grids:
    """Return the token grid of a video from the times, rows and columns of its tokens, ``[b, 3, n]``.

    Frames that were given for later times may stand before those of the video, which start with time 0. Other
    tokens than those of frames of one size, row by row, raise an UnsupportedModelError.
    """
    grid = (
        ()
        if coordinates.is_meta
        else once(coordinates, "grids", lambda: _read_coordinates(coordinates[0].cpu()))
    )
    if not grid:
        got = "others" if not coordinates.is_meta else "coordinates without values, on the meta device"
        raise UnsupportedModelError(
            "video_coords: expected the times, rows and columns of the tokens of frames of one size, got "
            f"{got}, of shape {tuple(coordinates.shape)}; call remove_token_merging(pipe) first"
        )
    return grid


def _read_coordinates(values: Tensor) -> Grids:
    """Return the grid of the video at the end of coordinates ``[3, n]``, or none if there is no video."""
    rows, columns = (len(side.unique()) for side in values[1:])
    if values.shape[1] % (rows * columns):
        return ()
    found = values.unflatten(1, (-1, rows, columns))
    times, y, x = found
    regular = torch.broadcast_tensors(times[:, :1, :1], y[:1, :, :1], x[:1, :1])
    first = int(times[:, 0, 0].clamp(min=0).argmin())
    return ((len(times) - first, rows, columns),) if torch.equal(found, torch.stack(regular)) else ()


def grids_of_rows(ids: Tensor) -> Grids:
    """Return the grids of the images whose positions follow one another, or none if the ids are others.

    An image ends where the number of the image changes, or where its first row and column come again.
    """
    values = ids[:, :3].double().cpu()
    if not torch.equal(values, values.round()):
        return ()
    grids: list[GridShape] = []
    while len(values):
        other = (values[:, 0] != values[0, 0]) | (values[:, 1:] == values[0, 1:]).all(dim=1)
        other[0] = False
        tokens = int(other.int().argmax()) or len(values)
        places = values[:tokens, 1:]
        values = values[tokens:]
        rows, columns = (int(side) for side in places.amax(0) - places.amin(0) + 1)
        if rows * columns != tokens:
            return ()
        grids.append((1, rows, columns))
    return tuple(grids)
