"""What can merge in each of ComfyUI's models: attention in UNets, whole blocks in transformers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import is_a
from tokenmerge.models.families import compvis
from tokenmerge.models.layout import Layout, TokenArgument
from tokenmerge.models.unet_work import UNetWork


@dataclasses.dataclass(frozen=True)
class Family:
    """A transformer whose blocks ComfyUI lets a node replace.

    Attributes:
        classes: names of its classes.
        blocks: (attribute with the blocks, ComfyUI's name for one, layout of its call).
    """

    classes: tuple[str, ...]
    blocks: tuple[tuple[str, str, Layout], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A block that can merge.

    Attributes:
        key: ComfyUI's name and number for it.
        module: the block.
        level: resolution level; 1 in transformers.
        layout: layout of the block's call in a transformer; None in a UNet.
    """

    key: tuple[Any, ...]
    module: Any
    level: int
    layout: Layout | None = None

    @property
    def channels(self) -> int:
        """Channels of its tokens; 0 if its weights do not say."""
        attention = self.module if self.layout is not None else self.module.attn1
        return min((weight.shape[1] for weight in attention.parameters() if weight.ndim == 2), default=0)

    @property
    def heads(self) -> int:
        """Heads of its attention; 0 if unknown."""
        names = ("num_heads", "n_heads", "heads")
        found = (getattr(part, name, None) for part in self.module.modules() for name in names)
        return next((heads for heads in found if isinstance(heads, int)), 0)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a UNet is cut, so that only the part above runs.

    Attributes:
        inputs: number of ``input_blocks`` that run.
        output: index of the first of the ``output_blocks`` that run; it gets the result of what is skipped.
        transformers: number of transformers up to there.
        finest: whether the finest level is skipped too, except for its last layer.
    """

    inputs: int
    output: int
    transformers: int
    finest: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A model in which tokens can merge.

    Attributes:
        name: name of its class.
        blocks: blocks that can merge, in the order in which they run.
        patch: frames, rows and columns of latent positions that make one token at level 1.
        cuts: in a UNet, for steps that skip its deep stages, and for steps that also skip its finest level.
        work: how the work of a UNet's call is distributed; None for other models.
    """

    name: str
    blocks: tuple[Block, ...]
    patch: tuple[int, int, int] = (1, 1, 1)
    cuts: tuple[Cut, ...] = ()
    work: UNetWork | None = None

    @property
    def is_unet(self) -> bool:
        """Whether its attention merges; otherwise its whole blocks do."""
        return self.blocks[0].layout is None

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels at which it has attention, the finest first."""
        return tuple(sorted({block.level for block in self.blocks}))

    def grid(self, latent: Sequence[int]) -> tuple[int, int, int]:
        """(frames, rows, columns) of the tokens at level 1, for latents of shape ``[b, c, (f,) h, w]``."""
        sides = (1, *latent[2:])[-3:]
        frames, rows, columns = (-(-side // length) for side, length in zip(sides, self.patch, strict=True))
        return frames, rows, columns


# ComfyUI's position tables are [b, 1, text + n, d, 2, 2] and cover text and image.
_POSITIONS = TokenArgument("pe", axes=(2,), batched=True)
_FLUX = Layout("img", token_arguments=(_POSITIONS,), dense_if=("attn_mask",))
# Frames of a start picture have a modulation of their own, by their place in the sequence.
_HUNYUAN = Layout(
    "img",
    text="last",
    token_arguments=(_POSITIONS, TokenArgument("attention_mask", axes=(2,), batched=True)),
    dense_if=("modulation_dims", "modulation_dims_img"),
)
_WAN = Layout("img", token_arguments=(TokenArgument("pe", axes=(1,), batched=True),))

_FAMILIES = (
    Family(
        ("Flux", "Chroma"),
        (("double_blocks", "double_block", _FLUX), ("single_blocks", "single_block", _FLUX)),
    ),
    Family(("MMDiT",), (("joint_blocks", "double_block", Layout("img")),)),
    Family(("QwenImageTransformer2DModel",), (("transformer_blocks", "double_block", _FLUX),)),
    Family(("WanModel",), (("blocks", "double_block", _WAN),)),
    Family(
        ("HunyuanVideo",),
        (("double_blocks", "double_block", _HUNYUAN), ("single_blocks", "single_block", _HUNYUAN)),
    ),
)
# ComfyUI's names for the first part of the path of a UNet's block.
_WAYS: Mapping[str, str] = {"input_blocks": "input", "middle_block": "middle", "output_blocks": "output"}


def find_target(model: Any) -> Target:
    """What can merge in a ``ModelPatcher``.

    Raises:
        UnsupportedModelError: it holds no UNet, and no transformer whose blocks can be replaced.
    """
    root = getattr(getattr(model, "model", None), "diffusion_model", None)
    name = type(root).__name__
    if is_a(root, *compvis.CLASSES) and hasattr(root, "input_blocks"):
        blocks = [
            Block(_unet_key(block.path), block.module, block.level)
            for block in compvis.describe(root).blocks
            if not getattr(block.module, "disable_self_attn", False)
        ]
        if blocks:
            return Target(name, tuple(blocks), cuts=_cuts(root), work=_work(root, blocks))
    for family in _FAMILIES:
        if is_a(root, *family.classes):
            return Target(name, tuple(_blocks(root, family)), _patch(root))
    known = ", ".join(name for family in _FAMILIES for name in family.classes)
    raise UnsupportedModelError(
        f"model: expected a UNet with attention, or one of {known}, got {name}; ComfyUI lets a node "
        "replace blocks only in these, so leave Token Merging out of this workflow"
    )


def _unet_key(path: str) -> tuple[str, int, int]:
    """ComfyUI's (way, number, number within) of a block, from its path."""
    way, *within = path.split(".")
    return _WAYS[way], 0 if way == "middle_block" else int(within[0]), int(within[-1])


def _patch(root: Any) -> tuple[int, int, int]:
    """Frames, rows and columns of latent positions that make one token of a transformer."""
    size = root.patch_size
    return (1, size, size) if isinstance(size, int) else tuple(size)


def _cuts(unet: Any) -> tuple[Cut, ...]:
    """The cut above the deep stages, and the one before the last layer of the finest level."""
    inputs, outputs = unet.input_blocks, unet.output_blocks
    down = next((i for i, block in enumerate(inputs) if _has(block, "Downsample")), 0)
    up = max((i for i, block in enumerate(outputs) if _has(block, "Upsample")), default=-1)
    if not down or not 0 <= up < len(outputs) - 1:
        return ()  # one level alone
    deep = Cut(down, up + 1, _transformers(unet, up + 1))
    last = len(outputs) - 1
    return (deep, Cut(1, last, _transformers(unet, last), finest=True)) if deep.output < last else (deep,)


def _has(module: Any, name: str) -> bool:
    return any(is_a(part, name) for part in module.modules())


def _transformers(unet: Any, output: int) -> int:
    """Number of transformers before one of the output blocks."""
    stages = [*unet.input_blocks, unet.middle_block, *unet.output_blocks[:output]]
    return sum(is_a(part, "SpatialTransformer") for stage in stages for part in stage.modules())


def _work(unet: Any, blocks: Sequence[Block]) -> UNetWork:
    """How the work of a UNet's call is distributed."""
    weights: Counter[int] = Counter()
    level = 1
    for block in unet.input_blocks:
        level *= 1 + _has(block, "Downsample")
        weights[level] += _weights(block)
    weights[level] += _weights(unet.middle_block)
    for block in unet.output_blocks:
        weights[level] += _weights(block)
        level //= 1 + _has(block, "Upsample")
    return UNetWork(weights, tuple((block.level, block.channels) for block in blocks))


def _weights(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _blocks(root: Any, family: Family) -> list[Block]:
    return [
        Block((name, number), module, 1, layout)
        for attribute, name, layout in family.blocks
        for number, module in enumerate(getattr(root, attribute))
    ]
