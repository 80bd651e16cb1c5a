"""What a family's file says about a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from tokenmerge.models.layout import PLAIN, Grid, Layout

__all__ = ["KINDS", "Block", "GridShape", "Host", "Layer", "is_a", "listed", "stacked"]

GridShape = tuple[int, int, int]  # frames, rows, columns, in tokens

KINDS = {"attn1": "self-attention", "attn2": "cross-attention", "ff": "MLP"}  # of sub-layers, in words


def is_a(module: object, *names: str) -> bool:
    """Whether the object's class, or one that it inherits from, has one of these names.

    Names instead of classes: the libraries that define them need not be installed or imported.

    >>> is_a(nn.ReLU(), "Module")
    True
    """
    return any(cls.__name__ in names for cls in type(module).__mro__)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A sub-layer that can run on merged tokens.

    Attributes:
        kind: ``"attn1"`` self-attention or joint attention, ``"attn2"`` cross-attention, ``"ff"`` the MLP.
        name: of the attribute of the block that holds it.
        layout: how it takes its tokens.
        own_keys: of attention, whether it looks at the tokens that it is called with.
        keys: name of the argument by which self-attention can be given other tokens to look at; None: there
            is no such argument.
    """

    kind: Literal["attn1", "attn2", "ff"]
    name: str
    layout: Layout = PLAIN
    own_keys: bool = True
    keys: str | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """One transformer block.

    Attributes:
        path: its qualified name in the host.
        module: the block.
        layers: its sub-layers that can merge, in the order in which they run.
        layout: how it takes its tokens.
        wide: how it takes them, what follows them and what it returns, where it can run on merged tokens as
            a whole; None: it cannot.
        method: the method that gradient checkpointing runs again: ``"forward"`` or ``"_forward"``.
        grid: the module whose first argument ``[b, c, h, w]`` has the block's token grid, n = h·w; None
            where it is that of the whole model.
        level: resolution level as a divisor of the host's finest token grid: 1, 2, 4 …
        dense: kinds of sub-layer that it has and that cannot merge, with the reason in words.
        stack: name of the run of blocks that it is in, each of which gets what the one before it returned,
            and nothing else touches; None: it is in none.
    """

    path: str
    module: Any
    layers: tuple[Layer, ...]
    layout: Layout = PLAIN
    wide: Layout | None = None
    method: str = "forward"
    grid: nn.Module | None = None
    level: int = 1
    dense: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stack: str | None = None

    @property
    def batched(self) -> bool:
        """Whether each image of a batch can have a plan of its own."""
        wide = self.wide is None or self.wide.batched
        return wide and all(layer.layout.batched for layer in self.layers)


def listed(root: Any, name: str, layers: tuple[Layer, ...], **facts: Any) -> tuple[Block, ...]:
    """The blocks of a list of a model, which all have the same layers; ``facts`` as for a :class:`Block`."""
    blocks = enumerate(getattr(root, name))
    return tuple(Block(f"{name}.{i}", block, layers, **facts) for i, block in blocks)


def stacked(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks of a transformer, a stack for each of its lists, but for its first and its last block.

    What the first makes of the noise, and what the last makes of the picture, differs most between tokens.
    """
    inner = (dataclasses.replace(block, stack=block.path.rpartition(".")[0]) for block in blocks[1:-1])
    return (*blocks[:1], *inner, *blocks[1:][-1:])


def _all_of_it(root: Any, sample: Any) -> Any:
    return sample


@dataclasses.dataclass(frozen=True)
class Host:
    """A denoiser or a ControlNet.

    Attributes:
        root: the model.
        blocks: its transformer blocks in the order in which they run.
        sample: name of its argument for the sample.
        timestep: name of its argument for the timestep, or, for a model that is not told the timestep,
            (root, arguments of a call by name) → a number that differs between denoising steps.
        grid: (root, arguments of a call by name, grid of the last call, or the one that the user gave) →
            (frames, rows, columns) of its finest token grid. Raises UnsupportedModelError for a call whose
            tokens it cannot tell.
        patch: side of the square of latent positions that makes one token.
        frames: of the token grid of a video that the model was made for; 1 for pictures.
        sample_size: height and width of the sample that the model was made for, if it says so.
        latents: (root, sample) → the part of the sample that is the same for all prompts of guidance.
        controlnet: whether it is a ControlNet, which may stay dense beside a denoiser that merges.
        example: ``(height, width, batch)`` → arguments by name of a call with a sample of that size.
        limits: what to know before merging it, in words.
        below: paths of the stages of a UNet below its finest level, in the order in which they run; the last
            one's result is what the finest level takes of them. Empty where there are none.
        finest: paths of what runs at that level before its last layer on the way up, in that order; the last
            one's result is what that layer takes of them. Empty where it takes more than that.
        finest_share: share of a call's work that is at that level, by the sizes of its weights.
        on_cpu: names of parameters that a copy without weights, for counting, has on the CPU all the same:
            the model does something with their device that tensors without values do not allow.
        between: names of its arguments that change tokens between the blocks of a stack, or leave blocks out.
    """

    root: nn.Module
    blocks: tuple[Block, ...]
    sample: str
    timestep: str | Callable[[Any, Mapping[str, Any]], Tensor]
    grid: Callable[[Any, Mapping[str, Any], Grid], GridShape]
    sample_size: tuple[int, int] | None
    controlnet: bool
    example: Callable[[int, int, int], dict[str, Any]]
    latents: Callable[[Any, Any], Any] = _all_of_it
    patch: int = 1
    frames: int = 1
    limits: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    finest: tuple[str, ...] = ()
    finest_share: float = 1.0
    on_cpu: tuple[str, ...] = ()
    between: tuple[str, ...] = ()

    @property
    def can_pause(self) -> bool:
        """Whether something of it need not run on every step: stages of a UNet, or whole blocks."""
        return bool(self.below) or any(block.wide is not None for block in self.blocks)
