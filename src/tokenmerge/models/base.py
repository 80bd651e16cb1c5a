"""The facts that a family's file gives about a model, its blocks and its layers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from tokenmerge.models.layout import PLAIN, Grid, Layout

GridShape = tuple[int, int, int]  # frames, rows, columns, in tokens
Grids = tuple[GridShape, ...]  # of the pictures in a sequence of tokens

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
    """A sub-layer that can run on merged tokens.

    Attributes:
        kind: ``"attn1"`` self-attention or joint attention, ``"attn2"`` cross-attention, ``"ff"`` the MLP.
        name: attribute of the block that holds it.
        layout: layout of its call.
        own_keys: whether the keys and values of attention come from the tokens that it is called with.
        keys: name of the argument that gives self-attention other tokens for keys and values; None: there is
            no such argument.
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
        layout: layout of the call, as far as the layers need it, and where the image is in the result.
        block_layout: layout of the call of the whole block, for blocks that can run on merged tokens from
            start to end; None: the block cannot.
        method: the method that gradient checkpointing recomputes: ``"forward"`` or ``"_forward"``.
        grid: the module whose first argument ``[b, c, h, w]`` has the block's token grid, n = h·w; None: the
            block has the grid of the whole model.
        level: resolution level as a divisor of the host's finest token grid: 1, 2, 4 …
        dense: kinds of sub-layer that cannot merge in this block, each with the reason as text.
    """

    path: str
    module: Any
    layers: tuple[Layer, ...]
    layout: Layout = PLAIN
    block_layout: Layout | None = None
    method: str = "forward"
    grid: nn.Module | None = None
    level: int = 1
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


def listed(root: Any, name: str, layers: tuple[Layer, ...], **facts: Any) -> tuple[Block, ...]:
    """Describe the blocks of one module list, each with the layers that it has and further facts."""
    blocks = []
    for i, block in enumerate(getattr(root, name)):
        own = tuple(layer for layer in layers if getattr(block, layer.name, None) is not None)
        blocks.append(Block(f"{name}.{i}", block, own, **facts))
    return tuple(blocks)


def is_called(module: object, text: str) -> bool:
    """Return whether the name of the class of an object, or of a base class, has this part."""
    return any(text in cls.__name__ for cls in type(module).__mro__)


def _all_of_it(root: Any, sample: Any) -> Any:
    return sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCall:
    """The names and functions that describe a call of a model.

    Attributes:
        sample: name of the argument for the sample.
        timestep: name of the argument for the timestep. For a model without one, a function: (root, arguments
            of a call by name) → a number that differs between denoising steps.
        grids: (root, arguments of a call by name, grids of the last call) → (frames, rows, columns) of the
            finest token grid of each picture in the sequence, the picture being made first. Raises
            UnsupportedModelError for a call whose tokens have none.
        takes_references: whether reference pictures may follow the picture being made.
        latents: (root, sample) → the part of the sample that is the same for all prompts of guidance.
        patch: side of the square of latent positions that makes one token.
        parameters: names of all arguments, in order.
    """

    sample: str
    timestep: str | Callable[[Any, Mapping[str, Any]], Tensor]
    grids: Callable[[Any, Mapping[str, Any], Grid], Grids]
    takes_references: bool = False
    latents: Callable[[Any, Any], Any] = _all_of_it
    patch: int = 1
    parameters: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(ModelCall):
    """A denoiser or a ControlNet.

    Attributes:
        root: the model.
        blocks: its transformer blocks in the order in which they run.
        sample_size: height and width of the sample that the model was made for; None if it does not say.
        example: ``(height, width, batch)`` → arguments by name of a call with a sample of that size. Models
            that take references get their heights and widths as a fourth argument.
        controlnet: whether it is a ControlNet. It may stay dense next to a denoiser that merges.
        frames: number of frames in the token grid that the model was made for; 1 for pictures.
        limits: what users should know before merging in this model, as text.
        deep_stages: paths of the UNet stages below the finest level, in the order in which they run. The
            finest level reads the result of the last one and no other. Empty for other models.
        shallow_stages: paths of the UNet stages at the finest level, in the order in which they run. The
            layers after them read the result of the last one and no other. Empty for other models.
        on_cpu: names of parameters that stay on the CPU in the copy without weights that counts FLOPs,
            because the model uses their device in a way that the meta device does not support.
    """

    root: nn.Module
    blocks: tuple[Block, ...]
    sample_size: tuple[int, int] | None
    example: Callable[..., dict[str, Any]]
    controlnet: bool = False
    frames: int = 1
    limits: tuple[str, ...] = ()
    deep_stages: tuple[str, ...] = ()
    shallow_stages: tuple[str, ...] = ()
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
