"""What can merge in each of ComfyUI's models: UNets by their attention, transformers by whole blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import is_a
from tokenmerge.models.families import compvis
from tokenmerge.models.layout import Layout, TokenArgument


@dataclasses.dataclass(frozen=True)
class Family:
    """A transformer whose blocks ComfyUI lets a node replace.

    Attributes:
        classes: names of its classes.
        blocks: (attribute with the blocks, ComfyUI's name for one, layout of its call).
        patch: frames, rows and columns of latent positions that make one token.
    """

    classes: tuple[str, ...]
    blocks: tuple[tuple[str, str, Layout], ...]
    patch: tuple[int, int, int] = (1, 2, 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A block that can merge.

    Attributes:
        key: ComfyUI's name and number for it.
        module: the block.
        level: resolution level; 1 in transformers.
        layout: of the call of a transformer's block; None for the blocks of a UNet.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A model in which tokens can merge.

    Attributes:
        name: of its class.
        blocks: that can merge, in the order in which they run.
        patch: frames, rows and columns of latent positions that make one token at level 1.
    """

    name: str
    blocks: tuple[Block, ...]
    patch: tuple[int, int, int] = (1, 1, 1)

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
# Of UNets, the first part of a block's path, as ComfyUI calls it.
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
            return Target(name, tuple(blocks))
    for family in _FAMILIES:
        if is_a(root, *family.classes):
            return Target(name, tuple(_blocks(root, family)), family.patch)
    known = ", ".join(name for family in _FAMILIES for name in family.classes)
    raise UnsupportedModelError(
        f"model: expected a UNet with attention, or one of {known}, got {name}; ComfyUI lets a node "
        "replace the blocks of these alone, so leave Token Merging out of this workflow"
    )


def _unet_key(path: str) -> tuple[str, int, int]:
    """ComfyUI's (way, number, number within) of a block, from its path."""
    way, *within = path.split(".")
    return _WAYS[way], 0 if way == "middle_block" else int(within[0]), int(within[-1])


def _blocks(root: Any, family: Family) -> list[Block]:
    return [
        Block((name, number), module, 1, layout)
        for attribute, name, layout in family.blocks
        for number, module in enumerate(getattr(root, attribute))
    ]
