"""The facts that a family's file gives about a model, its blocks, its layers, and the layouts of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenmerge.models.call import HostCall, parameters

GridShape = tuple[int, int, int]  # frames, rows, columns, in tokens
Grids = tuple[GridShape, ...]  # of the images in a sequence of tokens
Arguments = Mapping[str, Any]  # of a call, by name

# Names of sub-layers in messages and reports.
KINDS = {"attn1": "self-attention", "attn2": "cross-attention", "ff": "MLP"}


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

    It takes a third of the time, since PyTorch passes each module up through a generator for each level.
    """
    found = {root: None}
    level = [root]
    while level:
        below = [child for module in level for child in module._modules.values() if child is not None]
        level = [child for child in dict.fromkeys(below) if child not in found]
        found.update(dict.fromkeys(level))
    return list(found)


@dataclasses.dataclass(eq=False)
class Grid:
    """The token grids of the running call, noted by the module whose input shows them.

    A sequence has one grid, or one for each of its images: the one being made, then the references.
    """

    # For each grid an empty tensor of shape [frames, rows, columns, 0]: torch.compile makes a graph for each
    # value of an integer of a module, but can make one graph for all shapes of a tensor.
    sides: tuple[Tensor, ...] = dataclasses.field(default_factory=lambda: (torch.empty(0, 0, 0, 0),))
    given: bool = False  # the user gave the grid with ``Patch.at_size``

    @property
    def shapes(self) -> Grids:
        """(frames, rows, columns) of each grid."""
        # A list is made first, since blocks ask often, and a generator takes a Python call for each item.
        return tuple([(sides.shape[0], sides.shape[1], sides.shape[2]) for sides in self.sides])

    @shapes.setter
    def shapes(self, shapes: Grids) -> None:
        self.sides = tuple([torch.empty(*shape, 0) for shape in shapes])


@dataclasses.dataclass(frozen=True)
class TokenArgument:
    """An argument with an entry for each token, such as a position table or a mask."""

    name: str  # a missing argument, or None, is left alone
    axes: tuple[int, ...]  # of the tokens; an axis of length 1, which the host broadcasts, is left alone
    # The first axis is the batch (length 1: the same for all images). If it is not, and the images of a batch
    # have plans of their own, the host's attention is called for one image after the other.
    batched: bool = False
    # Its entries are the same for all tokens of the image, so that only their number follows these.
    alike: bool = False
    # Index of the element of a tuple, or key of the value of a dictionary, that has the entries. It is None
    # if the argument itself has them.
    element: int | str | None = None
    # The argument has such entries only if it has this number of axes, or with any number if this is None.
    ndim: int | None = None
    # The number of axes that the host broadcasts it to, or None if no axes are missing. Missing ones are
    # added in front, and ``axes`` count with them.
    broadcasts_to: int | None = None
    # Whether the block adds the entries [b, n, c] to its tokens, or joins them. Then they are combined as the
    # tokens are, by default to their mean. Otherwise a merged token gets the entry of the token whose place
    # it takes.
    combined: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the call of a block or a layer that takes tokens ``[b, n, c]``."""

    # The argument with the tokens, or None if it is the first one, as in every layer.
    tokens: str | None = None
    # Where text tokens stand if they share a sequence with the image, in the tokens or in a token argument.
    # Text never merges.
    text: Literal["first", "last"] = "first"
    # Name of a mask [b, text + n] that is true before the padding, or None if there is no padding. The
    # padding follows texts of different lengths and the image.
    padding: str | None = None
    token_arguments: tuple[TokenArgument, ...] = ()
    same_as_tokens: str | None = None  # name of an argument that may be the same tensor as the tokens
    # Indices of the image tokens in a result that is a tuple: first of the tokens for the next block, then of
    # further entries for each token.
    outputs: tuple[int, ...] = (0,)
    dense_if: tuple[str, ...] = ()  # arguments that only fit the whole grid: a call with one stays dense
    # Arguments that hold the whole batch, so that a call with one cannot be made for one image after the
    # other: it stays dense where that is needed.
    dense_by_image: tuple[str, ...] = ()
    # Whether the first axis of the tokens is the sequence, and the second one the batch.
    sequence_first: bool = False
    # Whether one call is enough for a batch whose images have plans of their own.
    batched: bool = dataclasses.field(init=False, default=True)

    def __post_init__(self) -> None:
        # It is no property, since each call of a layer asks.
        same = all(argument.batched or argument.alike for argument in self.token_arguments)
        object.__setattr__(self, "batched", same)

    def tokens_of(self, call: HostCall) -> Tensor:
        """Return the tokens of a call."""
        return call.argument(self.tokens or call.names[0])

    def start_of(self, call: HostCall, n: int) -> Tensor | None:
        """Return the first index of the n image tokens ``[b]``, or None if no padding stands behind them."""
        mask = call.argument(self.padding) if self.padding else None
        return None if mask is None else mask.sum(dim=1) - n

    def image(self, x: Tensor, n: int, start: Tensor | None = None) -> Tensor:
        """Return the n image tokens of a sequence.

        ``start`` ``[b]`` are their first indices, or None if these do not differ by image.
        """
        if start is not None:
            places = start.unsqueeze(1) + torch.arange(n, device=x.device)
            return x.take_along_dim(places.unsqueeze(-1), dim=1)
        if x.shape[1] == n:
            return x  # the very tensor, by which a run of blocks is recognised
        return x[:, x.shape[1] - n :] if self.text == "first" else x[:, :n]


PLAIN = Layout()  # image tokens only, and no argument with an entry for each
# Rotary positions with an entry for each image token, which the whole batch shares or each sample has.
POSITIONS = TokenArgument("image_rotary_emb", axes=(0,))
OWN_POSITIONS = TokenArgument("image_rotary_emb", axes=(1,), batched=True)
KEY_MASK = TokenArgument("attention_mask", axes=(-1,), batched=True)
ROTARY = Layout(token_arguments=(POSITIONS,))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A sub-layer that can run on merged tokens."""

    kind: Literal["attn1", "attn2", "ff"]  # self-attention or joint attention, cross-attention, the MLP
    name: str  # attribute of the block that holds it
    layout: Layout = PLAIN
    own_keys: bool = True  # the keys and values of attention come from the tokens that it is called with
    # Argument that gives self-attention other tokens for keys and values, or None if there is none.
    keys: str | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """One transformer block."""

    path: str  # its qualified name in the host
    module: Any
    layers: tuple[Layer, ...]  # those that can merge, in the order in which they run
    layout: Layout = PLAIN  # of its call, as far as the layers need it, and where the image is in the result
    block_layout: Layout | None = None  # of its call if it can run on merged tokens from start to end
    # Whether step reuse can skip it, because it returns as many tokens as it gets, alone or beside those of
    # its argument ``beside``. A block that needs the whole grid cannot merge, and can be skipped.
    skippable: bool = True
    # The argument with further tokens that it may return beside those of the image: of the text, or of sound.
    beside: str = "encoder_hidden_states"
    is_read_between: bool = False  # more than the next block reads its tokens, as by a skip connection
    method: str = "forward"  # the method that gradient checkpointing recomputes, or "_forward"
    # The module whose first argument [b, c, h, w] has the block's token grid, n = h·w, or None if the grid is
    # the model's.
    grid: nn.Module | None = None
    level: int = 1  # resolution level as a divisor of the host's finest token grid: 1, 2, 4 …
    # Kinds of sub-layer that cannot merge in this block, each with the reason as text.
    dense: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Whether all token arguments of its layers have a batch axis."""
        return all(layer.layout.batched for layer in self.layers)

    @property
    def plan_group(self) -> tuple[object, ...]:
        """A key that is the same in all blocks that can share a plan."""
        # On a UNet's way up tokens are alike in other ways than on its way down. All blocks of a transformer
        # have one plan, so that a stack of them can merge once.
        way = "" if self.grid is None else self.path.partition(".")[0]
        return self.level, way


# (root, arguments of a call, grids of the last call) → the finest token grid of each image in the sequence,
# the image being made first. It raises UnsupportedModelError if the tokens have none.
ReadGrids = Callable[[Any, Arguments, Grid], Grids]


def _all_of_it(root: Any, sample: Any) -> Any:
    return sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCall:
    """The names and functions that describe a call of a model."""

    sample: str = "hidden_states"  # name of the argument for the sample
    # Name of the argument for the timestep. For a model without one, a function: (root, arguments of a call)
    # → a number that differs between denoising steps.
    timestep: str | Callable[[Any, Arguments], Tensor] = "timestep"
    grids: ReadGrids
    takes_references: bool = False  # reference images may follow the image being made
    # (root, sample) → the part of the sample that is the same for all prompts of guidance.
    latents: Callable[[Any, Any], Any] = _all_of_it
    patch: int = 1  # side of the square of latent positions that makes one token
    described: bool = True  # a family describes its blocks; of other models no token grid is read
    # (arguments of a call) → whether it fills a cache for later calls, so that it runs dense, or None if no
    # call does.
    fills_cache: Callable[[Arguments], bool] | None = None
    parameters: tuple[str, ...] = ()  # names of all arguments, in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(ModelCall):
    """A denoiser or a ControlNet."""

    root: nn.Module
    blocks: tuple[Block, ...]  # in the order in which they run
    sample_size: tuple[int, int] | None  # height and width that the model was made for, if it says them
    # (height, width, batch, sizes of references if it takes them, frames=None) → arguments of a call at that
    # size. The frames are those of the token grid, or None for those that the model was made for.
    example: Callable[..., dict[str, Any]]
    controlnet: bool = False  # a ControlNet may stay dense next to a denoiser that merges
    frames: int = 1  # of the token grid that the model was made for; 1 for images
    # Latent frames that make one token, or 0 if it makes images or its batch holds the frames.
    patch_frames: int = 0
    limits: tuple[str, ...] = ()  # what users should know before merging in this model, as text
    # Paths and levels of the stages of a UNet, in the order in which they run; empty if none can be skipped.
    # All but the first and the last are deep. The layers behind them read the result of the last one alone.
    stages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Of a model whose blocks are not described, the paths of the modules that are skipped together, in the
    # order in which they run. An empty path is the model itself.
    span: tuple[str, ...] = ()
    unmerged: str = ""  # class and reason, "class: reason", if no token merges in it
    # Text tokens of a usual call, with others that share attention with the image, such as those of sound.
    # None stands for those of the argument ``encoder_hidden_states``.
    words: int | None = None
    # By a part of the path of modules, how often each works on a token: less than once, such as an expert, or
    # more often.
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Changes a copy without weights that counts FLOPs, if the model reads values of its tokens, or None.
    without_values: Callable[[Any], None] | None = None
    # Names of parameters that stay on the CPU in the copy without weights that counts FLOPs, because the
    # model uses their device in a way that the meta device does not support.
    on_cpu: tuple[str, ...] = ()

    @property
    def call(self) -> ModelCall:
        """The description of its call, without the model itself."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelCall)}
        return ModelCall(**{**facts, "parameters": tuple(parameters(type(self.root).forward))})

    @property
    def deep_stages(self) -> tuple[str, ...]:
        """Paths of the stages of a UNet below the finest level."""
        return tuple(self.stages)[1:-1]

    @property
    def shallow_stages(self) -> tuple[str, ...]:
        """Paths of its stages at the finest level."""
        return tuple(path for path in self.stages if path not in self.deep_stages)

    @property
    def can_skip(self) -> bool:
        """Whether step reuse can skip parts of it: stages of a UNet, or whole blocks."""
        return bool(self.stages or self.span) or any(block.skippable for block in self.blocks)

    def grid_at(self, height: int, width: int, frames: int | None = None) -> GridShape:
        """Return the finest token grid for a height and width of the sample.

        The ``frames`` are those of the grid. Without them, and in a model of images, they are those that
        the model was made for.
        """
        grid_frames = self.frames if frames is None or not self.patch_frames else frames
        return grid_frames, -(-height // self.patch), -(-width // self.patch)

    @property
    def usual_batch(self) -> int:
        """Batch size of a call for one image: 2 with guidance, or 1 if the model takes its scale."""
        return 1 if "guidance_embeds" in getattr(self.root, "config", {}) else 2
