"""UNets of the CompVis and Stability AI repositories: ``model.model.diffusion_model``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tokenmerge.models.base import Arguments, Grid, Grids, Host, is_a
from tokenmerge.models.family import Blank, blocks_within, example_of

CLASSES = ("UNetModel", "ControlNet")
PARTS = ("input_blocks", "middle_block")  # other libraries have classes of the same names without these


def describe(root: Any) -> Host:
    """Find the blocks."""
    size = getattr(root, "image_size", None)
    return Host(
        root=root,
        blocks=tuple(blocks_within(root, stages_of(root), "SpatialTransformer", context="context")),
        sample="x",
        timestep="timesteps",
        grids=_grids,
        sample_size=(size, size) if isinstance(size, int) else None,
        controlnet=is_a(root, "ControlNet"),
        example=example_of(root, _example, "timesteps"),
    )


def stages_of(root: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield path, module and resolution level of each stage, in the order in which they run."""
    level = 1
    for i, stage in enumerate(root.input_blocks):
        if any(is_a(part, "Downsample") for part in stage.modules()):
            level *= 2
        yield f"input_blocks.{i}", stage, level
    yield "middle_block", root.middle_block, level
    for i, stage in enumerate(getattr(root, "output_blocks", ())):
        yield f"output_blocks.{i}", stage, level
        if any(is_a(part, "Upsample") for part in stage.modules()):
            level //= 2


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    rows, columns = arguments["x"].shape[-2:]
    return ((1, rows, columns),)


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"x": zeros(root.in_channels, height, width)}
    attention = next((module.attn2 for module in root.modules() if hasattr(module, "attn2")), None)
    if attention is not None:
        arguments["context"] = zeros(77, attention.to_k.in_features)
    embedding = getattr(root, "label_emb", None)
    if isinstance(embedding, nn.Module):
        first: Any = next(m for m in embedding.modules() if isinstance(m, nn.Linear | nn.Embedding))
        arguments["y"] = zeros.integers() if isinstance(first, nn.Embedding) else zeros(first.in_features)
    if is_a(root, "ControlNet"):
        arguments["hint"] = zeros(3, height * 8, width * 8)
    return arguments
