"""Facts about ppdiffusers' models: where the blocks are, their level, and their token grid."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from paddle import nn
from ppdiffusers import DiffusionPipeline, Transformer2DModel
from ppdiffusers.configuration_utils import ConfigMixin
from ppdiffusers.models.attention import BasicTransformerBlock

from tokenmerge.errors import UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class PaddleBlock:
    """A ``BasicTransformerBlock``."""

    layer: Any
    path: str  # its qualified name in the model
    transformer: Any  # the ``Transformer2DModel`` around it, which makes its tokens
    level: int  # resolution level: 1, 2, 4 …

    @property
    def sub_layers(self) -> tuple[str, ...]:
        """Those of ``attn1``, ``attn2`` and ``ff`` that can merge. A ``ff`` in chunks of tokens cannot."""
        names = ("attn1", "attn2") if self.layer._chunk_size else ("attn1", "attn2", "ff")
        return tuple(name for name in names if getattr(self.layer, name, None) is not None)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of its tokens for a sample of this size."""
        patch = self.transformer.patch_size if self.transformer.is_input_patches else 1
        return -(-height // self.level) // patch, -(-width // self.level) // patch

    @property
    def own_keys(self) -> bool:
        """Whether ``attn1`` attends to the image, and not to the text."""
        return not self.layer.only_cross_attention


@dataclasses.dataclass(frozen=True)
class PaddleModel:
    """A model that tokens can be merged in: a UNet, a ControlNet, or a transformer such as DiT."""

    root: Any
    blocks: tuple[PaddleBlock, ...]  # in the order of its layers

    @property
    def name(self) -> str:
        """Its class."""
        return type(self.root).__name__

    @property
    def sample_size(self) -> tuple[int, int] | None:
        """Default height and width of the sample, or None if it has none."""
        size = getattr(self.root.config, "sample_size", None)
        if isinstance(size, int):
            return size, size
        return (int(size[0]), int(size[1])) if size else None


def find_hosts(pipe_or_layer: Any) -> tuple[PaddleModel, ...]:
    """Return the models in a pipeline or a layer in which tokens can merge, each once, and at least one."""
    found = {}
    for layer in _layers(pipe_or_layer):
        for host in _hosts(layer):
            found[id(host.root)] = host
    if not found:
        raise UnsupportedModelError(
            f"no model to merge tokens in: found {type(pipe_or_layer).__name__}; pass a pipeline of "
            "ppdiffusers, or a model with a Transformer2DModel in it, such as pipe.unet"
        )
    return tuple(found.values())


@functools.cache
def parameters_of(method: Callable) -> tuple[str, ...]:
    """Return the names of a method's parameters after ``self``. A model's first one is the sample."""
    return tuple(inspect.signature(method).parameters)[1:]


def _layers(pipe_or_layer: Any) -> Iterator[nn.Layer]:
    if isinstance(pipe_or_layer, nn.Layer):
        yield pipe_or_layer
    elif isinstance(pipe_or_layer, DiffusionPipeline):
        for name, component in pipe_or_layer.components.items():
            parts = component if isinstance(component, (list, tuple)) else [component]
            if name not in ("vae", "vqvae"):
                yield from (part for part in parts if isinstance(part, nn.Layer))


def _hosts(layer: nn.Layer) -> Iterator[PaddleModel]:
    """Yield the layer itself if it is a model, or else the models in it, such as ControlNets."""
    parts = layer.named_sublayers(include_self=True)
    transformers = {path: part for path, part in parts if _makes_a_grid(part)}
    is_model = isinstance(layer, ConfigMixin) and "timestep" in parameters_of(type(layer).forward)
    if is_model and transformers:
        yield PaddleModel(layer, tuple(_blocks(layer, transformers)))
    elif transformers:
        for child in layer.children():
            yield from _hosts(child)


def _makes_a_grid(layer: nn.Layer) -> bool:
    """Return whether a layer is a transformer that makes a grid of tokens."""
    if not isinstance(layer, Transformer2DModel) or layer.inference_optimize:
        return False
    return bool(layer.is_input_continuous or layer.is_input_patches)


def _blocks(root: Any, transformers: dict[str, Any]) -> Iterator[PaddleBlock]:
    levels = dict(_stages(root))
    for path, transformer in transformers.items():
        level = levels.get(".".join(path.split(".")[:2]), levels.get(path.split(".")[0], 1))
        for i, layer in enumerate(transformer.transformer_blocks):
            if isinstance(layer, BasicTransformerBlock):
                name = f"{path}.transformer_blocks.{i}".lstrip(".")
                yield PaddleBlock(layer, name, transformer, level)


def _stages(root: Any) -> Iterator[tuple[str, int]]:
    """Yield path and resolution level of each stage of a UNet or a ControlNet."""
    level = 1
    for i, stage in enumerate(getattr(root, "down_blocks", ())):
        yield f"down_blocks.{i}", level
        level *= 1 if getattr(stage, "downsamplers", None) is None else 2
    yield "mid_block", level
    for i, stage in enumerate(getattr(root, "up_blocks", ())):
        yield f"up_blocks.{i}", level
        level //= 1 if getattr(stage, "upsamplers", None) is None else 2
