"""What the UNets of diffusers share: stages with transformers, and changes of resolution between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Block, GridShape, Host, is_a
from tokenmerge.models.basic_block import basic_block
from tokenmerge.models.layout import Grid
from tokenmerge.models.placement import example_of

# Their first argument is [b, c, h, w]; for a video the batch holds its frames. Attention over time is in
# other classes (AnimateDiffTransformer3D, TransformerTemporalModel) or in other lists of blocks.
_TRANSFORMERS = ("Transformer2DModel", "TransformerSpatioTemporalModel", "DreamLiteTransformer2DModel")


def describe_stages(
    root: Any, example: Callable[[Any, int, int, int], dict[str, Any]], *, controlnet: bool = False
) -> Host:
    """Find the blocks of a model with ``down_blocks``, ``mid_block`` and, if it has them, ``up_blocks``.

    The last axes of its sample are height and width. ``example`` is that of
    :func:`tokenmerge.models.transformer.transformer_host`.

    Raises:
        UnsupportedModelError: its attention is not in transformer blocks.
    """
    blocks = [block for path, stage, level in stages_of(root) for block in _blocks(stage, path, level)]
    if not blocks:
        _refuse_other_attention(root)

    return Host(
        root=root,
        blocks=tuple(blocks),
        sample="sample",
        timestep="timestep",
        grid=_grid,
        latents=_latents,
        sample_size=_sample_size(root),
        controlnet=controlnet,
        example=example_of(root, example),
        deep_stages=_deep_stages(root),
        shallow_stages=_shallow_stages(root),
    )


def stages_of(root: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield path, module and resolution level of each stage, in the order in which they run."""
    level = 1
    for i, stage in enumerate(root.down_blocks):
        yield f"down_blocks.{i}", stage, level
        if _has(stage, "downsamplers", "base_downsamplers"):
            level *= 2
    if root.mid_block is not None:
        yield "mid_block", root.mid_block, level
    for i, stage in enumerate(getattr(root, "up_blocks", ())):
        yield f"up_blocks.{i}", stage, level
        if _has(stage, "upsamplers"):
            level //= 2


def _deep_stages(root: Any) -> tuple[str, ...]:
    """Return the paths of the stages between the first one on the way down and the last one on the way up."""
    down, up = len(root.down_blocks), len(getattr(root, "up_blocks", ()))
    if up < 2 or root.mid_block is None:  # such as a ControlNet, which returns the result of every level
        return ()
    ways = [f"down_blocks.{i}" for i in range(1, down)], [f"up_blocks.{i}" for i in range(up - 1)]
    return (*ways[0], "mid_block", *ways[1])


def _shallow_stages(root: Any) -> tuple[str, ...]:
    """Return the paths of the stages at the finest level: the first one down and the last one up."""
    return ("down_blocks.0", f"up_blocks.{len(root.up_blocks) - 1}") if _deep_stages(root) else ()


def _sample_size(root: Any) -> tuple[int, int] | None:
    size = getattr(root.config, "sample_size", None)
    return (size, size) if isinstance(size, int) else size and tuple(size)


def _has(stage: Any, *names: str) -> bool:
    return any(getattr(stage, name, None) is not None for name in names)


def _blocks(stage: Any, prefix: str, level: int) -> Iterator[Block]:
    for path, module in _transformers(stage, prefix):
        for i, block in enumerate(module.transformer_blocks):
            name = f"{path}.transformer_blocks.{i}"
            yield basic_block(name, block, grid=module, level=level)


def _transformers(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and module of each transformer in a module; none lies within another."""
    for name, child in module._modules.items():
        if child is None or not child._modules:
            continue
        if is_a(child, *_TRANSFORMERS):
            yield f"{path}.{name}", child
        else:
            yield from _transformers(child, f"{path}.{name}")


def _refuse_other_attention(root: Any) -> None:
    stages = [*root.down_blocks, root.mid_block, *getattr(root, "up_blocks", ())]
    found = {
        type(s).__name__: None
        for s in stages
        if s is not None and any(is_a(m, "Attention") for m in s.modules())
    }
    if found:
        raise UnsupportedModelError(
            f"tokens cannot be merged in {type(root).__name__} yet: its attention is in {', '.join(found)}, "
            "and takes pictures [b, c, h, w] instead of tokens, as in DeepFloyd IF and Kandinsky 2; run it "
            "without token merging, or take a model that docs/supported-models.md lists"
        )


def _grid(root: Any, arguments: Mapping[str, Any], last: Grid) -> GridShape:
    # The batch holds the frames of a video, so each merges on its own.
    rows, columns = arguments["sample"].shape[-2:]
    return 1, rows, columns


def _latents(root: Any, sample: Tensor) -> Tensor:
    # The first channels are denoised. Channels of a given picture may follow; guidance sets them to zero in a
    # part of the batch: InstructPix2Pix [b, c, h, w], Stable Video Diffusion [b, f, c, h, w].
    axis = 2 if is_a(root, "UNetSpatioTemporalConditionModel") else 1
    channels = getattr(root.config, "out_channels", None) or sample.shape[axis]
    return sample.narrow(axis, 0, min(channels, sample.shape[axis]))
