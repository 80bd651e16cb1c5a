"""The facts that a family's file gives about a model, its blocks and its layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from tokenmerge.models.layout import PLAIN, Grid, Layout

GridShape = tuple[int, int, int]  # frames, rows, columns, in tokens
Grids = tuple[GridShape, ...]  # of the pictures in a sequence of tokens
Arguments = Mapping[str, Any]  # of a call, by name

KINDS = {
    "attn1": "self-attention",
    "attn2": "cross-attention",
    "ff": "MLP",
}  # names of sub-layers in messages and reports


def is_a(module: object, *names: str) -> bool:
    """Return whether the class of an object, or a base class, has one of these names.

    It compares names, so that the libraries that define the classes need not be installed or imported.

    >>> is_a(nn.ReLU(), "Module")
    True
    """
    return any(cls.__name__ in names for cls in type(module).__mro__)


def is_called(module: object, text: str) -> bool:
    """Return whether the name of the class of an object, or of a base class, has this part."""
    return any(text in cls.__name__ for cls in type(module).__mro__)


def modules_in(root: nn.Module) -> list[nn.Module]:
    """Return the modules of ``root.modules()``, level by level.

    PyTorch passes each module up through one generator for each level above it, which takes three times as
    long. Models are searched each time that settings change.
    """
    found = {root: None}
    level = [root]
    while level:
        below = [child for module in level for child in module._modules.values() if child is not None]
        level = [child for child in dict.fromkeys(below) if child not in found]
        found.update(dict.fromkeys(level))
    return list(found)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A sub-layer that can run on merged tokens."""

    kind: Literal["attn1", "attn2", "ff"]  # self-attention or joint attention, cross-attention, the MLP
    name: str  # attribute of the block that holds it
    layout: Layout = PLAIN
    own_keys: bool = True  # the keys and values of attention come from the tokens that it is called with
    # Argument that gives self-attention other tokens for keys and values; None: there is no such argument.
    keys: str | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """One transformer block."""

    path: str  # its qualified name in the host
    module: Any
    layers: tuple[Layer, ...]  # those that can merge, in the order in which they run
    layout: Layout = PLAIN  # of its call, as far as the layers need it, and where the image is in the result
    block_layout: Layout | None = None  # of its call if it can run on merged tokens from start to end
    method: str = "forward"  # the method that gradient checkpointing recomputes, or "_forward"
    # The module whose first argument [b, c, h, w] has the block's token grid, n = h·w; None: it has the grid
    # of the whole model.
    grid: nn.Module | None = None
    level: int = 1  # resolution level as a divisor of the host's finest token grid: 1, 2, 4 …
    # Kinds of sub-layer that cannot merge in this block, each with the reason as text.
    dense: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Whether each image of a batch can have its own plan."""
        block_layout = self.block_layout is None or self.block_layout.batched
        return block_layout and all(layer.layout.batched for layer in self.layers)

    @property
    def plan_group(self) -> tuple[object, ...]:
        """What is the same in all blocks that can share a plan."""
        # On a UNet's way up tokens are alike in other ways than on its way down.
        return self.level, self.batched, self.path.partition(".")[0]


def layers_in(module: object, layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return those of the layers that a block has."""
    return tuple(layer for layer in layers if getattr(module, layer.name, None) is not None)


def listed(root: nn.Module, name: str, layers: tuple[Layer, ...], **facts: Any) -> tuple[Block, ...]:
    """Describe the blocks of one module list, each with the layers that it has and further facts."""
    blocks: Any = root.get_submodule(name)
    return tuple(
        Block(f"{name}.{i}", block, layers_in(block, layers), **facts) for i, block in enumerate(blocks)
    )


def _all_of_it(root: Any, sample: Any) -> Any:
    return sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCall:
    """The names and functions that describe a call of a model."""

    sample: str  # name of the argument for the sample
    # Name of the argument for the timestep. For a model without one, a function: (root, arguments of a call)
    # → a number that differs between denoising steps.
    timestep: str | Callable[[Any, Arguments], Tensor]
    # (root, arguments of a call, grids of the last call) → the finest token grid of each picture in the
    # sequence, the picture being made first. It raises UnsupportedModelError if the tokens have none.
    grids: Callable[[Any, Arguments, Grid], Grids]
    takes_references: bool = False  # reference pictures may follow the picture being made
    # (root, sample) → the part of the sample that is the same for all prompts of guidance.
    latents: Callable[[Any, Any], Any] = _all_of_it
    patch: int = 1  # side of the square of latent positions that makes one token
    parameters: tuple[str, ...] = ()  # names of all arguments, in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(ModelCall):
    """A denoiser or a ControlNet."""

    root: nn.Module
    blocks: tuple[Block, ...]  # in the order in which they run
    sample_size: tuple[int, int] | None  # height and width that the model was made for, if it says them
    # (height, width, batch) → arguments of a call with a sample of that size. Models that take references
    # get their heights and widths as a fourth argument.
    example: Callable[..., dict[str, Any]]
    controlnet: bool = False  # a ControlNet may stay dense next to a denoiser that merges
    frames: int = 1  # of the token grid that the model was made for; 1 for pictures
    limits: tuple[str, ...] = ()  # what users should know before merging in this model, as text
    # Paths of the stages of a UNet in the order in which they run: below the finest level, and at it. What
    # follows reads the result of the last one of each and no other. Empty for other models.
    deep_stages: tuple[str, ...] = ()
    shallow_stages: tuple[str, ...] = ()
    # Names of parameters that stay on the CPU in the copy without weights that counts FLOPs, because the
    # model uses their device in a way that the meta device does not support.
    on_cpu: tuple[str, ...] = ()

    @property
    def call(self) -> ModelCall:
        """The description of its call, without the model itself."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelCall)}
        parameters = tuple(inspect.signature(type(self.root).forward).parameters)[1:]
        return ModelCall(**{**facts, "parameters": parameters})

    @property
    def can_skip(self) -> bool:
        """Whether step reuse can skip parts of it: stages of a UNet, or whole blocks."""
        return bool(self.deep_stages) or any(block.block_layout is not None for block in self.blocks)

    def grid_at(self, height: int, width: int) -> GridShape:
        """Return the finest token grid for a height and width of the sample."""
        return self.frames, -(-height // self.patch), -(-width // self.patch)

    @property
    def usual_batch(self) -> int:
        """Batch size of a call for one picture: 2 with guidance, 1 if the model takes its scale."""
        return 1 if "guidance_embeds" in getattr(self.root, "config", {}) else 2
