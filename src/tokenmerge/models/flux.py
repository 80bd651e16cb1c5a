"""FLUX.1: blocks with two streams, then blocks with one; rotary positions shared by the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.layout import Follower, Grid, Layout
from tokenmerge.models.base import Block, GridShape, Host, Layer, is_a

__all__ = ["CLASSES", "describe", "grid_of_ids", "matches"]

CLASSES = ("FluxTransformer2DModel",)

# The tables hold text and image, in both kinds of block. An IP-Adapter adds a third result, for the image.
_ATTENTION = Layout(text="first", followers=(Follower("image_rotary_emb", axes=(0,)),), outputs=(0, 2))
_DOUBLE = (Layer("attn1", "attn", _ATTENTION), Layer("ff", "ff"))
_SINGLE = (Layer("attn1", "attn", _ATTENTION),)
_FUSED = "blocks of a single stream project attention and MLP together; merge_mlp leaves their MLP dense"


def matches(module: nn.Module) -> bool:
    """Whether this file knows the model."""
    return is_a(module, *CLASSES)


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    double = [Block(f"transformer_blocks.{i}", b, _DOUBLE) for i, b in enumerate(root.transformer_blocks)]
    single = [
        Block(
            f"single_transformer_blocks.{i}",
            block,
            _SINGLE,
            dense={"ff": _FUSED},
        )
        for i, block in enumerate(root.single_transformer_blocks)
    ]
    return Host(
        root=root,
        blocks=(*double, *single),
        sample="hidden_states",
        timestep="timestep",
        grid=_grid,
        sample_size=(128, 128),
        controlnet=False,
        example=lambda height, width, batch: _example(root, height, width, batch),
        patch=2,
    )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    return grid_of_ids(arguments["img_ids"], arguments["hidden_states"].shape[1], last)


_known: Any = WeakTensorKeyDictionary()


def grid_of_ids(ids: Tensor, tokens: int, last: Grid) -> GridShape:
    """The token grid that position ids span.

    Args:
        ids: ``[n, 3]`` or ``[b, n, 3]``: for each token a picture number, its row and its column.
        tokens: n.
        last: taken where the ids have no values yet: on the meta device and in a graph being compiled.

    Raises:
        UnsupportedModelError: the tokens are not one picture in row order, or the values are missing and
            ``last`` does not fit.
    """
    ids = ids[0] if ids.ndim == 3 else ids
    if ids.is_meta or torch.compiler.is_compiling():
        if last.rows * last.columns != tokens:
            raise UnsupportedModelError(
                f"the token grid cannot be read from img_ids while the whole model is compiled, and {tokens} "
                f"tokens are not the {last.rows} × {last.columns} of its last call; call it once before it "
                "is compiled, or compile its blocks only: transformer.compile_repeated_blocks()"
            )
        return last.shape
    if ids not in _known:  # reading values makes a GPU wait, and a pipeline passes the same tensor each step
        _known[ids] = _read(ids)
    rows, columns = _known[ids]
    if rows * columns != tokens:
        raise UnsupportedModelError(
            f"img_ids describe {rows} × {columns} = {rows * columns} tokens of one picture and there are "
            f"{tokens}; reference pictures beside the one that is generated cannot be merged yet: "
            "remove_token_merging(pipe) restores the model"
        )
    return 1, rows, columns


def _read(ids: Tensor) -> tuple[int, int]:
    values = ids.long().cpu()
    own = values[(values[:, 0] == values[0, 0])]
    rows, columns = (int(side) for side in own[:, 1:3].amax(0) - own[:, 1:3].amin(0) + 1)
    return rows, columns


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, like = root.config, {"device": root.device, "dtype": root.dtype}
    rows, columns = height // 2, width // 2
    ids = torch.zeros(rows, columns, 3, **like)
    ids[..., 1] += torch.arange(rows, **like)[:, None]
    ids[..., 2] += torch.arange(columns, **like)
    return {
        "hidden_states": torch.zeros(batch, rows * columns, config.in_channels, **like),
        "timestep": torch.full((batch,), 0.5, **like),
        "encoder_hidden_states": torch.zeros(batch, 512, config.joint_attention_dim, **like),
        "pooled_projections": torch.zeros(batch, config.pooled_projection_dim, **like),
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(512, 3, **like),
        "guidance": torch.full((batch,), 3.5, **like) if config.guidance_embeds else None,
    }
