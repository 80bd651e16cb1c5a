"""What can merge in each of ComfyUI's models: attention in UNets, whole blocks in transformers."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Layout, TokenArgument, is_a
from tokenmerge.models.families import compvis
from tokenmerge.models.grids import patch_of
from tokenmerge.models.work import Amount, Part, PlanningWork, Share, Work

Key = tuple[Any, ...]  # ComfyUI's name and numbers for a block or a stage


@dataclasses.dataclass(frozen=True, eq=False)
class MergingBlock:
    """A block that can merge."""

    key: Key
    module: Any
    level: int  # resolution level, which is 1 in transformers
    layout: Layout | None = None  # layout of the block's call in a transformer, or None in a UNet

    @property
    def merging(self) -> Any:
        """The module whose tokens merge: the whole block, or the self-attention of a UNet's block."""
        return self.module.attn1 if self.layout is None else self.module

    @property
    def channels(self) -> int:
        """Channels of its tokens, or 0 if its weights do not say."""
        return min((weight.shape[1] for weight in self.merging.parameters() if weight.ndim == 2), default=0)

    @property
    def amount(self) -> Amount:
        """The work on its tokens, of what merges."""
        return Amount(per_token=weights_of(self.merging), per_pair=2 * self.channels)

    @property
    def heads(self) -> int:
        """Heads of its attention, or 0 if they are unknown."""
        for part in self.module.modules():
            for name in ("num_heads", "n_heads", "heads"):
                heads = getattr(part, name, None)
                if isinstance(heads, int):
                    return heads
        return 0


Stage = tuple[str, int, nn.Module, int]  # of a UNet: ComfyUI's name and number for it, module and level


class Cut(NamedTuple):
    """Where a UNet is cut between its finest level, which runs, and its deep stages, which are skipped."""

    inputs: int  # number of ``input_blocks`` that run
    output: int  # index of the first of the ``output_blocks`` that run; it gets the result of what is skipped
    transformers: int  # number of transformers up to there

    def runs(self, way: str, number: int) -> bool:
        """Return whether a stage, by ComfyUI's name and number, is at the finest level."""
        if way == "output":
            return number >= self.output
        return way == "input" and number < self.inputs


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A model in which tokens can merge."""

    name: str  # of its class
    blocks: tuple[MergingBlock, ...]  # in the order in which they run
    work: Work  # of a dense call
    # Frames, rows and columns of latent positions that make one token at level 1.
    patch: tuple[int, int, int] = (1, 1, 1)
    cut: Cut | None = None  # in a UNet with several levels, for steps that skip its deep stages

    @property
    def is_unet(self) -> bool:
        """Whether its attention merges; otherwise its whole blocks do."""
        return self.blocks[0].layout is None

    @property
    def can_skip(self) -> bool:
        """Whether steps can skip a part of it."""
        return not self.is_unet or self.cut is not None

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels at which it has attention, the finest first."""
        return tuple(sorted({block.level for block in self.blocks}))

    def grid(self, latent: Sequence[int]) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of the tokens at level 1, for latents ``[b, c, (f,) h, w]``."""
        has_frames = len(latent) > 4
        sides = latent[-3:] if has_frames else (1, *latent[2:])
        frames, rows, columns = (-(-side // length) for side, length in zip(sides, self.patch, strict=True))
        return frames, rows, columns


# ComfyUI's position tables are [b, 1, text + n, d, 2, 2] and cover text and image.
_POSITIONS = TokenArgument("pe", axes=(2,), batched=True)
_FLUX = Layout("img", token_arguments=(_POSITIONS,), dense_if=("attn_mask",))
# Frames of a start image have a modulation of their own, by their place in the sequence.
_HUNYUAN = Layout(
    "img",
    text="last",
    token_arguments=(_POSITIONS, TokenArgument("attention_mask", axes=(2,), batched=True)),
    dense_if=("modulation_dims", "modulation_dims_img"),
)
_WAN = Layout("img", token_arguments=(TokenArgument("pe", axes=(1,), batched=True),))

# Transformers whose blocks ComfyUI lets a node replace, by the names of their classes. For each list of
# blocks: the attribute that has it, ComfyUI's name for one, and the layout of its call.
_REPLACEABLE: Mapping[tuple[str, ...], Sequence[tuple[str, str, Layout]]] = {
    ("Flux", "Chroma"): [("double_blocks", "double_block", _FLUX), ("single_blocks", "single_block", _FLUX)],
    ("MMDiT",): [("joint_blocks", "double_block", Layout("img"))],
    ("QwenImageTransformer2DModel",): [("transformer_blocks", "double_block", _FLUX)],
    ("WanModel",): [("blocks", "double_block", _WAN)],
    ("HunyuanVideo",): [
        ("double_blocks", "double_block", _HUNYUAN),
        ("single_blocks", "single_block", _HUNYUAN),
    ],
}


def find_target(model: Any) -> Target:
    """Return what can merge in a ``ModelPatcher``, or refuse a model in which nothing can."""
    root: Any = getattr(getattr(model, "model", None), "diffusion_model", None)
    name = type(root).__name__
    if is_a(root, *compvis.CLASSES) and hasattr(root, "input_blocks"):
        blocks = tuple(_blocks_of_unet(root))
        if blocks:
            stages = [(*_key(path), stage, level) for path, stage, level in compvis.stages_of(root)]
            cut = _cut(stages)
            return Target(name, blocks, _work_of_unet(stages, blocks, cut), cut=cut)
    for classes, lists in _REPLACEABLE.items():
        if is_a(root, *classes):
            found = tuple(_blocks_of_transformer(root, lists))
            plan = _plan(found, "block", {"blocks"})
            work = Work(_shares(root, found, 1, "block", "always", "blocks"), (plan,))
            return Target(name, found, work, patch_of(root))
    known = ", ".join(itertools.chain.from_iterable(_REPLACEABLE))
    raise UnsupportedModelError(
        f"model: expected a UNet with attention, or one of {known}, got {name}; ComfyUI lets a node "
        "replace blocks only in these, so leave Token Merging out of this workflow"
    )


def _blocks_of_unet(root: nn.Module) -> Iterator[MergingBlock]:
    for block in compvis.describe(root).blocks:
        if not getattr(block.module, "disable_self_attn", False):
            number = int(block.path.rpartition(".")[2])
            yield MergingBlock((*_key(block.path), number), block.module, block.level)


def _blocks_of_transformer(
    root: nn.Module, lists: Sequence[tuple[str, str, Layout]]
) -> Iterator[MergingBlock]:
    for attribute, name, layout in lists:
        for number, module in enumerate(getattr(root, attribute)):
            yield MergingBlock((name, number), module, 1, layout)


def _key(path: str) -> tuple[str, int]:
    """Return ComfyUI's name and number of a UNet's stage, from the path of the stage or of a block in it."""
    parts = path.split(".")
    return parts[0].partition("_")[0], 0 if parts[0] == "middle_block" else int(parts[1])


def _cut(stages: Sequence[Stage]) -> Cut | None:
    """Return the cut above the deep stages, or None if there is one level alone."""
    finest = [(way, number) for way, number, _, level in stages if level == 1]
    inputs = sum(way == "input" for way, _ in finest)
    outputs = [number for way, number in finest if way == "output"]
    if not inputs or not outputs or len(finest) == len(stages):
        return None
    before = [stage for way, number, stage, _ in stages if way != "output" or number < outputs[0]]
    transformers = 0
    for stage in before:
        transformers += sum(is_a(part, "SpatialTransformer") for part in stage.modules())
    return Cut(inputs, outputs[0], transformers)


def _work_of_unet(stages: Sequence[Stage], blocks: Sequence[MergingBlock], cut: Cut | None) -> Work:
    def part(way: str, number: int) -> Part:
        if cut is None:
            return "always"
        return "finest" if cut.runs(way, number) else "deep"

    shares: list[Share] = []
    for way, number, module, level in stages:
        of_stage = [block for block in blocks if block.key[:2] == (way, number)]
        shares += _shares(module, of_stage, level, "layers", part(way, number), part(way, number))
    groups: dict[tuple[str, int], list[MergingBlock]] = defaultdict(
        list
    )  # the blocks of a group can share a plan
    for block in blocks:
        groups[block.key[0], block.level].append(block)
    plans = (_plan(group, "layers", {part(*block.key[:2]) for block in group}) for group in groups.values())
    return Work(tuple(shares), tuple(plans))


def _plan(blocks: Sequence[MergingBlock], scope: str, parts: Set[Part]) -> PlanningWork:
    first = blocks[0]
    return PlanningWork(frozenset(parts), first.level, first.channels, frozenset({scope}), len(blocks))


def _shares(
    module: nn.Module, blocks: Sequence[MergingBlock], level: int, scope: str, part: Part, merging_part: Part
) -> tuple[Share, Share]:
    """Return the work of a module apart from what merges in its blocks, and the work of that."""
    merging = sum((block.amount for block in blocks), Amount())
    rest = Amount(per_token=max(0, weights_of(module) - merging.per_token))
    return Share(part, level, frozenset(), rest), Share(merging_part, level, frozenset({scope}), merging)


# Parts of the names of weights that multiply text, or one vector for the whole image.
_OF_OTHERS = ("txt", "context_block", "add_", "mod", "cross_attn.k", "cross_attn.v")


def weights_of(module: nn.Module) -> int:
    """Return the number of weights of a module that multiply each token of the image."""
    total = 0
    for name, weight in module.named_parameters():
        if weight.ndim >= 2 and not any(part in name for part in _OF_OTHERS):
            total += weight.numel()
    return total
