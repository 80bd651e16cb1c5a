"""What the UNets of diffusers share: stages with transformers, and changes of resolution between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, is_a
from tokenmerge.models.family import Example, basic_blocks, example_of

# Their first argument is [b, c, h, w]; for a video the batch holds its frames. Attention over time is in
# other classes (AnimateDiffTransformer3D, TransformerTemporalModel) or in other lists of blocks.
_TRANSFORMERS = ("Transformer2DModel", "TransformerSpatioTemporalModel", "DreamLiteTransformer2DModel")


def describe_stages(root: Any, example: Example, *, controlnet: bool = False) -> Host:
    """Find the blocks of a model with ``down_blocks``, ``mid_block`` and, if it has them, ``up_blocks``.

    The last axes of its sample are height and width. ``example`` is that of
    :func:`tokenmerge.models.family.transformer_host`.

    Raises:
        UnsupportedModelError: its attention is not in transformer blocks.
    """
    blocks = [
        block
        for prefix, stage, level in stages_of(root)
        for path, module in _transformers(stage, prefix)
        for block in basic_blocks(root, f"{path}.transformer_blocks", grid=module, level=level)
    ]
    if not blocks:
        _refuse_other_attention(root)
    # A model that returns the result of every level, such as a ControlNet, has no stages that can be skipped.
    can_skip = len(getattr(root, "up_blocks", ())) > 1 and root.mid_block is not None
    paths = tuple(path for path, _, _ in stages_of(root)) if can_skip else ()
    size = getattr(root.config, "sample_size", None)
    return Host(
        root=root,
        blocks=tuple(blocks),
        sample="sample",
        timestep="timestep",
        grids=_grids,
        latents=_latents,
        sample_size=(size, size) if isinstance(size, int) else size and tuple(size),
        controlnet=controlnet,
        example=example_of(root, example),
        deep_stages=paths[1:-1],
        shallow_stages=(paths[0], paths[-1]) if paths else (),
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


def _has(stage: Any, *names: str) -> bool:
    return any(getattr(stage, name, None) is not None for name in names)


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
    found = {
        type(stage).__name__: None
        for _, stage, _ in stages_of(root)
        if any(is_a(module, "Attention") for module in stage.modules())
    }
    if found:
        raise UnsupportedModelError(
            f"tokens cannot be merged in {type(root).__name__} yet: its attention is in {', '.join(found)}, "
            "and takes pictures [b, c, h, w] instead of tokens, as in DeepFloyd IF and Kandinsky 2; run it "
            "without token merging, or take a model that docs/supported-models.md lists"
        )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    # The batch holds the frames of a video, so each merges on its own.
    rows, columns = arguments["sample"].shape[-2:]
    return ((1, rows, columns),)


def _latents(root: Any, sample: Tensor) -> Tensor:
    # The first channels are denoised. Channels of a given picture may follow; guidance sets them to zero in a
    # part of the batch: InstructPix2Pix [b, c, h, w], Stable Video Diffusion [b, f, c, h, w].
    axis = 2 if is_a(root, "UNetSpatioTemporalConditionModel") else 1
    channels = getattr(root.config, "out_channels", None) or sample.shape[axis]
    return sample.narrow(axis, 0, min(channels, sample.shape[axis]))
